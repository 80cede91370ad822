"""The stores as they are used: one thread encodes, others forget users, read statistics, and encode too."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import monotonic

import numpy as np
import pytest

from integrations.hstu.state.paged import PagedStates
from integrations.hstu.state.radix import RadixStates
from integrations.hstu.state.store import Owner
from tests.unit.test_state_stores import EVENTS, STORES, history, pool_of, remember

USERS = [Owner(f"m/{tenant}", user) for tenant in "xy" for user in "abc"]
SECONDS = 1.0
EDITED = [(item + (place in {6, 21}), time) for place, (item, time) in enumerate(EVENTS)]


def some_history(random):
    """Of one to 39 events; two kinds that part at the seventh, so that one user's requests overwrite each other's rows."""
    return history(*(EVENTS, EDITED)[random.integers(2)][: random.integers(1, 40)])


def encodes(store, seed, stop):
    """Requests for histories of random users, each checked against what must have been committed; how many."""
    random, count = np.random.default_rng(seed), 0
    while not stop.is_set():
        remember(store, USERS[random.integers(len(USERS))], some_history(random))
        count += 1
    return count


def forgets(store, stop):
    random, count = np.random.default_rng(9), 0
    while not stop.wait(0.001):
        if random.random() < 0.1:
            store.forget_namespace("m/x")
        store.forget(USERS[random.integers(len(USERS))])
        count += 1
    return count


def watches(store, stop):
    count = 0
    while not stop.wait(0.001):
        found = store.statistics()
        assert found.used_bytes <= found.budget_bytes
        assert 0 <= found.users <= len(USERS)
        count += 1
    return count


@pytest.mark.parametrize("name", STORES)
def test_requests_erasures_and_statistics_at_once_leave_nothing_behind(name):
    store, stop, until = STORES[name](pool_of(12)), Event(), monotonic() + SECONDS
    with ThreadPoolExecutor(4) as threads:
        try:
            work = [
                threads.submit(encodes, store, 1, stop),
                threads.submit(encodes, store, 2, stop),
                threads.submit(forgets, store, stop),
                threads.submit(watches, store, stop),
            ]
            while monotonic() < until and not any(each.done() for each in work):
                stop.wait(0.01)
        finally:
            stop.set()
    assert all(each.result() > 0 for each in work)
    found = store.statistics()
    assert found.held == 0
    assert found.hits > 0
    store.clear()
    assert store.pool.free == store.pool.pages
    assert (store.statistics().users, store.statistics().rows) == (0, 0)


@pytest.mark.parametrize("make", [PagedStates, RadixStates])
def test_erasures_and_statistics_while_the_device_tier_writes_back(make):
    torch = pytest.importorskip("torch")
    from integrations.hstu.state.device import DeviceTier  # noqa: PLC0415 - torch is needed from here on

    tier, stop, until = DeviceTier(make(pool_of(12)), "cpu", 4000), Event(), monotonic() + SECONDS / 2
    assert torch.device("cpu") == tier.device
    with ThreadPoolExecutor(3) as threads:
        try:
            work = [threads.submit(encodes_tensors, tier, stop), threads.submit(forgets, tier, stop), threads.submit(watches, tier, stop)]
            while monotonic() < until and not any(each.done() for each in work):
                stop.wait(0.01)
        finally:
            stop.set()
    assert all(each.result() > 0 for each in work)
    tier.clear()
    tier.flush()
    assert tier.statistics().used_bytes == tier.store.statistics().used_bytes == tier.store.statistics().held == 0
    tier.close()


def encodes_tensors(tier, stop):
    from tests.unit.test_state_device import remember as remember_tensors  # noqa: PLC0415 - it needs torch

    random, count = np.random.default_rng(3), 0
    while not stop.is_set():
        remember_tensors(tier, USERS[random.integers(len(USERS))], some_history(random))
        count += 1
    return count
