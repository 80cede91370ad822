"""The search for cache actors, by a head of Ray that does not answer."""

import asyncio
import contextvars
import threading
import time
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayError

from cluster.background import AHEAD
from cluster.cache import actor
from cluster.cache.actor import NAMESPACE, UNASKED_S, CacheActor, ShardSettings
from cluster.cache.actor_shards import AHEAD_WAIT_S, LARGE_BYTES, MOST_TOGETHER, ON_THE_WAY, ActorShard, ActorShards
from cluster.cache.entry import Entry, Key
from cluster.cache.layout import Layout
from cluster.cache.shard import Granted
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.traffic.breaker import BreakerState
from tests.waiting import passed, settled, until

SETTINGS = ShardSettings("s3fifo", 1 << 20, 1.0, 0.0, given_at=1.0)


class Remote:
    """An actor in this process; its calls wait at the gate. `calls`: how many questions came in each."""

    def __init__(self):
        self.actor, self.gate, self.calls = CacheActor("cache-0", SETTINGS), asyncio.Event(), []
        self.each = self

    async def remote(self, asked):
        self.calls.append(len(asked))
        await self.gate.wait()
        return await self.actor.each(asked)


class Reference:
    """Stands for a large value in the object store of a node that may be lost; `looked_for` is called when the value is."""

    def __init__(self, value, looked_for=None):
        self.value, self.looked_for = value, looked_for

    def __await__(self):
        if self.looked_for is not None:
            yield from self.looked_for().__await__()
        if self.value is None:
            raise RayError
        return self.value


def key(number):
    return Key("tenant", f"user {number}", "1")


class Told:
    """Stands for the module `time`: what sleeps wakes as the test lets time pass."""

    def __init__(self):
        self.now, self.wakes_at, self.passed = 100.0, 0.0, threading.Condition()

    def monotonic(self):
        return self.now

    def process_time(self):
        return self.now

    def sleep(self, seconds):
        with self.passed:
            self.wakes_at = self.now + seconds
            self.passed.wait_for(lambda: self.now >= self.wakes_at)

    async def advance(self, seconds):
        """Let time pass; returns once what slept sleeps again."""
        await until(lambda: self.wakes_at > self.now)
        with self.passed:
            self.now += seconds
            self.passed.notify_all()
        await until(lambda: self.wakes_at > self.now)


async def test_an_actor_that_no_gateway_asks_any_more_ends_itself(monkeypatch):
    ended, told = [], Told()
    monkeypatch.setattr(actor, "kill", ended.append)
    monkeypatch.setattr(actor, "time", told)
    kept = CacheActor("shop-cache-0", SETTINGS)
    for number in range(10):
        await told.advance(UNASKED_S - 1)  # all gateways were restarted
        await (kept.statistics() if number % 2 else kept.follow(Layout(1, 1)))
        await kept.mget([key(1)])
    assert not ended
    await told.advance(UNASKED_S + 1)
    assert ended == ["shop-cache-0"]


def test_no_cluster_is_started_to_end_an_actor(monkeypatch):
    monkeypatch.setattr(actor.ray, "is_initialized", lambda: False)
    with pytest.raises(ConnectionError, match="belongs to no Ray cluster"):
        actor.kill("shop-cache-0")


async def test_an_actor_that_is_restarted_after_its_application_was_removed_ends_itself(monkeypatch):
    ended, told = [], Told()
    monkeypatch.setattr(actor, "kill", ended.append)
    monkeypatch.setattr(actor, "time", told)
    CacheActor("shop-cache-0", SETTINGS)  # Ray's restart: nothing calls it
    await told.advance(UNASKED_S + 1)
    assert ended == ["shop-cache-0"]


async def test_lookups_that_wait_go_together_in_few_calls_and_each_has_its_own_answer():
    remote = Remote()
    kept = Entry.lasting(b"kept", 4, now=time.time(), fresh_s=600)
    await remote.actor.mput({key(3): kept}, (await remote.actor.mget([key(3)])).epochs)
    shard = ActorShard("cache-0", SETTINGS, 1.0, remote)
    lookups = []
    for number in range(ON_THE_WAY + MOST_TOGETHER + 4):
        lookups.append(asyncio.create_task(shard.lease(key(number), "me", 10.0)))
        if number < ON_THE_WAY:
            await until(lambda under_way=number + 1: len(remote.calls) == under_way)
    gone = lookups.pop()
    gone.cancel()
    remote.gate.set()
    leased = await asyncio.gather(*lookups)
    assert remote.calls == [1] * ON_THE_WAY + [MOST_TOGETHER, 3]
    assert leased[3] == kept
    assert all(isinstance(one, Granted) for number, one in enumerate(leased) if number != 3)
    assert (await shard.mget([key(3)])).entries == {key(3): kept}
    assert isinstance(await shard.lease(key(99), "me", 10.0), Granted)


@pytest.mark.virtual_time
async def test_questions_that_no_caller_waits_for_wait_for_others_and_go_at_once_with_one_that_a_caller_waits_for():
    remote = Remote()
    remote.gate.set()
    shard = ActorShard("cache-0", SETTINGS, 60.0, remote)
    began = asyncio.get_running_loop().time()

    def ahead(*numbers):
        context = contextvars.copy_context()
        context.run(AHEAD.set, True)
        return [asyncio.create_task(shard.epochs([key(number)]), context=context) for number in numbers]

    first = ahead(1)
    await passed(AHEAD_WAIT_S / 2)
    await asyncio.gather(*first, *ahead(2, 3))
    assert remote.calls == [3]
    assert asyncio.get_running_loop().time() - began == pytest.approx(AHEAD_WAIT_S)
    later, began = ahead(4, 5), asyncio.get_running_loop().time()
    await settled()
    await shard.mget([key(6)])
    assert remote.calls == [3, 3]
    assert asyncio.get_running_loop().time() - began < AHEAD_WAIT_S
    await asyncio.gather(*later)


async def test_entries_go_together_as_long_as_they_are_small_together():
    remote = Remote()
    remote.gate.set()
    shard = ActorShard("cache-0", SETTINGS, 1.0, remote)
    kept = [
        Entry.lasting(bytes(size), size, now=time.time(), fresh_s=600) for size in (LARGE_BYTES // 2, LARGE_BYTES // 3, LARGE_BYTES - 1, 1)
    ]
    epochs = await shard.epochs([key(number) for number in range(len(kept))])
    await asyncio.gather(*(shard.mput({key(number): entry}, epochs) for number, entry in enumerate(kept)))
    assert remote.calls == [1, 2, 2]
    assert (await shard.mget([*epochs])).entries == {key(number): entry for number, entry in enumerate(kept)}


@pytest.mark.parametrize("value", [b"newer", None])
async def test_where_a_large_value_is_lost_a_newer_one_that_was_put_meanwhile_is_given(monkeypatch, value):
    monkeypatch.setattr(ray, "ObjectRef", Reference)
    remote = Remote()
    remote.gate.set()
    remote.lease = SimpleNamespace(remote=remote.actor.lease)

    async def put(payload, fresh_s):
        kept = Entry.lasting(payload, 5, now=time.time(), fresh_s=fresh_s)
        await remote.actor.mput({key(1): kept}, (await remote.actor.mget([key(1)])).epochs)

    await put(Reference(None, looked_for=lambda: put(Reference(value), 900)), 600)
    shared = ShardedCache({"cache-0": ActorShard("cache-0", SETTINGS, 60.0, remote)}, SharedSettings(deadline_s=60))
    leased = await shared.lease(key(1), "me", 10.0)
    assert (leased and leased.payload) == value
    health = shared.health()[0]
    assert (health.failures, health.breaker) == (value is None, BreakerState.CLOSED), "the actor is there"
    await shared.close()


async def test_a_lookup_that_fails_at_the_actor_is_no_other_ones(monkeypatch):
    remote = Remote()

    async def broken(*_):
        raise OSError("broken")

    monkeypatch.setattr(remote.actor, "lease", broken)
    shard = ActorShard("cache-0", SETTINGS, 1.0, remote)
    remote.gate.set()
    leased, found = asyncio.create_task(shard.lease(key(1), "me", 10.0)), asyncio.create_task(shard.mget([key(1)]))
    with pytest.raises(OSError, match="broken"):
        await leased
    assert (await found).entries == {}
    assert remote.calls == [2]


async def test_searches_that_are_given_up_while_the_head_is_away_keep_no_threads_from_others(monkeypatch):
    """Ray gives up after a minute; the gateway's own files are read in threads too."""
    asked, back = [], threading.Event()

    def listed(**_):
        asked.append(1)
        back.wait(60)
        return [{"namespace": NAMESPACE, "name": "shop-cache-0"}, {"namespace": NAMESPACE, "name": "shop-cache-1"}]

    monkeypatch.setattr(ray.util, "list_named_actors", listed)
    monkeypatch.setattr(ray, "get_actor", lambda name, _: name)
    place = ActorShards("shop-cache", SETTINGS, 1.0)
    try:
        searches = [asyncio.create_task(place.others(["shop-cache-0"])) for _ in range(5)]
        await until(lambda: asked)
        for search in searches:
            search.cancel()
        await asyncio.wait(searches)
        assert len(asked) == 1
    finally:
        back.set()
    assert list(await place.others(["shop-cache-0"])) == ["shop-cache-1"]
