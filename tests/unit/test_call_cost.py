"""How much processor time an engine's next call will take."""

import math

import pytest

from cluster.engines.call_cost import FADES, FEW_ROWS, CallCost


def cost_of(*calls: tuple[int, float]) -> CallCost:
    cost = CallCost()
    for requests, spent_s in calls:
        cost.note(requests, spent_s)
    return cost


def test_before_any_call_it_may_take_forever():
    assert CallCost().expected_s(1) == CallCost().expected_s(16) == math.inf


def test_a_lone_request_says_nothing_of_what_others_cost_beside_it():
    assert cost_of((1, 0.5)).expected_s(1) == 0.5
    assert cost_of((1, 0.5)).expected_s(2) == math.inf


def test_a_larger_batch_takes_as_much_longer_as_those_before_it():
    assert cost_of((1, 0.5), *[(11, 1.5)] * 30).expected_s(21) == pytest.approx(0.5 + 20 * 0.1)


def test_of_the_first_batch_every_request_may_cost_its_share_of_the_whole_until_others_tell():
    cost = cost_of((4, 2.0))
    assert (cost.expected_s(1), cost.expected_s(16)) == (2.0, 2.0 + 15 * 0.5)
    for _ in range(100):
        cost.note(4, 0.7)
    assert cost.expected_s(16) == pytest.approx(0.7, abs=0.01), "without a lone request a batch bounds what one costs"


def test_the_most_of_late_counts_and_fades_with_each_call():
    cost = cost_of((1, 1.0), (1, 3.0), (1, 1.0))
    assert cost.expected_s(1) == pytest.approx(3.0 * FADES)
    for _ in range(20):
        cost.note(1, 1.0)
    assert cost.expected_s(1) == 1.0


def test_a_request_that_is_longer_than_those_of_late_takes_as_many_times_as_long():
    cost = cost_of((1, 0.001), (1, 0.001))
    assert cost.expected_s(1, FEW_ROWS) == 0.001
    assert cost.expected_s(1, 10 * FEW_ROWS) == pytest.approx(0.01)
    cost.note(1, 0.008, 10 * FEW_ROWS)
    assert cost.expected_s(1, 10 * FEW_ROWS) == 0.008
    for _ in range(100):
        cost.note(1, 0.001, 5)
    assert cost.expected_s(1, 10 * FEW_ROWS) == pytest.approx(0.01), "the length of calls fades as their time does"
