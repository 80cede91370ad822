"""The trace of visits that benchmarks replay."""

from collections import defaultdict
from itertools import pairwise
from statistics import median

from benchmarks.visits import MEDIAN_GAP_S, visits


def test_a_seed_is_one_trace_in_order():
    steps = visits(20, 60, items=100, seed=3)
    assert steps == sorted(steps) == visits(20, 60, items=100, seed=3)
    assert steps != visits(20, 60, items=100, seed=4)
    assert all(0 <= step.due < 60 for step in steps)
    assert all(step.item is None or 0 <= step.item < 100 for step in steps)


def test_every_user_meets_an_item_and_then_asks_in_turn():
    by_user = defaultdict(list)
    for step in visits(20, 120, items=100):
        by_user[step.user].append(step)
    for steps in by_user.values():
        assert [step.item is None for step in steps] == [number % 2 == 1 for number in range(len(steps))]


def test_requests_come_at_the_rate_and_after_a_median_of_seconds():
    steps = visits(50, 200, items=100)
    by_user = defaultdict(list)
    for step in steps:
        by_user[step.user].append(step.due)
    gaps = [later - earlier for due in by_user.values() for earlier, later in pairwise(due)]
    assert 0.8 * 50 < sum(step.item is None and step.due >= 60 for step in steps) / 140 < 1.2 * 50
    assert 0.8 * MEDIAN_GAP_S < median(gaps) < 1.2 * MEDIAN_GAP_S
