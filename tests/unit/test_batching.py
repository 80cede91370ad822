import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import BatchingSettings
from deployments.replicas.batching import MicroBatcher, alike

pytestmark = pytest.mark.virtual_time


def limits(**changes):
    return BatchingSettings(**{"max_requests": 4, "max_tokens": 100, "max_wait_ms": 20, "free_padding": 0, **changes})


@pytest.mark.parametrize(
    ("tokens", "expected"),
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
def test_a_batch_holds_what_is_alike_and_fits_by_number_and_padded_size(tokens, expected):
    assert alike(tokens, limits()) == expected


def test_where_padding_costs_nothing_length_does_not_matter():
    assert alike([10, 20, 30], limits(max_padding=1.0)) == [0, 1, 2]


def test_some_rows_of_padding_cost_less_than_a_call_of_the_engine():
    tokens = [3, 19, 7, 12]
    assert alike(tokens, limits()) == [0]
    assert alike(tokens, limits(free_padding=35)) == [0, 1, 2, 3]  # 4 x 19 rows, 35 of them padding
    assert alike(tokens, limits(free_padding=34)) == [0, 2, 3]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=40), st.floats(0, 0.5))
def test_the_longest_waiting_is_always_served_and_no_batch_is_padded_more_than_it_may_be(tokens, share):
    rules = limits(max_requests=8, max_padding=share)
    waiting = list(enumerate(tokens))
    while waiting:
        chosen = alike([length for _, length in waiting], rules)
        assert chosen[0] == 0
        lengths = [waiting[position][1] for position in chosen]
        padded = max(lengths) * len(lengths)
        assert padded - sum(lengths) <= share * padded + 1e-9
        waiting = [one for position, one in enumerate(waiting) if position not in chosen]


async def test_requests_that_arrive_together_share_a_batch_and_keep_their_order():
    sizes = []

    async def run(batch):
        sizes.append(len(batch))
        return [request * 2 for request in batch]

    batcher = MicroBatcher(run, limits(), tokens=lambda request: 1)
    assert await asyncio.gather(*(batcher.submit(i) for i in range(10))) == [i * 2 for i in range(10)]
    assert sizes == [4, 4, 2]


async def test_a_batch_that_breaks_as_a_whole_tells_its_callers_and_the_next_batch_runs():
    async def run(batch):
        if 0 in batch:
            raise RuntimeError("engine thread died")
        return batch

    batcher = MicroBatcher(run, limits(max_requests=2), tokens=lambda request: 1)
    answers = await asyncio.gather(*(batcher.submit(i) for i in range(4)), return_exceptions=True)
    assert [str(a) for a in answers] == ["engine thread died", "engine thread died", "2", "3"]


async def test_while_the_engine_is_busy_the_next_batch_gathers():
    sizes, release = [], asyncio.Event()

    async def run(batch):
        sizes.append(len(batch))
        await release.wait()
        return batch

    batcher = MicroBatcher(run, limits(max_wait_ms=0), tokens=lambda request: 1)
    first = asyncio.create_task(batcher.submit(0))
    await asyncio.sleep(0.01)
    rest = [asyncio.create_task(batcher.submit(i)) for i in range(1, 4)]
    await asyncio.sleep(0.01)
    release.set()
    assert await asyncio.gather(first, *rest) == [0, 1, 2, 3]
    assert sizes == [1, 3]


async def test_a_caller_that_goes_away_leaves_the_queue():
    served, release = [], asyncio.Event()

    async def run(batch):
        served.extend(batch)
        await release.wait()
        return batch

    batcher = MicroBatcher(run, limits(max_wait_ms=0), tokens=lambda request: 1)
    first = asyncio.create_task(batcher.submit("first"))
    await asyncio.sleep(0.01)
    gone, stays = (asyncio.create_task(batcher.submit(name)) for name in ("gone", "stays"))
    await asyncio.sleep(0.01)
    gone.cancel()
    release.set()
    assert await asyncio.gather(first, stays) == ["first", "stays"]
    assert served == ["first", "stays"]


async def test_a_batcher_that_nobody_holds_any_more_leaves_nothing_running():
    async def run(batch):
        return batch

    batcher = MicroBatcher(run, limits(), tokens=lambda request: 1)
    assert await batcher.submit(1) == 1
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert await asyncio.gather(*(batcher.submit(i) for i in range(9))) == list(range(9)), "and goes on when it is asked again"
