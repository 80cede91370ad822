import asyncio
from dataclasses import dataclass
from time import monotonic

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import BatchingSettings
from cluster.errors import BackendFailed
from deployments.replicas.batching import AHEAD_S, GATHER_S, MADE_UP_AFTER_S, alike, engine_batcher
from tests.waiting import passed, settled

pytestmark = pytest.mark.virtual_time


def limits(**changes):
    return BatchingSettings(**{"max_requests": 4, "max_tokens": 100, "max_wait_ms": 20, "free_padding": 0, **changes})


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([10, 10], [0, 1]),
        ([10] * 9, [0, 1, 2, 3]),  # by number
        ([50, 50, 50], [0, 1]),  # by padded size: 3 x 50 > 100
        ([10, 90, 10], [0, 2]),  # by length: the engine would compute 80 rows of padding
        ([10, 20, 9, 11], [0, 2, 3]),  # 3 x 11 rows, 3 of them padding
        ([20, 10, 19], [0, 2]),
        ([500, 1], [0]),  # a request larger than the budget still goes, alone
        ([], []),
    ],
)
def test_a_batch_holds_what_is_alike_and_fits_by_number_and_padded_size(rows, expected):
    assert alike(rows, limits()) == expected


def test_where_padding_costs_nothing_length_does_not_matter():
    assert alike([10, 20, 30], limits(max_padding=1.0)) == [0, 1, 2]


def test_some_rows_of_padding_cost_less_than_a_call_of_the_engine():
    rows = [3, 19, 7, 12]
    assert alike(rows, limits()) == [0]
    assert alike(rows, limits(free_padding=35)) == [0, 1, 2, 3]  # 4 x 19 rows, 35 of them padding
    assert alike(rows, limits(free_padding=34)) == [0, 2, 3]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.floats(0, 0.5))
def test_the_longest_waiting_is_always_served_and_no_batch_is_padded_more_than_it_may_be(rows, share):
    rules = limits(max_requests=8, max_padding=share)
    waiting = list(enumerate(rows))
    while waiting:
        chosen = alike([length for _, length in waiting], rules)
        assert chosen[0] == 0
        lengths = [waiting[position][1] for position in chosen]
        padded = max(lengths) * len(lengths)
        assert padded - sum(lengths) <= share * padded + 1e-9
        waiting = [one for position, one in enumerate(waiting) if position not in chosen]


class Engine:
    """Doubles its requests, once `gate` is open."""

    def __init__(self, most_rows=None, **changes):
        self.batches, self.waited, self.gate = [], [], asyncio.Event()
        self.gate.set()
        self.limits = limits(**changes)
        self.takes_one_by_one = False
        self.batcher = engine_batcher(
            self.compute,
            self.limits,
            lambda one: one.rows,
            lambda: LATE,
            self.watch,
            most_rows=most_rows,
            one_by_one=lambda: self.takes_one_by_one,
        )

    async def that_is_fast(self):
        """With a batch that took no time behind it."""
        await self.batcher.submit(Asked(0))
        self.batches.clear()
        return self

    async def compute(self, batch):
        self.batches.append([one.name for one in batch])
        await self.gate.wait()
        if any(one.name == "poison" for one in batch):
            raise RuntimeError("engine thread died")
        if any(one.name == "cancelled" for one in batch):
            raise asyncio.CancelledError
        return [2 * one.name for one in batch]

    def watch(self, rows, waited_s):
        self.waited.append((list(rows), max(waited_s)))

    def asked(self, *names, **more):
        return [self.batcher.submit(Asked(name, **more)) for name in names]


class SlowEngine(Engine):
    """Takes `each_s` for a request, one batch after the other, and notes how large its batches are."""

    each_s = 0.01

    def __init__(self, **changes):
        super().__init__(**changes)
        self.thread = asyncio.Lock()

    async def compute(self, batch):
        self.batches.append(len(batch))
        async with self.thread:
            await asyncio.sleep(self.each_s * len(batch))
        return [2 * one.name for one in batch]


@dataclass
class Asked:
    name: object
    rows: int = 1
    deadline: float | None = None


LATE = "too late"


async def test_requests_that_arrive_together_share_a_batch_and_keep_their_order():
    engine = Engine()
    assert await asyncio.gather(*engine.asked(*range(10))) == [2 * number for number in range(10)]
    assert [len(batch) for batch in engine.batches] == [4, 4, 2]


async def test_the_first_request_waits_for_others_no_longer_than_it_may_and_not_at_all_where_a_batch_is_full():
    engine = Engine(max_wait_ms=1000)
    began = monotonic()
    await asyncio.gather(*engine.asked(*range(4)))
    assert monotonic() - began < 0.5
    first = engine.asked("first")
    await settled()
    await asyncio.gather(*first, *engine.asked("second"))
    assert engine.batches[1:] == [["first", "second"]]
    assert 1.0 <= monotonic() - began < 1.5
    assert engine.waited[-1] == ([1, 1], pytest.approx(1.0, abs=0.1))


async def test_behind_a_batch_of_several_a_request_waits_a_moment_for_as_many_and_behind_a_lone_one_for_none():
    engine = Engine(max_wait_ms=0)
    await asyncio.gather(*engine.asked(1, 2, 3))
    began, first = monotonic(), engine.asked("first")
    await asyncio.sleep(GATHER_S / 2)
    await asyncio.gather(*first, *engine.asked("second", "third"))
    assert monotonic() - began == pytest.approx(GATHER_S / 2, abs=1e-6)
    for waits_s in (GATHER_S, 0.0):
        began = monotonic()
        await asyncio.gather(*engine.asked("alone"))
        assert monotonic() - began == pytest.approx(waits_s, abs=1e-6)
    assert engine.batches == [[1, 2, 3], ["first", "second", "third"], ["alone"], ["alone"]]


async def test_a_batch_that_breaks_as_a_whole_tells_its_callers_and_the_next_batch_runs():
    engine = Engine(max_requests=2)
    answers = await asyncio.gather(*engine.asked("poison", 1, 2, 3), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["engine thread died", "engine thread died", "4", "6"]


async def test_a_batch_that_is_cancelled_from_within_leaves_no_caller_waiting_and_the_next_batch_runs():
    """By a call of its own that was cancelled, as that to a replica which Serve stops."""
    engine = Engine(max_requests=2)
    async with asyncio.timeout(60):
        answers = await asyncio.gather(*engine.asked("cancelled", 1, 2, 3), return_exceptions=True)
    assert [str(answer) for answer in answers] == ["its batch was cancelled", "its batch was cancelled", "4", "6"]
    assert isinstance(answers[0], BackendFailed), "for which another engine answers"


async def test_while_the_engine_is_busy_the_next_batch_gathers():
    engine = Engine(max_wait_ms=0)
    engine.gate.clear()
    first = engine.asked(0)
    await settled()
    rest = engine.asked(1, 2, 3)
    await settled()
    engine.gate.set()
    assert await asyncio.gather(*first, *rest) == [0, 2, 4, 6]
    assert engine.batches == [[0], [1, 2, 3]]


async def test_behind_a_batch_that_takes_its_time_the_next_one_is_made_up_and_those_after_it_gather():
    engine = await Engine(max_wait_ms=0).that_is_fast()
    engine.gate.clear()
    answers = []
    for number in range(4):
        answers += engine.asked(number)
        await asyncio.sleep(MADE_UP_AFTER_S + 0.001)
    assert engine.batches == [[0], [1]]
    assert engine.batcher.waiting == 3, "the one in the second batch does too"
    assert engine.batcher.under_way == 4
    engine.gate.set()
    assert await asyncio.gather(*answers) == [0, 2, 4, 6]
    assert engine.batches == [[0], [1], [2, 3]]


async def test_behind_a_batch_of_an_engine_that_takes_long_none_is_made_up_for_callers_that_may_leave_meanwhile():
    engine = await Engine(max_wait_ms=0).that_is_fast()
    for took_s in (AHEAD_S * 2, 0.0):
        engine.gate.clear()
        first = engine.asked("first")
        await asyncio.sleep(took_s)
        engine.gate.set()
        await first[0]
        engine.batches.clear()
        engine.gate.clear()
        waiting = engine.asked("first")
        await asyncio.sleep(MADE_UP_AFTER_S * 2)
        waiting += engine.asked("second")
        await asyncio.sleep(MADE_UP_AFTER_S * 2)
        assert engine.batches == ([["first"]] if took_s else [["first"], ["second"]])
        engine.gate.set()
        await asyncio.gather(*waiting)


async def test_behind_a_batch_that_has_just_begun_the_next_one_is_made_up_once_it_is_full():
    engine = await Engine(max_wait_ms=0, max_requests=2).that_is_fast()
    engine.gate.clear()
    first = engine.asked(0)
    await settled()
    second = engine.asked(1)
    await settled()
    assert engine.batches == [[0]]
    second += engine.asked(2)
    await settled()
    assert engine.batches == [[0], [1, 2]]
    engine.gate.set()
    assert await asyncio.gather(*first, *second) == [0, 2, 4]


async def test_batches_become_smaller_while_they_take_longer_than_they_may_and_larger_again_afterwards():
    """The engine takes 10 ms a request, or 1 ms: 40 ms are 4 requests, or all 32 that may go together."""
    engine = SlowEngine(max_requests=32, max_tokens=1000, target_ms=40)
    await asyncio.gather(*engine.asked(*range(400)))
    assert 2 <= max(engine.batches[-10:-1]) <= 6
    engine.each_s = 0.001
    await asyncio.gather(*engine.asked(*range(4000)))
    assert engine.batches[-2] == 32


async def test_a_batch_that_became_smaller_waits_for_no_more_once_it_is_full():
    engine = SlowEngine(max_requests=32, max_tokens=1000, target_ms=40, max_wait_ms=1000)
    engine.each_s = 0.1
    await asyncio.gather(*engine.asked(*range(100)))
    assert engine.batches[-2] == 2, "a sixteenth"
    began = monotonic()
    await asyncio.gather(*engine.asked(1, 2))
    assert monotonic() - began == pytest.approx(0.2, abs=0.05)


async def test_requests_that_are_too_late_to_be_computed_make_no_batch_larger():
    engine = SlowEngine(max_requests=32, max_tokens=1000, target_ms=40)
    await asyncio.gather(*engine.asked(*range(400)))
    for _ in range(20):
        assert await asyncio.gather(*engine.asked(*range(32), deadline=0.0)) == [LATE] * 32
    engine.batches.clear()
    await asyncio.gather(*engine.asked(*range(32)))
    assert engine.batches[0] <= 6


async def test_a_caller_that_goes_away_leaves_the_queue_and_takes_no_other_along():
    engine = Engine(max_wait_ms=0)
    engine.gate.clear()
    first = engine.asked("first")
    await settled()
    gone, stays = engine.asked("gone", "stays")
    await settled()
    gone.cancel()
    first[0].cancel()
    engine.gate.set()
    assert await stays == "staysstays"
    assert engine.batches == [["first"], ["stays"]], "an engine ends what it has begun"


async def test_what_is_past_its_deadline_is_not_computed():
    engine = Engine(max_wait_ms=0)
    late, timely = engine.asked("late", deadline=monotonic() - 1) + engine.asked("timely", deadline=monotonic() + 60)
    assert await asyncio.gather(late, timely) == [LATE, "timelytimely"]
    assert engine.batches == [["timely"]]
    assert await engine.asked("late", deadline=monotonic() - 1)[0] == LATE
    assert engine.batches == [["timely"]]


@pytest.mark.parametrize("forecast", [None, lambda one: 100 * one.rows], ids=["exact rows", "a hundredth of the most"])
async def test_what_would_end_too_late_is_not_computed_while_batches_are_slow_and_one_stall_deters_no_request(forecast):
    engine = SlowEngine(max_wait_ms=0, most_rows=forecast)

    async def asked(takes_s, within_s, rows=40):
        engine.each_s = takes_s
        return await engine.batcher.submit(Asked(1, rows=rows, deadline=monotonic() + within_s))

    assert [await asked(2, 60), await asked(0.01, 1), await asked(2, 1), await asked(2, 60), await asked(2, 60)] == [2] * 5
    assert await asked(2, 1) == LATE, "the latest two took 2 s each"
    assert await asked(0.01, 1, rows=10) == 2, "a quarter of the rows may take a quarter of the time"
    assert [await asked(2, 60), await asked(2, 60), await asked(2, 60), await asked(2, 1)] == [2, 2, 2, LATE]
    late, timely = engine.asked(1, rows=40, deadline=monotonic() - 1) + engine.asked(1, rows=10, deadline=monotonic() + 1)
    assert await asyncio.gather(late, timely) == [LATE, 2], "what is past its deadline already takes no time"
    assert [await asked(2, 60), await asked(2, 60)] == [2, 2]
    await passed(1.5)
    assert await asked(0.01, 1) == 2, "both are long ago"


async def test_batches_that_took_long_for_more_rows_than_foreseen_say_nothing_of_one_of_few():
    engine = SlowEngine(max_wait_ms=0, most_rows=lambda request: 100 * request.rows)
    for engine.each_s in (0.01, 2, 2):
        await engine.batcher.submit(Asked(1, rows=1, deadline=monotonic() + 60))
    engine.each_s = 0.01
    assert await engine.batcher.submit(Asked(1, rows=1, deadline=monotonic() + 1)) == 2


async def test_batches_wait_for_no_request_that_was_given_alone_and_for_each_other_as_ever():
    engine = Engine(max_wait_ms=0, max_requests=2)
    engine.takes_one_by_one = True
    engine.gate.clear()
    hang = engine.asked(*range(10))
    await settled()
    assert engine.batches == [[number] for number in range(10)]
    engine.takes_one_by_one, gate, engine.gate = False, engine.gate, asyncio.Event()
    rest = engine.asked("a", "b", "c", "d")
    await settled()
    assert engine.batches[10:] == [["a", "b"]]
    engine.gate.set()
    assert await asyncio.gather(*rest) == ["aa", "bb", "cc", "dd"]
    assert not any(one.done() for one in hang)
    gate.set()
    assert await asyncio.gather(*hang) == [2 * number for number in range(10)]


async def test_a_batcher_that_is_idle_leaves_nothing_running():
    engine = Engine()
    assert await engine.asked(1)[0] == 2
    await settled()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert await asyncio.gather(*engine.asked(*range(9))) == [2 * number for number in range(9)], "and goes on when it is asked again"
