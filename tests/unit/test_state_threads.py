"""The stores as they are used: one thread encodes, others forget users, read statistics, and encode too."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import monotonic, sleep

import numpy as np
import pytest

from integrations.hstu.state.paged import PagedStates
from integrations.hstu.state.radix import RadixStates
from integrations.hstu.state.store import Owner
from tests.unit.test_state_stores import EVENTS, STORES, history, pool_of, remember

USERS = [Owner(f"m/{tenant}", user) for tenant in "xy" for user in "abc"]
SECONDS = 1.0
PATIENCE_S = 120.0  # far longer than it takes on a busy machine
EDITED = [(item + (place in {6, 21}), time) for place, (item, time) in enumerate(EVENTS)]


def some_history(random):
    """Of one to 39 events; two kinds that part at the seventh, so that one user's requests overwrite each other's rows."""
    return history(*(EVENTS, EDITED)[random.integers(2)][: random.integers(1, 40)])


def encodes(store, seed):
    """A request for the history of a random user, checked against what must have been committed."""
    random = np.random.default_rng(seed)
    return lambda: remember(store, USERS[random.integers(len(USERS))], some_history(random))


def encodes_tensors(tier):
    from tests.unit.test_state_device import remember as remember_tensors  # noqa: PLC0415 - it needs torch

    random = np.random.default_rng(3)
    return lambda: remember_tensors(tier, USERS[random.integers(len(USERS))], some_history(random))


def forgets(store):
    random = np.random.default_rng(9)

    def forget():
        sleep(0.001)
        if random.random() < 0.1:
            store.forget_namespace("m/x")
        store.forget(USERS[random.integers(len(USERS))])

    return forget


def watches(store):
    def watch():
        sleep(0.001)
        found = store.statistics()
        assert found.used_bytes <= found.budget_bytes
        assert 0 <= found.users <= len(USERS)

    return watch


def at_once(*steps, seconds=SECONDS, enough=lambda: True):
    """Each of them again and again in a thread of its own, for so many seconds and until each was done once and it is enough."""
    stop, done, until = Event(), [0] * len(steps), monotonic() + seconds

    def repeat(number, step):
        while not stop.is_set():
            step()
            done[number] += 1

    with ThreadPoolExecutor(len(steps)) as threads:
        try:
            work = [threads.submit(repeat, number, step) for number, step in enumerate(steps)]
            while not (monotonic() >= until and all(done) and enough()) and not any(each.done() for each in work):
                assert monotonic() < until + PATIENCE_S, f"done so often: {done}"
                sleep(0.01)
        finally:
            stop.set()
    for each in work:
        each.result()


@pytest.mark.parametrize("name", STORES)
def test_requests_erasures_and_statistics_at_once_leave_nothing_behind(name):
    store = STORES[name](pool_of(12))
    at_once(encodes(store, 1), encodes(store, 2), forgets(store), watches(store), enough=lambda: store.statistics().hits > 0)
    assert store.statistics().held == 0
    store.clear()
    assert store.pool.free == store.pool.pages
    assert (store.statistics().users, store.statistics().rows) == (0, 0)


@pytest.mark.parametrize("make", [PagedStates, RadixStates])
def test_erasures_and_statistics_while_the_device_tier_writes_back(make):
    torch = pytest.importorskip("torch")
    from integrations.hstu.state.device import DeviceTier  # noqa: PLC0415 - torch is needed from here on

    tier = DeviceTier(make(pool_of(12)), "cpu", 4000)
    assert torch.device("cpu") == tier.device
    at_once(encodes_tensors(tier), forgets(tier), watches(tier), seconds=SECONDS / 2)
    tier.clear()
    tier.flush()
    assert tier.statistics().device_bytes == tier.store.statistics().used_bytes == tier.store.statistics().held == 0
    tier.close()
