import random

import pytest

from cluster.cache.entry import Entry
from cluster.cache.hot_keys import HotKeys
from tests.fakes.clock import Clock
from tests.reachable import strings_in


@pytest.fixture
def clock():
    return Clock()


def lookups(hot_keys, clock, key, per_minute, minutes):
    for _ in range(per_minute * minutes):
        clock.now += 60 / per_minute
        hot_keys.record(key)


def test_a_steady_key_is_given_its_lookups_a_minute(clock):
    hot_keys = HotKeys(10, half_life_s=60.0, clock=clock)
    lookups(hot_keys, clock, "steady", per_minute=120, minutes=20)
    assert hot_keys.rate("steady") == pytest.approx(120, rel=0.02)
    assert hot_keys.rate("unknown") == 0.0


def test_a_key_nobody_asks_for_any_more_cools_by_half_every_half_life(clock):
    hot_keys = HotKeys(10, half_life_s=60.0, clock=clock, hot_per_minute=40)
    lookups(hot_keys, clock, "once hot", per_minute=120, minutes=20)
    rate = hot_keys.rate("once hot")
    assert hot_keys.hot("once hot")
    clock.now += 120
    assert hot_keys.rate("once hot") == pytest.approx(rate / 4)
    assert not hot_keys.hot("once hot")


def test_counts_survive_many_half_lives(clock):
    hot_keys = HotKeys(2, half_life_s=1.0, clock=clock)
    for _ in range(20):
        clock.now += 400.0
        for key in ("a", "a", "b"):
            hot_keys.record(key)
    assert [key for key, _ in hot_keys.top(2)] == ["a", "b"]
    assert hot_keys.rate("a") == pytest.approx(2 * 0.6931 * 60, rel=1e-3)
    clock.now += 1e6
    hot_keys.record("c")
    hot_keys.record("c")
    assert hot_keys.top(1)[0][0] == "c"


@pytest.mark.parametrize("back_s", [60.0, 86_400.0, 30 * 86_400.0])
def test_a_clock_that_is_set_back_makes_no_key_hotter_and_counts_go_on(clock, back_s):
    hot_keys = HotKeys(10, half_life_s=60.0, clock=clock)
    lookups(hot_keys, clock, "before", per_minute=120, minutes=20)
    clock.now -= back_s
    assert hot_keys.rate("before") == pytest.approx(120, rel=0.02)
    lookups(hot_keys, clock, "after", per_minute=120, minutes=20)
    assert hot_keys.rate("after") == pytest.approx(120, rel=0.02)
    assert not hot_keys.hot("before")


def test_who_looks_when_counts_are_rescaled_is_told_no_other_rate(clock):
    hot_keys = HotKeys(2, half_life_s=1.0, clock=clock)
    clock.now += 499
    hot_keys.record("a")
    clock.now += 2
    assert hot_keys.top(1) == [("a", pytest.approx(0.6931 / 4 * 60, rel=1e-3))]


def test_the_hottest_keys_are_found_among_far_more_than_are_counted(clock):
    hot_keys, source, asked = HotKeys(100, half_life_s=1e6, clock=clock), random.Random(5), {}
    for number in range(20_000):
        clock.now += 0.01
        key = f"hot-{source.randrange(10)}" if source.random() < 0.4 else f"cold-{number}"
        hot_keys.record(key)
        asked[key] = asked.get(key, 0) + 1
    assert len(hot_keys) == 100
    top = hot_keys.top(10)
    assert {key for key, _ in top} == {f"hot-{number}" for number in range(10)}
    assert [rate for _, rate in top] == sorted((rate for _, rate in top), reverse=True)
    per_lookup = 0.693147 / 1e6 * 60
    assert all(rate <= asked[key] * per_lookup * 1.001 for key, rate in top)
    assert all(rate > 0.7 * asked[key] * per_lookup for key, rate in top)


def test_a_key_that_took_anothers_place_is_not_taken_for_as_hot_as_that_one(clock):
    hot_keys = HotKeys(1, half_life_s=60.0, clock=clock, hot_per_minute=2)
    for _ in range(1000):
        hot_keys.record("hot")
    hot_keys.record("new")
    assert not hot_keys.hot("new")
    assert hot_keys.rate("hot") == 0.0


def test_an_entry_is_due_when_its_key_is_hot_and_little_of_its_fresh_time_is_left(clock):
    hot_keys = HotKeys(10, half_life_s=60.0, clock=clock, hot_per_minute=6)
    lookups(hot_keys, clock, "hot", per_minute=60, minutes=5)
    hot_keys.record("cold")
    entry = Entry.lasting(b"", 1, now=5000.0, fresh_s=100.0, stale_s=50.0)
    assert [hot_keys.due("hot", entry, now) for now in (5000.0, 5080.0, 5081.0, 5120.0)] == [False, False, True, True]
    assert hot_keys.due("hot", entry, 5060.0, ahead=0.5)
    assert not hot_keys.due("cold", entry, 5099.0)
    assert not hot_keys.due("hot", Entry(b"", 1, fresh_until=5100.0, stale_until=5100.0), 5099.0)


def test_what_is_forgotten_is_counted_no_more_and_leaves_its_place_to_another(clock):
    hot_keys = HotKeys(3, half_life_s=60.0, clock=clock)
    for key in ("a", "a", "b", "c", "c", "c"):
        hot_keys.record(key)
    hot_keys.forget("b".__eq__)
    assert [key for key, _ in hot_keys.top(3)] == ["c", "a"]
    assert "b" not in strings_in(hot_keys)
    hot_keys.record("d")
    assert [key for key, _ in hot_keys.top(3)] == ["c", "a", "d"]  # there was room: nobody had to go
    hot_keys.record("e")
    assert [key for key, _ in hot_keys.top(3)][:2] == ["c", "a"]


def test_a_capacity_or_half_life_of_nothing_is_refused():
    with pytest.raises(ValueError, match=r"not 0 and 300\.0"):
        HotKeys(0)
    with pytest.raises(ValueError, match="not 5 and 0"):
        HotKeys(5, 0)


def test_a_key_is_hot_by_all_counters_that_divide_its_lookups(clock):
    hot_keys = HotKeys(10, half_life_s=300.0, clock=clock, hot_per_minute=6)
    lookups(hot_keys, clock, "hot at eight", per_minute=2, minutes=30)
    assert not hot_keys.hot("hot at eight")
    hot_keys.divide(8)
    assert hot_keys.hot("hot at eight")
    hot_keys.divide(1)
    assert not hot_keys.hot("hot at eight")


def test_one_lookup_makes_no_key_hot_however_many_divide_them(clock):
    hot_keys = HotKeys(10, half_life_s=300.0, clock=clock, hot_per_minute=6)
    hot_keys.divide(10_000)
    hot_keys.record("asked once")
    assert not hot_keys.hot("asked once")
    hot_keys.record("asked once")
    assert hot_keys.hot("asked once")
