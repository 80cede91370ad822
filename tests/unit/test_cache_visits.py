"""A cache of answers that are computed ahead, before users come back: what they ask for is asked for once."""

import heapq
from collections import Counter

import pytest

from benchmarks.visits import visits
from cluster.cache.entry import Entry, Key
from cluster.cache.memory import MemoryCache
from cluster.cache.policy import DEFAULT_POLICY
from tests.fakes.clock import Clock

REQUESTS_PER_S, SECONDS, PAUSE_S = 20, 800, 0.05
FRESH_S, STALE_S = 60.0, 300.0
WEIGHT = 2000


def hits_of(policy: str, room_s: float, asked_again: int = 0) -> float:
    """The share of requests that hit in a cache with room for the answers of `room_s` seconds. Each event makes the user's earlier answers
    useless, and the next one is computed ahead; every `asked_again`th request is repeated after two seconds.
    """
    clock = Clock()
    cache = MemoryCache(policy, int(WEIGHT * REQUESTS_PER_S * room_s), clock=clock)
    began, events, counts = clock.now, Counter[int](), Counter[bool]()
    to_come = [
        (step.due, number, step.user, "asked" if step.item is None else "event")
        for number, step in enumerate(visits(REQUESTS_PER_S, SECONDS, 10))
    ]
    while to_come:
        due, number, user, what = heapq.heappop(to_come)
        clock.now = began + due
        if what == "event":
            events[user] += 1
            heapq.heappush(to_come, (due + PAUSE_S, number, user, "ahead"))
            continue
        key = Key("default", str(user), str(events[user]))
        found = cache.expect(key) if what == "ahead" else cache.get(key)
        if found is None:
            cache.put(key, Entry.lasting(b"", WEIGHT, now=clock.now, fresh_s=FRESH_S, stale_s=STALE_S))
        if what != "ahead":
            counts[found is not None] += 1
        if what == "asked" and asked_again and number % asked_again == 0:
            heapq.heappush(to_come, (due + 2, number, user, "again"))
    return counts[True] / counts.total()


@pytest.mark.parametrize("room_s", [10, 20, 30])
def test_what_is_computed_ahead_stays_until_it_is_asked_for_no_less_than_in_an_lru(room_s):
    assert hits_of(DEFAULT_POLICY, room_s) >= hits_of("lru", room_s)


def test_nor_much_less_where_some_ask_again():
    assert hits_of(DEFAULT_POLICY, 30, asked_again=3) >= hits_of("lru", 30, asked_again=3) - 0.02
