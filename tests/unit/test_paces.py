"""Which replicas are left out because their answers take far longer than the others'."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.traffic.paces import AVOIDING, ENOUGH, KNOWN, LATEST, LATEST_S, LEAST_S, MOVED_S, NEW_S, SEEN, Paces, refused

NAMES = ("a", "b", "c")
QUICK_S, SLOW_S = 0.005, 0.05
MOST = LATEST // 2 + 1


def known(*names: str, now: float = 0.0) -> Paces:
    """Replicas of which each has answered often enough, once for a user without kept states."""
    paces = Paces()
    paces.keep(names, now)
    for name in names:
        answers(paces, name, 1, SLOW_S, now - LATEST_S)
        answers(paces, name, max(KNOWN, SEEN), QUICK_S, now - LATEST_S)
    return paces


def answers(paces: Paces, replica: str, number: int, took_s: float, now: float) -> None:
    for _ in range(number):
        paces.sent(replica, now)
        paces.answered(replica, took_s, now)


def test_a_replica_most_of_whose_latest_answers_are_late_is_left_out_also_where_some_are_not():
    paces = known(*NAMES)
    for number in range(MOST - 1):
        answers(paces, "a", 1, SLOW_S, 1.0)
        answers(paces, "a", int(number % 2 == 0), QUICK_S, 1.0)
    assert paces.slow(1.0) == frozenset()
    answers(paces, "a", 1, SLOW_S, 1.0)
    assert paces.slow(1.0) == {"a"}


def test_two_answers_that_take_far_longer_than_any_of_the_others_are_enough():
    paces = known(*NAMES)
    answers(paces, "a", 1, 3 * SLOW_S, 1.0)
    answers(paces, "a", LATEST, QUICK_S, 1.0 + LATEST_S)
    answers(paces, "a", 1, 3 * SLOW_S, 2.0 + LATEST_S)
    assert paces.slow(2.0 + LATEST_S) == frozenset(), "one among as many as count"
    answers(paces, "a", LATEST - 2, QUICK_S, 2.0 + LATEST_S)
    answers(paces, "a", 1, 3 * SLOW_S, 2.0 + LATEST_S)
    assert paces.slow(2.0 + LATEST_S) == {"a"}


def test_an_answer_that_takes_far_longer_counts_as_one_until_a_new_user_has_been_among_the_others():
    paces = Paces()
    paces.keep(NAMES, 0.0)
    for name in NAMES:
        answers(paces, name, ENOUGH, QUICK_S, -LATEST_S)
    answers(paces, "a", MOST - 1, SLOW_S, 0.0)
    assert paces.slow(0.0) == frozenset()
    answers(paces, "a", 1, SLOW_S, 0.0)
    assert paces.slow(0.0) == {"a"}


def test_a_queue_of_late_answers_that_is_gone_within_a_second_makes_no_replica_slow_and_one_that_stays_does():
    paces = known(*NAMES)
    for hundredth in range(100):
        answers(paces, "a", 1, QUICK_S, hundredth / 100)
    for hundredth in range(100, 140):
        answers(paces, "a", 1, SLOW_S, hundredth / 100)
        assert paces.slow(hundredth / 100) == frozenset()
    for hundredth in range(140, 160):
        answers(paces, "a", 1, SLOW_S, hundredth / 100)
    assert paces.slow(1.6) == {"a"}


def test_of_two_replicas_one_is_slow_after_twice_as_many_late_answers():
    paces = known("a", "b")
    answers(paces, "a", LATEST, SLOW_S, 0.0)
    assert paces.slow(0.0) == frozenset()
    answers(paces, "a", 1, SLOW_S, 0.0)
    assert paces.slow(0.0) == {"a"}


def test_what_new_users_took_long_ago_is_not_forgotten_soon():
    paces = known(*NAMES)
    for name in NAMES:
        answers(paces, name, 200, QUICK_S, 1.0)
    answers(paces, "a", 2, SLOW_S, 1.0)
    assert paces.slow(1.0) == frozenset()


def test_after_a_pause_one_call_is_a_trial_and_a_quick_answer_brings_the_replica_back():
    paces, due = known(*NAMES), AVOIDING.pause_s
    answers(paces, "a", MOST, SLOW_S, 0.0)
    assert paces.slow(due) == frozenset(), "the next call may go there"
    paces.sent("a", due)
    assert paces.slow(due) == {"a"}, "and no second one before the first is answered"
    paces.answered("a", QUICK_S, due + 0.1)
    assert paces.slow(due + 0.1) == frozenset()


def test_calls_that_were_under_way_when_a_replica_was_left_out_do_not_count_after_a_quick_trial():
    paces, due = known(*NAMES), AVOIDING.pause_s
    answers(paces, "a", MOST + LATEST, SLOW_S, 0.0)
    answers(paces, "a", 2, QUICK_S, due)
    assert paces.slow(due) == frozenset()


def test_a_trial_that_is_slow_or_never_answered_makes_the_next_pause_twice_as_long():
    paces, due = known(*NAMES), AVOIDING.pause_s
    answers(paces, "a", MOST, SLOW_S, 0.0)
    paces.sent("a", due)
    paces.answered("a", SLOW_S, due)
    assert paces.slow(due + 1.9 * AVOIDING.pause_s) == {"a"}
    due += 2 * AVOIDING.pause_s
    assert paces.slow(due) == frozenset()
    paces.sent("a", due)
    assert paces.slow(due + 3.9 * AVOIDING.pause_s) == {"a"}


@pytest.mark.parametrize(("usual_s", "took_s"), [(0.001, LEAST_S), (0.1, 0.14)])
def test_what_takes_a_little_longer_is_not_slow(usual_s, took_s):
    paces = Paces()
    paces.keep(NAMES, 0.0)
    for name in NAMES:
        answers(paces, name, ENOUGH, usual_s, 0.0)
    answers(paces, "a", 3 * MOST, took_s, 0.0)
    assert paces.slow(0.0) == frozenset()


def test_users_whose_states_are_computed_anew_make_no_replica_slow():
    paces = known(*NAMES)
    for name in NAMES:
        for _ in range(10):
            answers(paces, name, 4, QUICK_S, 0.0)
            answers(paces, name, 1, SLOW_S, 0.0)
    answers(paces, "a", 50, 1.4 * SLOW_S, 0.0)
    assert paces.slow(0.0) == frozenset(), "though a usual answer takes a fourteenth of that"
    answers(paces, "a", MOST, 5 * SLOW_S, LATEST_S)
    assert paces.slow(LATEST_S) == {"a"}


def test_one_replica_alone_or_before_others_have_answered_is_never_slow():
    paces = Paces()
    paces.keep(["a", "b"], 0.0)
    answers(paces, "a", 20, SLOW_S, 0.0)
    answers(paces, "a", 20, 100 * SLOW_S, 0.0)
    assert paces.slow(0.0) == frozenset()


def test_a_new_replica_has_time_to_compute_its_users_states_anew():
    paces = known(*NAMES)
    paces.keep([*NAMES, "new"], 10.0)
    answers(paces, "new", 20, SLOW_S, 10.0)
    assert paces.slow(10.0) == frozenset()
    answers(paces, "new", MOST - 1, SLOW_S, 10.0 + NEW_S)
    assert paces.slow(10.0 + NEW_S) == frozenset(), "what it took before does not count"
    answers(paces, "new", 1, SLOW_S, 10.0 + NEW_S)
    assert paces.slow(10.0 + NEW_S) == {"new"}


def test_a_call_that_was_cancelled_soon_proves_nothing_and_one_that_was_cancelled_late_was_slow():
    paces = known(*NAMES)
    for _ in range(MOST):
        for took_s in (QUICK_S, QUICK_S, SLOW_S):
            assert paces.slow(0.0) == frozenset()
            paces.answered("a", took_s, 0.0, failed=True)
    assert paces.slow(0.0) == {"a"}


def test_where_most_are_slow_none_is_left_out():
    paces = known(*NAMES)
    answers(paces, "a", MOST, SLOW_S, 0.0)
    answers(paces, "b", MOST, 2 * SLOW_S, MOVED_S)
    assert paces.slow(MOVED_S) == frozenset()


def test_the_others_are_not_judged_while_the_users_of_one_that_is_left_out_come_to_them():
    paces = known(*NAMES)
    answers(paces, "a", MOST, SLOW_S, 0.0)
    answers(paces, "b", 2 * MOST, 3 * SLOW_S, MOVED_S - 1)
    assert paces.slow(MOVED_S - 1) == {"a"}


@pytest.mark.parametrize("names", [("a", "b"), NAMES])
def test_a_replica_that_refuses_at_once_makes_no_other_slow(names):
    paces = Paces()
    paces.keep(names, 0.0)
    for number in range(1000):
        for name in names:
            answers(paces, name, 1, 0.02, number / 50)
    for number in range(1000, 3000):
        answers(paces, "a", 1, 0.02, number / 50)
        for name in names[1:]:
            refused(name)
            answers(paces, name, 1, 0.002, number / 50)
        assert paces.slow(number / 50) == frozenset()
    for number in range(3000, 3100):
        answers(paces, "b", 1, 0.002, number / 50)
        answers(paces, "a", 1, 0.02, number / 50)
    assert paces.slow(number / 50) == {"a"}, "it computes again, and more quickly"


def test_a_replica_that_is_gone_is_forgotten():
    paces = known(*NAMES)
    answers(paces, "a", MOST, SLOW_S, 0.0)
    paces.keep(["b", "c"], 0.0)
    answers(paces, "a", 1, SLOW_S, 0.0)
    assert paces.slow(0.0) == frozenset()


@given(st.lists(st.tuples(st.integers(0, 8), st.floats(0.001, 10.0)), max_size=300), st.integers(1, 9))
def test_no_more_than_a_third_is_ever_left_out_or_one(calls, replicas):
    paces = Paces()
    paces.keep([f"{number}" for number in range(replicas)], 0.0)
    for replica, took_s in calls:
        answers(paces, f"{replica}", 1, took_s, 1.0)
        assert len(paces.slow(1.0)) <= max(1, replicas // 3)
