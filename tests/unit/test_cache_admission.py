import random

import pytest

from cluster.cache.admission import AdaptiveAdmission, FrequencySketch, SampledKeys
from cluster.cache.entry import Entry, Key
from cluster.cache.memory import MemoryCache
from cluster.cache.policy import POLICIES
from cluster.errors import ConfigError
from tests.fakes.clock import Clock

HOT = [Key("acme", "", f"hot-{number}") for number in range(80)]
CAPACITY = 100


def entry(weight=1, cost_ms=0.0):
    return Entry(b"", weight, fresh_until=1e12, stale_until=1e12, cost_ms=cost_ms)


def serve(cache, keys):
    """What a service does with a cache; returns the share of hits among the hot keys."""
    hits, hot_lookups = 0, 0
    for key in keys:
        found = cache.get(key)
        if found is None:
            cache.put(key, entry())
        if key in HOT_SET:
            hot_lookups += 1
            hits += found is not None
    return hits / hot_lookups


HOT_SET = set(HOT)


def hot_traffic(accesses, seed):
    return random.Random(seed).choices(HOT, k=accesses)


def under_attack(accesses, seed, one_hit_wonders=0.9):
    source = random.Random(seed)
    return [
        Key("acme", "", f"wonder-{seed}-{number}") if source.random() < one_hit_wonders else source.choice(HOT)
        for number in range(accesses)
    ]


def make_cache(policy, *, adaptive):
    admission = AdaptiveAdmission(0.3, memory=5000, seed=1) if adaptive else None
    return MemoryCache(policy, CAPACITY, admission=admission, window=200)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_of_one_hit_wonders_does_not_drive_out_the_hot_set(policy):
    rates = {}
    for adaptive in (False, True):
        cache = make_cache(policy, adaptive=adaptive)
        serve(cache, hot_traffic(2000, seed=2))
        serve(cache, under_attack(4000, seed=3))
        rates[adaptive] = serve(cache, under_attack(8000, seed=4))
    assert rates[True] > 0.75
    if policy in ("lru", "fifo"):  # the others withstand a scan to some degree
        assert rates[True] > rates[False] + 0.4
    else:
        assert rates[True] > rates[False] - 0.05


def test_it_is_strict_during_an_attack_and_takes_everything_in_again_after_it():
    cache = make_cache("lru", adaptive=True)
    serve(cache, hot_traffic(2000, seed=2))
    assert not cache.admission.strict
    serve(cache, under_attack(4000, seed=3))
    assert cache.admission.strict
    rejected = cache.statistics().rejections
    assert rejected > 2000
    assert serve(cache, hot_traffic(2000, seed=5)) > 0.95
    assert not cache.admission.strict
    assert cache.statistics().rejections < rejected + 100
    assert cache.put(Key("acme", "", "brand-new"), entry())


def test_a_cache_that_is_not_full_takes_everything_in():
    cache = make_cache("lru", adaptive=True)
    for number in range(CAPACITY):
        key = Key("acme", "", str(number))
        assert cache.get(key) is None
        assert cache.put(key, entry())
    assert cache.admission.strict
    cache.get(Key("acme", "", "one more"))
    assert not cache.put(Key("acme", "", "one more"), entry())


@pytest.mark.parametrize("policy", POLICIES)
def test_after_a_scan_what_is_asked_for_a_second_time_is_there_again(policy):
    """Each key is asked for twice and never again, so that a cache that takes in no key at its first lookup hits nothing."""
    cache = make_cache(policy, adaptive=True)
    for number in range(1000):
        lookup(cache, Key("acme", "scanned", str(number)))
    assert cache.admission.strict
    hits = [lookup(cache, Key("acme", "asked", str(number // 2))) for number in range(2000)]
    assert not cache.admission.strict
    assert sum(hits[-1000:]) == 500


def test_a_full_strict_cache_takes_in_what_is_expected_and_anything_in_place_of_what_has_expired():
    clock, lasting = Clock(), {"fresh_s": 60, "now": 1e6}
    clock.now = 1e6
    cache = MemoryCache("s3fifo", CAPACITY, admission=AdaptiveAdmission(0.3, seed=1), clock=clock, window=200)
    scanned, expected, new = ([Key("acme", name, str(number)) for number in range(200)] for name in ("scanned", "expected", "new"))
    for key in scanned:
        cache.get(key)
        cache.put(key, Entry.lasting(b"", 1, **lasting))
    assert cache.admission.strict
    assert [cache.expect(key) for key in expected] == [None] * 200
    assert all(cache.put(key, Entry.lasting(b"", 1, **lasting)) for key in expected)
    assert not any(cache.put(key, Entry.lasting(b"", 1, **lasting)) for key in new)
    clock.now += 61
    assert cache.put(new[0], Entry.lasting(b"", 1, fresh_s=60, now=clock.now))
    assert cache.peek(new[0])
    counted = cache.statistics()
    assert counted.expirations >= 1
    assert (counted.hits, counted.misses) == (0, 200)


def lookup(cache, key):
    """As a service does; returns whether it is a hit."""
    if hit := cache.get(key) is not None:
        return hit
    cache.put(key, entry())
    return False


def test_it_relaxes_at_a_higher_rate_than_it_became_strict_at():
    admission = AdaptiveAdmission(0.5, relax_at=0.7)

    def at(rate):
        admission.record("key", rate)
        return admission.strict

    assert [at(rate) for rate in (0.5, 0.4, 0.5, 0.6, 0.7, 0.6, 0.5, 0.4)] == [False, True, True, True, False, False, False, True]


def test_while_strict_only_a_key_asked_for_before_is_admitted():
    admission = AdaptiveAdmission(0.5)
    admission.record("new", None)
    assert admission.admits("new")
    admission.record("other", 0.0)
    assert admission.strict
    assert not admission.admits("new")
    admission.record("new", 0.0)
    assert admission.admits("new")


def test_the_victim_is_what_saves_least_computing_per_byte():
    admission = AdaptiveAdmission(0.5, sample=200, seed=1)
    cheap, dear, heavy, seldom = (Key("acme", "", name) for name in ("cheap", "dear", "heavy", "seldom"))
    entries = {cheap: entry(10, 20.0), dear: entry(10, 500.0), heavy: entry(1000, 500.0), seldom: entry(10, 60.0)}
    pool = SampledKeys()
    for key in entries:
        pool.add(key)
        for _ in range(1 if key == seldom else 9):
            admission.record(key, 1.0)
    order = []
    while len(pool):
        order.append(admission.victim(pool, entries, now=0.0).digest)
        pool.discard(Key("acme", "", order[-1]))
    assert order == ["heavy", "seldom", "cheap", "dear"]


@pytest.mark.parametrize(("strict", "evicted"), [(True, "cheap"), (False, "oldest")])
def test_a_strict_cache_evicts_the_least_valuable_entry_where_another_follows_its_policy(strict, evicted):
    admission = AdaptiveAdmission(0.5, sample=200, seed=1)
    cache = MemoryCache("lru", 3, admission=admission, window=40)
    keys = {name: Key("acme", "", name) for name in ("oldest", "cheap", "dear", "new")}
    for name, cost_ms in (("oldest", 100.0), ("cheap", 1.0), ("dear", 100.0)):
        cache.put(keys[name], entry(cost_ms=cost_ms))
    for name in ("oldest", "cheap", "dear") * 10:
        cache.get(keys[name])
    for number in range(40 if strict else 2):
        cache.get(keys["new"] if number < 2 else Key("acme", "", f"absent-{number}"))
    assert admission.strict is strict
    assert cache.put(keys["new"], entry(cost_ms=100.0))
    assert [name for name, key in keys.items() if cache.peek(key) is None] == [evicted]


def test_the_sketch_estimates_never_too_low_before_it_halves_and_forgets_what_is_long_ago():
    sketch, counted = FrequencySketch(memory=4000), {}
    source = random.Random(3)
    for _ in range(3999):
        key = min(source.randrange(1000), source.randrange(1000))
        sketch.add(key)
        counted[key] = counted.get(key, 0) + 1
    assert all(sketch.estimate(key) >= min(count, 255) for key, count in counted.items())
    assert sum(sketch.estimate(key) > 0 for key in range(10_000, 20_000)) < 700
    often = max(counted, key=counted.get)
    before = sketch.estimate(often)
    sketch.add("the one that makes it halve")
    assert sketch.estimate(often) == before // 2
    for number in range(40_000):
        sketch.add(f"later {number}")
    assert sketch.estimate(often) <= 1


def test_contradicting_limits_are_refused():
    with pytest.raises(ConfigError, match=r"minimum_hit_rate is 1\.0; give a share above 0 and below 1"):
        AdaptiveAdmission(1.0)
    with pytest.raises(ConfigError, match=r"relax_at \(0.2\) must not be below minimum_hit_rate \(0.5\)"):
        AdaptiveAdmission(0.5, relax_at=0.2)
