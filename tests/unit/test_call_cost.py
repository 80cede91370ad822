"""How much processor time an engine's next call will take."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.engines.call_cost import FADES, CallCost


def cost_of(*calls: tuple[int, int, float]) -> CallCost:
    cost = CallCost()
    for requests, rows, spent_s in calls:
        cost.note(requests, rows, spent_s)
    return cost


def test_before_any_call_it_may_take_forever():
    assert CallCost().expected_s(1, 1) == CallCost().expected_s(16, 3200) == math.inf


def test_a_call_of_a_size_that_is_known_takes_the_most_of_late_which_fades_with_each():
    cost = cost_of((1, 1, 1.0), (1, 1, 3.0), (1, 1, 1.0))
    assert cost.expected_s(1, 1) == pytest.approx(3.0 * FADES)
    for _ in range(20):
        cost.note(1, 1, 1.0)
    assert cost.expected_s(1, 1) == 1.0


def test_a_call_of_more_requests_or_rows_takes_as_many_times_as_long_until_one_tells():
    cost = cost_of((1, 16, 0.5))
    assert [cost.expected_s(*size) for size in ((2, 16), (1, 64), (2, 64), (16, 32))] == [1.0, 2.0, 2.0, 8.0]
    cost.note(16, 32, 0.7)
    assert [cost.expected_s(*size) for size in ((16, 32), (16, 128), (1, 16))] == [0.7, 2.8, 0.5]


def test_a_call_of_fewer_takes_no_longer():
    assert cost_of((16, 3200, 0.5)).expected_s(1, 1) == 0.5


def test_calls_of_one_size_say_nothing_of_a_size_that_is_known():
    cost = cost_of((16, 3200, 0.03), *[(16, 16, 0.001)] * 100)
    assert (cost.expected_s(16, 3200), cost.expected_s(16, 16)) == (0.03, 0.001)
    assert cost_of((16, 3200, 0.001), (16, 16, 0.03)).expected_s(16, 16) == 0.03, "what was faster may be long ago"


@given(
    st.tuples(*[st.floats(0, 1)] * 3),
    st.lists(st.tuples(st.integers(1, 64), st.integers(1, 200)), min_size=2, max_size=20),
)
def test_a_call_that_costs_so_much_and_more_by_request_and_row_takes_at_most_twice_what_was_expected(each_s, calls):
    """Requests here are of so many rows each on average."""
    cost, (call_s, request_s, row_s) = CallCost(), each_s
    for requests, rows in calls:
        spent_s = call_s + request_s * requests + row_s * requests * rows
        assert spent_s <= 2 * cost.expected_s(requests, requests * rows) * (1 + 1e-9)
        cost.note(requests, requests * rows, spent_s)
