"""Work in one thread, the cheapest first, and answers that wait for it no longer than their deadline."""

import asyncio
import threading

import pytest

from cluster.values import Behaviour, RecommendRequest
from pipelines.cheapest_first import CheapestFirst
from pipelines.recommend import Recommender
from pipelines.rerank import rerank
from tests.bundles import make_bundle
from tests.fakes.played_stages import Descending
from tests.waiting import until


async def holding(thread, cost, may_go):
    """The future result of work of this cost, which has begun and ends once it `may_go`."""
    begun = threading.Event()
    held = thread.run(cost, lambda: (begun.set(), may_go.wait(60)))
    await until(begun.is_set, "the thread is at work")
    return held


async def test_of_what_waits_the_cheapest_is_done_first_and_of_equals_the_first():
    thread, may_go, done = CheapestFirst("test"), threading.Event(), list[str]()
    running = await holding(thread, 9, may_go)
    waiting = [thread.run(cost, lambda name=name: done.append(name)) for name, cost in (("dear", 5), ("a", 2), ("b", 2), ("cheap", 1))]
    may_go.set()
    await asyncio.gather(running, *waiting)
    assert done == ["cheap", "a", "b", "dear"]


async def test_dear_work_goes_before_what_comes_once_as_much_other_work_was_done():
    thread, may_go, done = CheapestFirst("test"), threading.Event(), list[str]()
    running = await holding(thread, 10, may_go)
    dear = thread.run(3, lambda: done.append("dear"))
    earlier = [thread.run(1, lambda: done.append("cheap")) for _ in range(3)]
    may_go.set()
    await running
    await asyncio.gather(*earlier, dear)
    may_go.clear()
    held = thread.run(1, lambda: may_go.wait(60))
    dear = thread.run(3, lambda: done.append("dear"))
    for _ in range(6):
        later = thread.run(1, lambda: done.append("cheap"))
        may_go.set()
        await later
    assert done[:4] == ["cheap", "cheap", "cheap", "dear"]
    await held
    await dear
    assert done[4:].index("dear") < 4


async def test_what_is_cancelled_while_it_waits_is_not_begun_and_an_error_is_the_callers():
    thread, may_go, done = CheapestFirst("test"), threading.Event(), list[str]()
    running = thread.run(1, lambda: may_go.wait(60))
    left, breaks = thread.run(2, lambda: done.append("left")), thread.run(3, lambda: 1 / 0)
    left.cancel()
    await asyncio.sleep(0)
    may_go.set()
    with pytest.raises(ZeroDivisionError):
        await breaks
    assert await running
    assert await thread.run(1, lambda: done) == []


@pytest.mark.parametrize("option", [{"diversity": 0.5}, {"explain": True}], ids=str)
async def test_a_choice_that_is_not_done_by_the_deadline_leaves_the_items_that_were_found(tmp_path, monkeypatch, option):
    """Others' choices, which are made one at a time, held such an answer far beyond its deadline, and it was of popular items."""
    large, began, may_end = make_bundle(tmp_path / "large", items=1000), threading.Event(), threading.Event()
    recommender = Recommender(large, Descending(large))

    def held(candidates, k, **options):
        if k == 1000:
            began.set()
            assert may_end.wait(60)
        return rerank(candidates, k, **options)

    monkeypatch.setattr("pipelines.answering.rerank", held)
    before = asyncio.create_task(recommender.recommend(RecommendRequest("other", (), k=1000, **option)))
    await until(began.is_set)
    try:
        answer = await recommender.recommend(RecommendRequest("u", (Behaviour("1", 1000),), k=999, deadline_ms=10_000, **option))
        assert not before.done()
    finally:
        may_end.set()
    plain = await recommender.recommend(RecommendRequest("u", (Behaviour("1", 1000),), k=999))
    assert [one.item for one in answer.items] == [one.item for one in plain.items]
    assert (answer.degraded, answer.stages[-1].stage, answer.stages[-1].backend) == (True, "rerank", "none")
    assert answer.stages[-1].fallback_from[0].backend == "diversity and explanations"
    assert len((await before).items) == 1000
