import asyncio

import pytest

from cluster.config import BatchingSettings
from deployments.batching import MicroBatcher, fitting


def limits(**changes):
    return BatchingSettings(**{"max_requests": 4, "max_tokens": 100, "max_wait_ms": 20, **changes})


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([10, 10], 2),
        ([10] * 9, 4),  # by number
        ([50, 50, 50], 2),  # by padded size: 3 x 50 > 100
        ([10, 90, 10], 1),  # the longest sets the padding: 2 x 90 > 100
        ([500, 1], 1),  # a request larger than the budget still goes, alone
        ([], 0),
    ],
)
def test_a_batch_holds_what_fits_by_number_and_padded_size(tokens, expected):
    assert fitting(tokens, limits()) == expected


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
