"""One deadline for the whole of a request: what a step gets of it, and what happens where nothing is left."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import DeadlineExceeded
from cluster.traffic.budget import FINISH_S, Budget, each_in_time, in_time, started, unhurried
from cluster.values import RecommendRequest

pytestmark = pytest.mark.virtual_time


def test_a_step_gets_what_is_left_and_at_most_its_own_limit():
    assert Budget(100.0, lambda: 97.0).within(5.0) == 3.0 - FINISH_S
    assert Budget(100.0, lambda: 97.0).within(2.0) == 2.0
    assert Budget(100.0, lambda: 101.0).within(5.0) == 0.0
    assert Budget().within(5.0) == 5.0


@given(st.lists(st.floats(0, 10), max_size=6), st.floats(0, 20))
def test_steps_that_keep_to_their_time_never_take_more_than_there_was(limits: list[float], total: float):
    now = 0.0
    for most_s in limits:
        now += Budget(total, lambda: now).within(most_s)  # noqa: B023 - asked at once
    assert now <= total


def test_the_time_runs_from_the_arrival_where_that_is_known_and_else_from_now():
    request = RecommendRequest("u", deadline_ms=200)
    assert started(request, lambda: 7.0).deadline == pytest.approx(7.2)
    assert started(started(request, lambda: 7.0), lambda: 9.0).deadline == pytest.approx(7.2)
    assert started(RecommendRequest("u"), lambda: 7.0).deadline is None
    assert unhurried(started(request)) == RecommendRequest("u")


async def test_what_is_not_done_in_time_is_given_up_and_what_has_no_time_is_not_begun():
    ended = asyncio.Event()

    async def work() -> str:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()
        return "done"

    with pytest.raises(DeadlineExceeded, match="it was not done within 10 ms"):
        await in_time(work, 0.01)
    assert ended.is_set()
    ended.clear()
    with pytest.raises(DeadlineExceeded, match="no time was left"):
        await in_time(work, 0.0)
    assert not ended.is_set()


async def test_a_timeout_of_the_works_own_is_no_lack_of_time():
    async def work() -> None:
        raise TimeoutError("of something else")

    with pytest.raises(TimeoutError, match="of something else"):
        await in_time(work, 10)


async def test_parts_that_come_in_time_are_passed_on_and_the_rest_is_closed():
    closed = asyncio.Event()

    async def parts():
        try:
            yield 1
            await asyncio.sleep(60)
            yield 2
        finally:
            closed.set()

    in_time_parts = each_in_time(parts(), 0.02)
    assert await anext(in_time_parts) == 1
    with pytest.raises(DeadlineExceeded):
        await anext(in_time_parts)
    assert closed.is_set()
