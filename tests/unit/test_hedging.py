"""What is known of how long answers take, and what hedges may be sent."""

import math

import pytest

from cluster.traffic.hedging import ENOUGH, LEAST_S, Durations, Hedge
from tests.fakes.clock import Clock


def answered_in(clock: Clock, *durations_s: float) -> Durations:
    durations = Durations(clock)
    for duration_s in durations_s:
        durations.answered(duration_s)
    clock.advance(1.5)
    return durations


def test_the_pace_is_what_most_answers_keep():
    assert answered_in(Clock(), *[0.02] * 97, *[2.0] * 3).p95_s() == pytest.approx(0.02, rel=0.16)
    assert answered_in(Clock(), *[0.02] * 90, *[2.0] * 10).p95_s() == pytest.approx(2.0, rel=0.16)


def test_a_few_answers_say_nothing_and_very_fast_ones_are_not_hurried():
    assert answered_in(Clock(), *[0.02] * (ENOUGH - 1)).p95_s() == math.inf
    assert answered_in(Clock(), *[1e-4] * ENOUGH).p95_s() == LEAST_S


def test_the_pace_follows_what_changes():
    clock = Clock()
    durations = answered_in(clock, *[0.02] * ENOUGH)
    clock.advance(31)
    durations.answered(0.5)
    clock.advance(31)
    for _ in range(ENOUGH):
        durations.answered(0.5)
    clock.advance(2)
    assert durations.p95_s() == pytest.approx(0.5, rel=0.16)


def test_one_request_in_twenty_is_hedged_at_most_and_none_while_it_is_off():
    hedge = Hedge(clock=Clock())
    for _ in range(100):
        hedge.request()
    assert sum(hedge.take() for _ in range(100)) == 5
    hedge.on = False
    for _ in range(1000):
        hedge.request()
    assert not hedge.take()
