"""One request, sent as often as helps: over calls that a test decides the end of, in time that a test need not wait for."""

import asyncio
from time import monotonic

import pytest

from cluster.traffic.attempts import FIRST_PAUSE_S, GRACE_S, STALLED_LEAST_S, STALLED_SHARE, Attempts, Rules
from cluster.traffic.hedging import ENOUGH, Durations, Hedge
from cluster.traffic.retry_budget import RetryBudget
from tests.fakes.clock import Clock

pytestmark = pytest.mark.virtual_time


class Died(Exception):
    pass


class Replicas:
    """Each call meets the next of `ends`: a value, an error, or None where it never ends."""

    def __init__(self, *ends):
        self.ends, self.sent, self.cancelled, self.left = list(ends), 0, 0, []
        self.began = monotonic()
        self.sent_at: list[float] = []

    async def send(self, number, left_s):
        assert number == self.sent
        self.sent += 1
        self.left.append(left_s)
        self.sent_at.append(round(monotonic() - self.began, 6))
        end = self.ends.pop(0)
        try:
            await (asyncio.sleep(0) if end is not None else asyncio.sleep(60))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if isinstance(end, Exception):
            raise end
        return end


def better(call):
    return isinstance(call.exception(), Died)


def generous() -> Rules:
    return Rules(RetryBudget(least_per_s=100), random=lambda: 0.5)


def fast() -> Durations:
    """Of replicas that answer within 5 ms."""
    clock = Clock()
    durations = Durations(clock)
    for _ in range(ENOUGH):
        durations.answered(0.001)
    clock.advance(2)
    return durations


async def attempt(replicas: Replicas, rules: Rules, **more):
    return await Attempts(replicas.send, better, rules, **{"within_s": 5.0, "tries": 3, **more}).answer()


async def test_an_answer_takes_one_call():
    replicas = Replicas("answer")
    assert await attempt(replicas, generous()) == "answer"
    assert replicas.sent == 1
    assert replicas.left == [5]


async def test_a_call_that_dies_is_made_again_after_a_pause_with_the_time_that_is_left():
    replicas = Replicas(Died(), Died(), "answer")
    assert await attempt(replicas, generous()) == "answer"
    assert replicas.sent_at == pytest.approx([0, 0.5 * FIRST_PAUSE_S, 1.5 * FIRST_PAUSE_S])
    assert replicas.left == pytest.approx([5 - at for at in replicas.sent_at])


async def test_after_the_last_try_its_error_is_the_callers():
    with pytest.raises(Died, match="last"):
        await attempt(Replicas(Died("first"), Died("last")), generous(), tries=2)


async def test_what_another_cannot_do_better_is_not_asked_of_it():
    replicas = Replicas(ValueError("wrong"), "answer")
    with pytest.raises(ValueError, match="wrong"):
        await attempt(replicas, generous())
    assert replicas.sent == 1


async def test_without_budget_nothing_is_sent_again():
    replicas = Replicas(Died(), "answer")
    with pytest.raises(Died):
        await attempt(replicas, Rules(RetryBudget(least_per_s=0)))
    assert replicas.sent == 1


async def test_a_storm_over_replicas_that_all_die_is_a_fifth_more_work_at_most():
    budget, sent = RetryBudget(least_per_s=0.1, clock=Clock()), 0
    for _ in range(200):
        replicas = Replicas(*[Died()] * 5)
        with pytest.raises(Died):
            await attempt(replicas, Rules(budget, random=lambda: 0.0), tries=5)
        sent += replicas.sent
    assert 200 < sent <= 240


async def test_a_call_that_stalls_gets_a_copy_beside_it_and_is_cancelled_once_that_has_answered():
    replicas = Replicas(None, "answer")
    assert await attempt(replicas, generous(), within_s=0.1) == "answer"
    await asyncio.sleep(0)
    assert (replicas.sent, replicas.cancelled) == (2, 1)
    assert replicas.sent_at == pytest.approx([0, STALLED_SHARE * 0.1])
    assert replicas.left == pytest.approx([0.1, 0.1 - STALLED_SHARE * 0.1])


async def test_where_a_replica_hangs_calls_with_time_to_spare_have_the_whole_budget():
    async def hangs_first(number, left_s):
        if number == 0:
            await asyncio.Event().wait()
        return "answer"

    rules = Rules(RetryBudget(), random=lambda: 0.0)
    calls = (Attempts(hangs_first, better, rules, within_s=5.0, tries=3).answer() for _ in range(10))
    assert await asyncio.gather(*calls) == ["answer"] * 10


@pytest.mark.parametrize(("takes_s", "within_s"), [(0.008, 0.012), (0.8, 1.2)])
@pytest.mark.parametrize("hurried", [0, 400])
async def test_calls_with_short_deadlines_leave_copies_to_those_whose_replica_dies(hurried, takes_s, within_s):
    async def takes_its_time(number, left_s):
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(takes_s, over.set)
        await over.wait()
        return "answer"

    rules = Rules(RetryBudget(), random=lambda: 0.0)
    for time_s in ([5.0] * 160, [5.0] * 160, [within_s] * hurried):  # by the third, the usual duration is known
        calls = (Attempts(takes_its_time, better, rules, within_s=one, tries=3).answer() for one in time_s)
        assert set(await asyncio.gather(*calls)) <= {"answer"}
    assert (rules.retries.granted > 0) is (hurried > 0), "they have copies"
    for _ in range(64):
        assert await attempt(Replicas(Died(), "answer"), rules) == "answer"


async def test_a_call_that_was_merely_slow_may_still_answer_first():
    slow = asyncio.Event()

    async def send(number, left_s):
        if number == 0:
            await slow.wait()
            return "slow"
        slow.set()
        return await asyncio.sleep(60, "copy")

    assert await Attempts(send, better, generous(), within_s=0.1, tries=2).answer() == "slow"


async def test_a_stalled_call_without_budget_is_waited_for():
    answer = asyncio.get_running_loop().create_future()
    calls = []

    async def send(number, left_s):
        calls.append(number)
        return await answer

    asyncio.get_running_loop().call_later(0.15, answer.set_result, "late")
    assert await Attempts(send, better, Rules(RetryBudget(least_per_s=0)), within_s=0.1, tries=3).answer() == "late"
    assert calls == [0]


async def test_of_two_calls_the_one_that_lives_is_waited_for_when_the_other_dies():
    async def send(number, left_s):
        await asyncio.sleep(0.15 if number else 0.1)
        if number == 0:
            raise Died
        return "copy"

    assert await Attempts(send, better, generous(), within_s=0.1, tries=2).answer() == "copy"


async def test_where_all_stall_the_time_is_over_and_nothing_goes_on():
    replicas, began = Replicas(None, None, None), monotonic()
    with pytest.raises(TimeoutError):
        await attempt(replicas, generous(), within_s=0.05)
    assert monotonic() - began == pytest.approx(0.05 + GRACE_S)
    await asyncio.sleep(0)
    assert (replicas.sent, replicas.cancelled) == (3, 3)


async def test_who_leaves_takes_all_calls_along():
    replicas = Replicas(None, None)
    caller = asyncio.create_task(attempt(replicas, generous(), within_s=10, tries=2))
    await asyncio.sleep(9)
    assert (replicas.sent, replicas.cancelled) == (2, 0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await asyncio.sleep(0)
    assert replicas.cancelled == 2


async def test_a_hedge_is_sent_when_most_would_have_answered_and_only_where_asked_for():
    hedge = Hedge(clock=Clock())
    for _ in range(100):
        hedge.request()
    rules = Rules(RetryBudget(least_per_s=100), hedge, fast())
    replicas = Replicas(None, "answer")
    assert await attempt(replicas, rules, hedged=True, within_s=60) == "answer"
    assert (replicas.sent, hedge.sent) == (2, 1)
    hedge.on = False
    assert await attempt(Replicas(None, "answer"), rules, hedged=True, within_s=60) == "answer"
    assert await attempt(Replicas(None, "answer"), rules, within_s=60) == "answer"
    assert hedge.sent == 1, "these were copies for calls that stalled"


async def test_a_hedge_that_the_budget_of_retries_refuses_is_not_counted_as_sent():
    hedge = Hedge(clock=Clock())
    for _ in range(100):
        hedge.request()
    replicas = Replicas(None, "answer")
    with pytest.raises(TimeoutError):
        await attempt(replicas, Rules(RetryBudget(least_per_s=0), hedge, fast()), hedged=True, within_s=0.3)
    assert (replicas.sent, hedge.sent) == (1, 0)


async def test_where_hedges_are_spent_a_copy_waits_until_the_call_stalls():
    rules = Rules(RetryBudget(least_per_s=100), Hedge(share=0.0, clock=Clock()), fast())
    replicas = Replicas(None, "answer")
    assert await attempt(replicas, rules, hedged=True, within_s=60) == "answer"
    slow_s = rules.durations.p95_s()
    assert replicas.sent_at == pytest.approx([0, slow_s + rules.stalled_after_s(60 - slow_s)])
    assert replicas.sent_at[1] >= STALLED_LEAST_S


async def test_what_a_call_came_to_that_was_not_waited_for_is_given_back():
    """Both calls end in the same turn of the loop: the one answers, and of the other there is an answer too, which must not get lost."""
    lost, both = [], asyncio.Event()

    async def send(number, left_s):
        if number:
            both.set()
        await both.wait()
        return number

    answer = await Attempts(send, better, generous(), within_s=0.1, tries=2, lost=lost.append).answer()
    await asyncio.sleep(0)
    assert sorted([answer, *lost]) == [0, 1]


async def test_a_call_that_is_cancelled_in_vain_gives_back_what_it_came_to():
    lost = []

    async def send(number, left_s):
        try:
            return await asyncio.sleep(0 if number else 60, number)
        except asyncio.CancelledError:
            return "in vain"

    assert await Attempts(send, better, generous(), within_s=0.1, tries=2, lost=lost.append).answer() == 1
    await asyncio.sleep(1)
    assert lost == ["in vain"]
