from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cache.policy import DEFAULT_POLICY, POLICIES, make_policy
from cluster.errors import UnknownChoice

KEYS = st.integers(0, 12)
CAPACITIES = st.integers(1, 30)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), KEYS, st.integers(1, 12)),
        st.tuples(st.just("touch"), KEYS, st.just(0)),
        st.tuples(st.just("remove"), KEYS, st.just(0)),
        st.tuples(st.just("access"), KEYS, st.integers(1, 4)),
        st.tuples(st.just("resize"), st.just(0), CAPACITIES),
    ),
    max_size=120,
)


def apply(policy, operation, key, weight):
    """Returns the keys evicted. An access is what a cache does: a hit touches, a miss admits."""
    if operation == "admit" or (operation == "access" and key not in policy):
        return policy.admit(key, weight)
    if operation == "resize":
        return policy.resize(weight)
    if operation == "remove":
        policy.remove(key)
    elif key in policy:
        policy.touch(key)
    return []


@pytest.mark.parametrize("name", POLICIES)
@given(capacity=CAPACITIES, operations=OPERATIONS)
def test_what_a_policy_holds_is_what_was_admitted_less_what_was_evicted_and_removed(name, capacity, operations):
    policy = make_policy(name, capacity)
    held = {}
    for operation, key, weight in operations:
        if operation == "admit" or (operation == "access" and key not in held):
            held[key] = weight
        if operation == "remove":
            held.pop(key, None)
        evicted = apply(policy, operation, key, weight)
        assert len(evicted) == len(set(evicted))
        for gone in evicted:
            del held[gone]  # a KeyError where a key is evicted that was not there
        listed = list(policy)
        assert sorted(listed) == sorted(held)
        assert len(policy) == len(listed)
        assert all((key in policy) == (key in held) for key in range(13))
        assert policy.used == sum(held.values()) <= policy.capacity
    assert sorted(policy.drain()) == sorted(held)
    assert policy.used == len(policy) == 0


@pytest.mark.parametrize("name", POLICIES)
@given(capacity=CAPACITIES, operations=OPERATIONS)
def test_nothing_is_evicted_while_everything_fits(name, capacity, operations):
    policy = make_policy(name, capacity)
    for operation, key, weight in operations:
        others = [weighed for other, weighed in weights(policy).items() if operation == "resize" or other != key]
        evicted = apply(policy, operation, key, weight)
        assert not evicted or sum(others) + weight * (operation != "resize") > policy.capacity


def weights(policy):
    return dict(policy._weights)


class Naive:
    """A policy as a list of [key, weight, uses, last], searched through. `rank` says which leaves first."""

    def __init__(self, capacity, rank):
        self.capacity, self.rank, self.rows, self.now = capacity, rank, {}, 0

    def __contains__(self, key):
        return key in self.rows

    def touch(self, key):
        self.now += 1
        weight, uses, _, inserted = self.rows[key]
        self.rows[key] = (weight, uses + 1, self.now, inserted)

    def admit(self, key, weight):
        self.now += 1
        if weight > self.capacity:
            self.rows.pop(key, None)
            return [key]
        if key in self.rows:
            self.rows[key] = (weight, *self.rows[key][1:])
            return self.shrink(self.capacity)
        evicted = self.shrink(self.capacity - weight)
        self.rows[key] = (weight, 1, self.now, self.now)
        return evicted

    def shrink(self, limit):
        evicted = []
        while sum(row[0] for row in self.rows.values()) > limit:
            evicted.append(min(self.rows, key=lambda key: self.rank(*self.rows[key])))
            del self.rows[evicted[-1]]
        return evicted

    def resize(self, capacity):
        self.capacity = capacity
        heavy = [key for key, row in self.rows.items() if row[0] > capacity]
        for key in heavy:
            del self.rows[key]
        return heavy + self.shrink(capacity)

    def remove(self, key):
        self.rows.pop(key, None)


RANKS = {
    "fifo": lambda weight, uses, last, inserted: inserted,
    "lru": lambda weight, uses, last, inserted: last,
    "lfu": lambda weight, uses, last, inserted: (uses, last),
}


@pytest.mark.parametrize("name", RANKS)
@given(capacity=CAPACITIES, operations=OPERATIONS)
def test_fifo_lru_and_lfu_evict_what_a_search_through_all_keys_would(name, capacity, operations):
    policy, naive = make_policy(name, capacity), Naive(capacity, RANKS[name])
    for operation, key, weight in operations:
        ours, naives = (apply(one, operation, key, weight) for one in (policy, naive))
        assert (set(ours), ours if operation != "resize" else []) == (set(naives), naives if operation != "resize" else [])


@given(capacity=CAPACITIES, operations=OPERATIONS)
def test_arc_and_its_ghosts_keep_the_published_bounds(capacity, operations):
    policy = make_policy("arc", capacity)
    for operation, key, weight in operations:
        apply(policy, operation, key, weight)
        queues = (policy._once, policy._again, policy._once_ghost, policy._again_ghost)
        assert all(queue.used == sum(queue.weights.values()) for queue in queues)
        assert max(Counter(key for queue in queues for key in queue.weights).values(), default=0) <= 1
        assert policy._once.used + policy._once_ghost.used <= policy.capacity
        assert sum(queue.used for queue in queues) <= 2 * policy.capacity
        assert 0 <= policy._target <= policy.capacity


def test_an_arc_that_is_made_smaller_keeps_its_balance():
    policy = make_policy("arc", 100)
    for key in range(100):
        policy.admit(key, 1)
        if key < 40:
            policy.touch(key)
    policy._target = 60.0
    policy.resize(50)
    assert (policy._once.used, policy._again.used, policy._target) == (30, 20, 30.0)


@given(capacity=CAPACITIES, operations=OPERATIONS)
def test_s3fifo_keeps_every_key_in_one_queue_and_remembers_a_bounded_number(capacity, operations):
    policy = make_policy("s3fifo", capacity)
    for operation, key, weight in operations:
        apply(policy, operation, key, weight)
        queues = (policy._small, policy._main, policy._ghost)
        assert all(queue.used == sum(queue.weights.values()) for queue in queues)
        assert max(Counter(key for queue in queues for key in queue.weights).values(), default=0) <= 1
        assert policy._ghost.used <= 0.9 * policy.capacity
        assert set(policy._hits) == set(policy)
        assert max(policy._hits.values(), default=0) <= 3


def test_s3fifo_keeps_what_was_hit_twice_through_a_scan_where_lru_loses_it():
    kept = {}
    for name in ("s3fifo", "lru"):
        policy = make_policy(name, 100)
        for key in range(10):
            policy.admit(key, 1)
        for key in [*range(10), *range(10)]:
            policy.touch(key)
        for key in range(1000, 1300):
            policy.admit(key, 1)
        kept[name] = sum(key in policy for key in range(10))
    assert kept == {"s3fifo": 10, "lru": 0}


def test_s3fifo_admits_a_key_its_ghost_remembers_to_the_main_queue():
    policy = make_policy("s3fifo", 10)
    evicted = [gone for key in range(12) for gone in policy.admit(key, 1)]
    assert evicted == [0, 10]
    policy.admit(10, 1)
    assert 10 in policy._main
    assert 10 not in policy._ghost


def test_an_s3fifo_that_is_made_smaller_forgets_what_it_would_remember_no_more():
    policy = make_policy("s3fifo", 10)
    for key in range(18):
        policy.admit(key, 1)
    for key in range(10):
        policy.remove(key)
    assert policy._ghost.used == 8
    policy.resize(5)
    assert list(policy._ghost.weights) == [hash(key) for key in (13, 14, 15, 16)]


def test_lfu_evicts_the_oldest_of_those_used_least():
    policy = make_policy("lfu", 3)
    for key in "abc":
        policy.admit(key, 1)
    for key in "ab":
        policy.touch(key)
    assert policy.admit("d", 1) == ["c"]
    assert policy.admit("e", 1) == ["d"]
    policy.remove("e")
    policy.admit("f", 1)
    policy.touch("f")
    assert policy.admit("g", 1) == ["a"]


@pytest.mark.parametrize("name", POLICIES)
def test_a_key_heavier_than_the_capacity_is_returned_at_once_and_evicts_nothing_else(name):
    policy = make_policy(name, 10)
    policy.admit("small", 4)
    assert policy.admit("huge", 11) == ["huge"]
    assert list(policy) == ["small"]
    policy.admit("grows", 3)
    assert policy.admit("grows", 11) == ["grows"]
    assert list(policy) == ["small"]
    assert policy.used == 4


@pytest.mark.parametrize("name", POLICIES)
def test_touching_an_unknown_key_or_admitting_a_weightless_one_is_refused(name):
    policy = make_policy(name, 4)
    with pytest.raises(KeyError):
        policy.touch("absent")
    with pytest.raises(ValueError, match=r"must be 1 or more, not 0 \('light'\)"):
        policy.admit("light", 0)
    assert policy.remove("absent") is False
    with pytest.raises(ValueError, match="capacity of a cache policy must be 1 or more, not 0"):
        make_policy(name, 0)
    with pytest.raises(ValueError, match=r"capacity of a cache policy must be 1 or more, not 0"):
        policy.resize(0)


def test_an_unknown_policy_lists_those_there_are():
    assert DEFAULT_POLICY in POLICIES
    with pytest.raises(UnknownChoice, match="unknown cache policy 'mru'; choose from arc, fifo, lfu, lru, s3fifo"):
        make_policy("mru", 10)
