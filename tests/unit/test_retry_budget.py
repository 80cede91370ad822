"""How many requests may be sent again, on a clock that the test moves."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.traffic.retry_budget import RetryBudget
from tests.fakes.clock import Clock


def storm(budget: RetryBudget, clock: Clock, per_s: int, seconds: int, tries: int = 5) -> float:
    """Every call fails and is sent again as long as it may be; calls made for each request."""
    calls = 0
    for _ in range(per_s * seconds):
        clock.advance(1 / per_s)
        budget.request()
        calls += 1
        for _ in range(tries - 1):
            if not budget.take():
                break
            calls += 1
    return calls / (per_s * seconds)


@pytest.mark.parametrize("per_s", [10, 20, 100, 1000])
def test_a_storm_of_retries_is_a_fifth_more_work_at_most(per_s):
    clock = Clock()
    assert 1.1 < storm(RetryBudget(clock=clock), clock, per_s, seconds=30) <= 1.2


def test_no_more_than_the_window_is_kept_of_requests_while_none_is_sent_again():
    clock = Clock()
    budget = RetryBudget(clock=clock)

    def peak_of(requests: int) -> int:
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        for _ in range(requests):
            clock.advance(1)
            budget.request()
        return tracemalloc.get_traced_memory()[1] - before

    tracemalloc.start()
    try:
        peak_of(100)
        assert peak_of(5_000) < 50_000
    finally:
        tracemalloc.stop()


def test_who_asks_seldom_may_try_again_all_the_same():
    clock = Clock()
    budget = RetryBudget(clock=clock)
    budget.request()
    assert [budget.take() for _ in range(11)] == [True] * 10 + [False]
    assert (budget.granted, budget.refused) == (10, 1)
    clock.advance(11)
    assert budget.take()


def test_hurried_copies_take_half_of_what_is_allowed_and_nothing_beyond_it():
    clock = Clock()
    budget = RetryBudget(clock=clock)
    assert [budget.take(hurried=True) for _ in range(6)] == [True] * 5 + [False]
    assert [budget.take() for _ in range(6)] == [True] * 5 + [False]
    clock.advance(11)
    assert [budget.take() for _ in range(10)] == [True] * 10
    assert not budget.take(hurried=True)


def test_what_is_spent_comes_back_when_the_window_has_passed():
    clock = Clock()
    budget = RetryBudget(least_per_s=0, clock=clock)
    for _ in range(100):
        budget.request()
    assert [budget.take() for _ in range(21)] == [True] * 20 + [False]
    clock.advance(11)
    assert not budget.take(), "the requests are as long ago as the retries"
    for _ in range(5):
        budget.request()
    assert [budget.take() for _ in range(2)] == [True, False]


@given(st.lists(st.tuples(st.floats(0, 3), st.booleans()), max_size=200))
def test_in_no_window_there_are_more_than_its_share(events):
    clock, retried = Clock(), []
    budget = RetryBudget(share=0.5, least_per_s=0.2, window_s=10, clock=clock)
    requests = []
    for pause, asks in events:
        clock.advance(pause)
        if asks:
            budget.request()
            requests.append(clock())
        elif budget.take():
            retried.append(clock())
            lately = sum(clock() - at < 10.5 for at in requests)  # a slot more than the window
            assert sum(clock() - at < 9.5 for at in retried) <= max(2, 0.5 * lately)
