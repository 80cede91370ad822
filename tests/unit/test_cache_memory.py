import itertools
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cache.admission import AdaptiveAdmission
from cluster.cache.entry import CacheStatistics, Entry, Key, NamespaceStatistics, merged
from cluster.cache.hit_rate import HitRateWindow
from cluster.cache.memory import MemoryCache
from cluster.cache.namespaces import COUNTED_NAMESPACES, OTHERS
from cluster.cache.policy import POLICIES
from tests.fakes.clock import Clock
from tests.reachable import strings_in


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def cache(clock):
    return MemoryCache("lru", 100, clock=clock)


def key(digest, namespace="acme", group="ann"):
    return Key(namespace, group, str(digest))


def entry(weight=1, payload=b"answer", fresh_s=60.0, stale_s=30.0, now=1000.0, cost_ms=0.0):
    return Entry.lasting(payload, weight, now=now, fresh_s=fresh_s, stale_s=stale_s, cost_ms=cost_ms)


def test_an_entry_is_fresh_then_stale_then_expired():
    one = Entry(b"", 1, fresh_until=10.0, stale_until=15.0)
    assert [one.freshness(now) for now in (9.9, 10.0, 14.9, 15.0)] == ["fresh", "stale", "stale", "expired"]
    assert entry(fresh_s=60, stale_s=30) == Entry(b"answer", 1, 1060.0, 1090.0, 0.0, 60)


def test_an_entry_without_stale_time_goes_from_fresh_to_expired():
    assert Entry(b"", 1, fresh_until=10.0, stale_until=0.0).freshness(9.0) == "fresh"
    assert Entry(b"", 1, fresh_until=10.0, stale_until=0.0).freshness(10.0) == "expired"


def test_a_stale_entry_is_still_given_and_an_expired_one_is_gone(cache, clock):
    cache.put(key(1), entry())
    assert cache.get(key(1)).payload == b"answer"
    clock.now = 1060.0
    assert cache.get(key(1)).freshness(clock.now) == "stale"
    clock.now = 1090.0
    assert len(cache) == 1
    assert cache.peek(key(1)) is None
    assert cache.get(key(1)) is None
    assert len(cache) == 0
    counted = cache.statistics()
    assert (counted.hits, counted.stale_hits, counted.misses, counted.expirations) == (2, 1, 1, 1)
    assert counted.used_bytes == 0


def test_a_peek_neither_counts_nor_keeps_an_entry_from_eviction(cache):
    cache.put(key("old"), entry(50))
    cache.put(key("new"), entry(50))
    assert cache.peek(key("old")).weight == 50
    assert cache.statistics().hits == 0
    cache.put(key("newer"), entry(50))
    assert cache.peek(key("old")) is None


def test_a_new_entry_takes_the_place_of_the_keys_old_one(cache):
    cache.put(key(1), entry(40, b"old"))
    cache.put(key(1), entry(60, b"new"))
    assert cache.get(key(1)).payload == b"new"
    assert (len(cache), cache.statistics().used_bytes, cache.statistics().insertions) == (1, 60, 2)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_entry_that_cannot_be_taken_in_is_refused_and_its_old_value_forgotten(policy, clock):
    cache = MemoryCache(policy, 100, clock=clock)
    assert cache.put(key(1), entry(10))
    assert not cache.put(key(1), entry(101))
    assert cache.get(key(1)) is None
    assert not cache.put(key(2), entry(now=0.0))  # over before it came
    assert cache.statistics().rejections == 2
    with pytest.raises(ValueError, match="must weigh 1 byte or more, not 0"):
        cache.put(key(3), entry(0))


def test_an_entry_that_grew_and_is_the_next_to_leave_is_not_taken_in(cache):
    cache.put(key("grows"), entry(10))
    cache.put(key("other"), entry(90))
    assert not cache.put(key("grows"), entry(20))
    assert cache.peek(key("grows")) is None
    assert cache.peek(key("other")) is not None
    assert cache.statistics().used_bytes == 90


def test_tenants_users_and_requests_do_not_see_each_others_entries(cache):
    cache.put(key("d", "acme", "ann"), entry())
    for other in (key("d", "other", "ann"), key("d", "acme", "bob"), key("e", "acme", "ann")):
        assert cache.get(other) is None
    assert cache.get(key("d", "acme", "ann")) is not None


def test_a_group_a_namespace_or_everything_is_forgotten_on_request(cache):
    for namespace in ("acme", "other"):
        for group in ("ann", "bob", ""):
            for digest in range(2):
                cache.put(key(digest, namespace, group), entry())
    assert cache.invalidate("acme", "ann") == 2
    assert cache.get(key(0, "acme", "ann")) is None
    assert cache.get(key(0, "other", "ann")) is not None
    assert cache.invalidate("acme", "ann") == 0
    assert cache.invalidate("acme", "") == 2
    assert cache.invalidate("acme") == 2
    assert cache.invalidate("nobody") == 0
    assert cache.remove(key(0, "other", "ann"))
    assert not cache.remove(key(0, "other", "ann"))
    assert cache.invalidate() == 5
    assert len(cache) == 0
    assert (cache.statistics().invalidations, cache.statistics().used_bytes) == (12, 0)
    with pytest.raises(ValueError, match="group 'ann' cannot be invalidated without its namespace"):
        cache.invalidate(group="ann")


def test_evicted_and_expired_entries_leave_the_index_of_groups(cache, clock):
    cache.put(key(1, group="ann"), entry(100))
    cache.put(key(2, group="bob"), entry(100))
    assert cache.invalidate("acme", "ann") == 0
    clock.now = 2000.0
    assert cache.get(key(2, group="bob")) is None
    assert cache.invalidate("acme", "bob") == 0
    assert strings_in(cache) & {"ann", "bob"} == set()


def test_statistics_count_by_namespace(cache):
    cache.put(key(1, "acme"), entry(10))
    cache.put(key(1, "other"), entry(20))
    cache.get(key(1, "acme"))
    cache.get(key(2, "acme"))
    cache.get(key(1, "absent"))
    counted = cache.statistics()
    assert counted.by_namespace == {
        "acme": NamespaceStatistics(hits=1, misses=1, entries=1, used_bytes=10),
        "other": NamespaceStatistics(entries=1, used_bytes=20),
        "absent": NamespaceStatistics(misses=1),
    }
    assert (counted.entries, counted.used_bytes, counted.capacity_bytes, counted.hit_rate) == (2, 30, 100, 1 / 3)


def test_namespaces_beyond_a_thousand_are_counted_together(cache):
    for number in range(COUNTED_NAMESPACES + 5):
        cache.get(key(1, f"tenant-{number}"))
    counted = cache.statistics().by_namespace
    assert len(counted) == COUNTED_NAMESPACES + 1
    assert counted[OTHERS].misses == 5


def test_what_namespaces_beyond_a_thousand_hold_is_counted_together(clock):
    cache = MemoryCache("lru", 10_000, clock=clock)
    cache.get(key(1, "asked"))
    for number in range(COUNTED_NAMESPACES + 5):
        cache.put(key(1, f"tenant-{number}"), entry(2))
    cache.put(key(1, OTHERS), entry(2))
    counted = cache.statistics().by_namespace
    assert len(counted) == COUNTED_NAMESPACES + 1
    assert counted["asked"] == NamespaceStatistics(misses=1)
    assert counted[OTHERS] == NamespaceStatistics(entries=7, used_bytes=14)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_namespace_over_its_share_makes_room_with_its_own_entries(policy, clock):
    cache = MemoryCache(policy, 100, clock=clock, namespace_share=0.5)
    for digest in range(20):
        cache.put(key(digest, "quiet"), entry(1))
    for digest in range(500):
        cache.put(key(digest, "greedy"), entry(1))
    held = cache.statistics().by_namespace
    assert held["greedy"].used_bytes == 50
    assert held["quiet"].entries == 20
    assert cache.statistics().evictions == 450
    assert not cache.put(key("whole", "greedy"), entry(51))


def test_a_namespace_at_its_ceiling_keeps_what_it_asks_for(clock):
    cache = MemoryCache("lru", 100, clock=clock, namespace_share=0.03)
    for digest in "abc":
        cache.put(key(digest), entry())
    cache.get(key("a"))
    cache.put(key("d"), entry())
    assert [digest for digest in "abcd" if cache.peek(key(digest))] == ["a", "c", "d"]


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_over_makes_room_before_anything_else_does(policy, share, clock):
    cache = MemoryCache(policy, 200, clock=clock, namespace_share=share)
    room = int(200 * share)
    for digest in range(room):
        cache.put(key(digest), entry())
        for _ in range(3):
            cache.get(key(digest))
    clock.now = 1090.0
    later = [key(f"later {digest}") for digest in range(room)]
    assert all(cache.put(one, entry(now=clock.now)) for one in later)
    assert all(cache.peek(one) for one in later)
    assert (cache.statistics().expirations, cache.statistics().evictions) == (room, 0)


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5])
def test_a_share_outside_its_range_is_refused(share):
    with pytest.raises(ValueError, match=f"greater than 0 and at most 1 .no ceiling., not {share}"):
        MemoryCache("lru", 100, namespace_share=share)


HEED_HITS = [name for name in POLICIES if name != "fifo"]


def filled(policy, clock, capacity=200, share=1.0):
    """A cache full of entries of 1 byte, of which the first has been hit 99 times."""
    cache = MemoryCache(policy, capacity, clock=clock, namespace_share=share)
    for digest in range(int(capacity * share)):
        cache.put(key(digest), entry())
    for _ in range(99):
        cache.get(key(0))
    return cache


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("policy", HEED_HITS)
def test_a_cache_that_is_made_smaller_keeps_what_is_asked_for_and_its_counts(policy, share, clock):
    cache = filled(policy, clock, share=share)
    cache.resize(20)
    assert cache.peek(key(0))
    counted, room = cache.statistics(), int(20 * share)
    assert (counted.hits, counted.entries, counted.used_bytes, counted.capacity_bytes) == (99, room, room, 20)
    assert (counted.insertions, counted.evictions) == (200 * share, 200 * share - room)
    assert counted.by_namespace["acme"] == NamespaceStatistics(99, 0, room, room)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_cache_that_is_made_larger_loses_nothing_and_fills(policy, share, clock):
    cache = filled(policy, clock, share=share)
    cache.resize(400)
    for digest in range(200, 200 + int(200 * share)):
        assert cache.put(key(digest), entry())
    counted = cache.statistics()
    assert (counted.hits, counted.evictions, counted.entries) == (99, 0, int(400 * share))
    cache.put(key("one more"), entry())
    assert cache.statistics().evictions == 1


def test_a_full_cache_that_has_grown_does_not_turn_out_all_that_came_since(clock):
    """S3-FIFO's small queue would hold all of it."""
    cache = filled("s3fifo", clock)
    cache.put(key(200), entry())
    cache.resize(400)
    came = [key(digest) for digest in range(201, 401)]
    for one in came:
        cache.put(one, entry())
    for digest in range(100):
        cache.put(key(f"later {digest}"), entry())
    assert sum(cache.peek(one) is not None for one in came) > 150


def test_what_is_over_leaves_a_smaller_cache_first(clock):
    cache = MemoryCache("lru", 100, clock=clock)
    for digest in range(100):
        cache.put(key(digest), entry(fresh_s=60.0 if digest < 50 else 600.0))
    for digest in range(50):
        cache.get(key(digest))
    clock.now = 1090.0
    cache.resize(50)
    assert all(cache.peek(key(digest)) for digest in range(50, 100))
    assert (cache.statistics().expirations, cache.statistics().evictions) == (50, 0)


@pytest.mark.parametrize("policy", POLICIES)
def test_an_entry_for_which_a_smaller_cache_has_no_room_costs_no_other_its_place(policy, clock):
    cache = MemoryCache(policy, 100, clock=clock)
    for digest, weight in (("light", 1), ("heavy", 60)):
        cache.put(key(digest), entry(weight))
    cache.get(key("heavy"))
    cache.resize(50)
    assert [digest for digest in ("light", "heavy") if cache.peek(key(digest))] == ["light"]


@pytest.mark.parametrize("other", POLICIES)
@pytest.mark.parametrize("policy", HEED_HITS)
def test_what_is_asked_for_stays_under_another_policy_and_a_smaller_share_and_counts_go_on(policy, other, clock):
    cache = filled(policy, clock)
    cache.evict_by(other, 0.5)
    counted = cache.statistics()
    assert (counted.hits, counted.insertions, counted.evictions, counted.entries) == (99, 200, 100, 100)
    assert counted.by_namespace["acme"] == NamespaceStatistics(99, 0, 100, 100)
    for digest in range(40):
        cache.put(key(f"later {digest}"), entry())
    assert cache.peek(key(0)), "the last to leave"
    cache.evict_by(other, 1.0)
    assert cache.statistics().entries == 100
    with pytest.raises(ValueError, match="greater than 0"):
        cache.evict_by(other, 0.0)
    assert cache.peek(key(0))


KEYS = [key(*one) for one in itertools.product(range(6), "AB", "xy")]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["put", "get", "expect", "remove", "invalidate", "wait", "resize", "evict by"]),
        st.sampled_from(KEYS),
        st.integers(1, 15),
    ),
    max_size=80,
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("share", [1.0, 0.5])
@given(steps=STEPS, strict=st.booleans())
def test_a_cache_gives_the_last_value_or_none_and_its_counts_and_indexes_agree(policy, share, steps, strict):
    clock, written = Clock(), {}
    admission = AdaptiveAdmission(0.99, memory=100, seed=1) if strict else None
    cache = MemoryCache(policy, 40, clock=clock, namespace_share=share, admission=admission, window=4)
    others = {
        "expect": lambda at, _: cache.expect(at),
        "wait": lambda _, weight: clock.advance(weight),
        "resize": lambda _, weight: cache.resize(4 * weight),
        "evict by": lambda *_: cache.evict_by(policy, share),
    }
    for number, (step, at, weight) in enumerate(steps):
        if step == "put":
            written[at] = number if cache.put(at, entry(weight, number, fresh_s=5, stale_s=5, now=clock.now)) else None
        elif step == "remove":
            cache.remove(at)
            written[at] = None
        elif step == "invalidate":
            cache.invalidate(at.namespace, at.group)
            written.update({one: None for one in written if one[:2] == at[:2]})
        elif step in others:
            others[step](at, weight)
        elif (found := cache.get(at)) is not None:
            assert found.payload == written[at]
            assert clock.now < found.stale_until
        agree(cache, share)
    for at in KEYS:
        cache.get(at)  # what has expired is given up
    counted, left = agree(cache, share), weights_in(cache, KEYS)
    assert (counted.entries, counted.used_bytes) == (len(left), sum(left.values()))
    for name, of_one in counted.by_namespace.items():
        own = [weight for at, weight in left.items() if at.namespace == name]
        assert (of_one.entries, of_one.used_bytes) == (len(own), sum(own))
    assert cache.invalidate() == len(left)
    assert agree(cache, share).entries == len(cache) == 0


def agree(cache, share):
    """What is counted of a cache adds up, and is within its bounds."""
    counted = cache.statistics()
    of_all = counted.by_namespace.values()
    assert (counted.entries, counted.used_bytes) == (sum(one.entries for one in of_all), sum(one.used_bytes for one in of_all))
    assert sum(weights_in(cache, KEYS).values()) <= counted.used_bytes <= cache.capacity_bytes
    assert all(one.used_bytes <= share * cache.capacity_bytes for one in of_all)
    return counted


def weights_in(cache, keys):
    """Of those that are there."""
    return {at: one.weight for at in keys if (one := cache.peek(at)) is not None}


def test_threads_share_a_cache():
    cache = MemoryCache("s3fifo", 200)
    failures = []

    def work(seed):
        try:
            for number in range(2000):
                at = key(number * seed % 37, "AB"[number % 2], "xyz"[number % 3])
                if cache.get(at) is None:
                    cache.put(at, Entry.lasting(seed, 1 + number % 20, now=1e12, fresh_s=60))
                if number % 50 == 0:
                    cache.invalidate(at.namespace, at.group)
        except Exception as error:  # noqa: BLE001 - raised in the test's own thread below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    counted = cache.statistics()
    assert counted.hits + counted.misses == 8000
    asked = [key(*one) for one in itertools.product(range(37), "AB", "xyz")]
    assert counted.used_bytes == sum(weights_in(cache, asked).values()) <= 200


def test_statistics_of_several_caches_add_up():
    one = CacheStatistics(hits=6, misses=2, used_bytes=5, recent_hit_rate=0.5, by_namespace={"a": NamespaceStatistics(6, 2, 1, 5)})
    two = CacheStatistics(hits=1, misses=1, used_bytes=7, recent_hit_rate=1.0, by_namespace={"a": NamespaceStatistics(1, 1, 2, 7)})
    idle = CacheStatistics(capacity_bytes=100)
    both = merged([one, two, idle])
    assert (both.hits, both.misses, both.used_bytes, both.capacity_bytes) == (7, 3, 12, 100)
    assert both.recent_hit_rate == pytest.approx((0.5 * 8 + 1.0 * 2) / 10)
    assert both.by_namespace == {"a": NamespaceStatistics(7, 3, 3, 12)}
    assert merged([]) == CacheStatistics()
    assert merged([]).hit_rate is None


def test_the_recent_hit_rate_is_that_of_the_latest_lookups_once_there_are_enough():
    window = HitRateWindow(4, enough=2)
    rates = []
    for hit in (True, True, False, False, False, True):
        window.record(hit)
        rates.append(window.rate)
    assert rates == [None, 1.0, pytest.approx(2 / 3), 0.5, 0.25, 0.25]
    with pytest.raises(ValueError, match="size of 1 or more, not 0"):
        HitRateWindow(0)
