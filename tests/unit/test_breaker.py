"""The circuit breaker: what it lets through, when it opens, how long, and how it closes again."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from cluster.traffic.breaker import Breaker, BreakerSettings, BreakerState

SETTINGS = BreakerSettings(failures_to_open=3, pause_s=1.0, growth=2.0, longest_pause_s=5.0)
EVENTS = st.lists(st.one_of(st.just("succeeded"), st.just("failed"), st.floats(0, 20)), max_size=60)


def fail(breaker: Breaker, times: int, now: float) -> Breaker:
    for _ in range(times):
        breaker = breaker.failed(now)
    return breaker


def test_opens_after_the_set_number_of_failures_in_a_row():
    assert fail(Breaker(SETTINGS), 2, now=0).state(0) is BreakerState.CLOSED
    assert fail(Breaker(SETTINGS), 3, now=0).state(0) is BreakerState.OPEN


def test_a_success_in_between_starts_the_count_again():
    breaker = fail(fail(Breaker(SETTINGS), 2, now=0).succeeded(), 2, now=0)
    assert breaker.state(0) is BreakerState.CLOSED


def test_opens_at_once_where_told_so():
    assert Breaker(SETTINGS).failed(0, at_once=True).state(0) is BreakerState.OPEN


def test_counts_several_calls_at_once():
    assert Breaker(SETTINGS).failed(0, calls=2).state(0) is BreakerState.CLOSED
    assert Breaker(SETTINGS).failed(0, calls=2).failed(0, calls=2).state(0) is BreakerState.OPEN


def test_allows_a_trial_after_the_pause_and_closes_when_it_succeeds():
    breaker = fail(Breaker(SETTINGS), 3, now=10)
    assert (breaker.state(10.999), breaker.state(11)) == (BreakerState.OPEN, BreakerState.HALF_OPEN)
    assert breaker.wait_s(10.25) == 0.75
    assert breaker.succeeded().state(11) is BreakerState.CLOSED


def test_pauses_grow_with_each_failed_trial_up_to_the_longest():
    breaker, now, pauses = fail(Breaker(SETTINGS), 3, now=0), 0.0, []
    for _ in range(5):
        pauses.append(breaker.wait_s(now))
        now += breaker.wait_s(now)
        breaker = breaker.failed(now)
    assert pauses == [1, 2, 4, 5, 5]


def test_after_a_recovery_the_first_pause_is_short_again():
    breaker = fail(Breaker(SETTINGS), 3, now=0).failed(1).succeeded()
    assert fail(breaker, 3, now=50).wait_s(50) == 1


@given(EVENTS)
@example(["failed", "failed", "failed", 1.0, "failed", 2.0, "failed", 4.0, "failed", 5.1, "failed"])  # 12.1 + 5 - 12.1 is above 5
def test_never_pauses_longer_than_the_longest_pause_and_always_comes_back(events: list[str | float]):
    breaker, now = Breaker(SETTINGS), 0.0
    for event in events:
        if isinstance(event, float):
            now += event
        else:
            breaker = breaker.succeeded() if event == "succeeded" else breaker.failed(now)
        assert 0 <= breaker.wait_s(now) <= SETTINGS.longest_pause_s + 1e-9
    assert breaker.state(now + SETTINGS.longest_pause_s) is not BreakerState.OPEN
    assert breaker.succeeded().state(now) is BreakerState.CLOSED


@given(EVENTS)
def test_is_closed_exactly_while_too_few_failures_followed_the_last_success(events: list[str | float]):
    breaker, now, in_a_row = Breaker(SETTINGS), 0.0, 0
    for event in events:
        if isinstance(event, float):
            now += event
        else:
            in_a_row = 0 if event == "succeeded" else in_a_row + 1
            breaker = breaker.succeeded() if event == "succeeded" else breaker.failed(now)
        assert (breaker.state(now) is BreakerState.CLOSED) == (in_a_row < SETTINGS.failures_to_open)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"failures_to_open": 0}, r"failures_to_open\n.*greater than or equal to 1"),
        ({"pause_s": 0}, r"pause_s\n.*greater than 0"),
        ({"pause_s": float("nan")}, r"pause_s\n.*greater than 0"),
        ({"growth": 0.5}, r"growth\n.*greater than or equal to 1"),
        ({"pause_s": 5, "longest_pause_s": 4}, r"longest_pause_s \(4.0\) must not be less than pause_s \(5.0\)"),
    ],
)
def test_refuses_settings_that_cannot_work(settings: dict[str, float], complaint: str):
    with pytest.raises(ValidationError, match=complaint):
        BreakerSettings(**settings)
