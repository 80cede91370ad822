"""The shared cache's own rules: which shard, which erasures, and what a broken shard costs. The contract suite has the rest."""

import asyncio
import logging
import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cache.actor import CacheActor, ShardSettings
from cluster.cache.entry import CacheStatistics, Entry, Key
from cluster.cache.epochs import Epochs
from cluster.cache.late_leases import LateLeases
from cluster.cache.memory import MemoryCache
from cluster.cache.rendezvous import pick
from cluster.cache.scopes import scope_digest
from cluster.cache.shard import CacheShard, Granted, Held
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.errors import BackendUnavailable, ConfigError
from cluster.traffic.breaker import BreakerSettings, BreakerState
from integrations.redis.cache import RedisCache
from integrations.redis.entries import FORMAT, from_bytes, to_bytes
from tests.fakes.clock import Clock
from tests.reachable import strings_in
from tests.waiting import until

pytestmark = pytest.mark.virtual_time

NODES = [f"genrec-cache-{index}" for index in range(5)]
KEYS = [Key("tenant", f"user {index % 700}", str(index)) for index in range(5000)]
ADA = Key("tenant", "ada", "1")
SETTINGS = SharedSettings(deadline_s=0.02, operator_s=0.05, breaker=BreakerSettings(failures_to_open=3, pause_s=1.0))


class BreakableShard(CacheShard):
    """A shard in this process that does as it is told: "works", "is slow", "hangs", "raises" or "is gone"."""

    def __init__(self, **options):
        super().__init__(MemoryCache(), **options)
        self.mood, self.asked = "works", 0

    def __getattribute__(self, name):
        method = super().__getattribute__(name)
        if name not in {"mget", "epochs", "mput", "lease", "wait", "release", "invalidate", "statistics"}:
            return method

        async def called(*arguments, **named):
            self.asked += 1
            if self.mood == "is slow":
                await asyncio.sleep((SETTINGS.deadline_s + SETTINGS.operator_s) / 2)
            if self.mood == "hangs":
                await asyncio.Event().wait()
            if self.mood == "raises":
                raise ConnectionResetError("connection reset\nby peer")
            if self.mood == "is gone":
                raise BackendUnavailable("its process has ended")
            return await method(*arguments, **named)

        return called


def guarded(clock=None, **options):
    shard = BreakableShard(**options)
    return shard, ShardedCache({"only": shard}, SETTINGS, clock or Clock())


def entry(payload=b"answer"):
    return Entry.lasting(payload, len(payload), now=1000.0, fresh_s=1e12)


def test_every_node_gets_its_share_of_the_keys():
    shares = Counter(pick(key, NODES) for key in KEYS)
    assert min(shares.values()) > 0.8 * len(KEYS) / 5
    assert max(shares.values()) < 1.2 * len(KEYS) / 5


def test_the_order_of_the_nodes_does_not_matter():
    assert [pick(key, NODES) for key in KEYS[:500]] == [pick(key, NODES[::-1]) for key in KEYS[:500]]


def test_only_the_keys_of_a_node_that_leaves_move():
    stayed = [node for node in NODES if node != NODES[2]]
    assert all(pick(key, stayed) == owner for key in KEYS if (owner := pick(key, NODES)) != NODES[2])


def test_a_new_node_takes_its_share_and_nothing_moves_between_the_others():
    moved = [now for key in KEYS if (now := pick(key, [*NODES, "new"])) != pick(key, NODES)]
    assert set(moved) == {"new"}
    assert 0.8 * len(KEYS) / 6 < len(moved) < 1.2 * len(KEYS) / 6


def test_places_keys_as_every_process_of_every_release_does():
    assert [pick(Key("t", "u", digest), NODES)[-1] for digest in "abcdefghijklmnop"] == list("3402324103142011")


@pytest.mark.parametrize("make", [lambda: pick(ADA, []), lambda: ShardedCache({}), lambda: SharedSettings(deadline_s=0)])
def test_refuses_to_be_made_without_shards_or_time(make):
    with pytest.raises(ConfigError, match=r"at least one|must be positive"):
        make()


SCOPES = st.sampled_from([(None, None), ("a", None), ("b", None), ("a", "x"), ("a", ""), ("b", "x")])


@given(st.lists(st.one_of(SCOPES, st.integers(0, 20)), max_size=40), st.integers(1, 5))
def test_admits_nothing_that_began_before_its_erasure_however_little_is_remembered(steps, remembered):
    """`steps`: erasures, and computations (numbers) that begin in between."""
    epochs, keys = Epochs(7, remembered), [Key(namespace, group, "1") for namespace in "ab" for group in ("x", "")]
    begun = []
    for step in steps:
        if isinstance(step, int):
            begun.append([keys[step % 4], epochs.now, False])
            continue
        epochs.end(*step)
        for one in begun:
            one[2] |= step[0] in {None, one[0].namespace} and step[1] in {None, one[0].group}
    for key, began, erased in begun:
        assert not (erased and epochs.admits(key, began))
    assert all(epochs.admits(key, epochs.now) for key in keys)


@given(st.lists(st.tuples(st.none() | st.text(max_size=4), st.none() | st.text(max_size=4)), unique=True, max_size=20))
def test_scopes_have_digests_of_their_own(scopes):
    assert len({scope_digest(*scope) for scope in scopes}) == len(scopes)


def test_scopes_have_the_digests_that_every_process_of_every_release_gives_them():
    assert scope_digest("tenant", "ada") == "54005402b8de429a85d24c9e1608f7ad"


@given(st.lists(SCOPES, max_size=30))
def test_admits_whatever_was_not_erased_while_all_erasures_are_remembered(steps):
    epochs, key = Epochs(0), Key("a", "x", "1")
    for scope in steps:
        if scope not in {(None, None), ("a", None), ("a", "x")}:
            epochs.end(*scope)
    assert epochs.admits(key, 0)


async def test_a_shard_that_was_restarted_refuses_what_began_before():
    before, after = CacheShard(MemoryCache(), Clock(1000.0)), CacheShard(MemoryCache(), Clock(1001.0))
    granted = await before.lease(ADA, "me", 30)
    for _ in range(100):
        await before.invalidate("tenant", "bob")
    assert await after.mput({ADA: entry()}, {ADA: granted.epoch}) == {ADA}


async def test_a_lease_lasts_for_its_time_on_the_shards_clock():
    clock = Clock()
    shard = CacheShard(MemoryCache(clock=clock), clock)
    await shard.lease(ADA, "dead", 5)
    clock.now += 4.9
    assert isinstance(await shard.lease(ADA, "me", 5), Held)
    clock.now += 0.2
    assert isinstance(await shard.lease(ADA, "me", 5), Granted)


async def test_leases_of_the_dead_take_no_memory_for_ever():
    clock = Clock()
    shard = CacheShard(MemoryCache(clock=clock), clock)
    for key in KEYS[:1000]:
        await shard.lease(key, "dead", 5)
    clock.now += 6
    await shard.lease(ADA, "me", 5)
    assert strings_in(shard) & {key.group for key in KEYS[:1000]} == set()


async def test_who_waits_is_given_an_entry_that_is_too_heavy_to_be_kept():
    shard = CacheShard(MemoryCache(capacity_bytes=10))
    granted = await shard.lease(ADA, "me", 30)
    waiting = asyncio.create_task(shard.wait(ADA, 30))
    await asyncio.sleep(0)
    heavy = entry(b"x" * 100)
    await shard.mput({ADA: heavy}, {ADA: granted.epoch})
    assert await waiting == heavy


async def test_closing_tells_who_waits_that_nothing_will_come():
    shard = CacheShard(MemoryCache())
    await shard.lease(ADA, "me", 30)
    waiting = asyncio.create_task(shard.wait(ADA, 30))
    await asyncio.sleep(0)
    await shard.close()
    assert await waiting is None


@pytest.mark.parametrize("mood", ["hangs", "raises"])
async def test_whatever_is_asked_of_a_broken_shard_is_a_miss(mood):
    shard, cache = guarded()
    shard.mood = mood
    assert await cache.lease(ADA, "me", 30) is None
    assert await cache.wait(ADA, 0.01) is None
    looked_up = await cache.mget([ADA])
    assert (dict(looked_up.entries), dict(looked_up.epochs)) == ({}, {})
    assert await cache.mput({ADA: entry()}, {ADA: 1}) == frozenset()
    await cache.release(ADA, "me")
    assert await cache.statistics() == {}
    assert (await cache.invalidate("tenant", "ada")).unconfirmed == ("only",)


async def test_says_what_went_wrong_and_how_often():
    shard, cache = guarded()
    shard.mood = "hangs"
    await cache.mget([ADA])
    assert "no answer within 20 ms" in cache.health()[0].last_error
    shard.mood = "raises"
    await cache.mget([ADA])
    (health,) = cache.health()
    assert (health.calls, health.failures, health.timeouts, health.last_error) == (2, 2, 1, "ConnectionResetError: connection reset")


async def test_a_shard_that_fails_thrice_is_left_alone_until_it_is_tried_again():
    clock = Clock()
    shard, cache = guarded(clock)
    shard.mood = "raises"
    for _ in range(10):
        await cache.mget([ADA])
    assert (shard.asked, cache.health()[0].breaker) == (3, BreakerState.OPEN)
    clock.now += 1.1
    shard.mood = "works"
    assert not (await cache.mget([ADA])).epochs, "no caller waits for the trial"
    await until(lambda: cache.health()[0].breaker is BreakerState.CLOSED)
    assert (await cache.mget([ADA])).epochs.keys() == {ADA}


async def test_a_shard_that_answers_an_operator_and_no_request_in_time_stays_left_alone():
    shard, cache = guarded()
    shard.mood = "is slow"
    for _ in range(3):
        await cache.mget([ADA])
        assert (await cache.statistics()).keys() == {"only"}
    assert cache.health()[0].breaker is BreakerState.OPEN
    assert (await cache.statistics()).keys() == {"only"}
    assert cache.health()[0].breaker is BreakerState.OPEN
    shard.mood = "works"
    await cache.statistics()
    assert cache.health()[0].breaker is BreakerState.CLOSED


async def test_a_shard_that_is_gone_is_left_alone_at_once():
    shard, cache = guarded()
    shard.mood = "is gone"
    for _ in range(10):
        await cache.mget([ADA])
    (health,) = cache.health()
    assert (shard.asked, health.breaker, health.last_error) == (1, BreakerState.OPEN, "BackendUnavailable: its process has ended")


async def broken(clock, shard, cache):
    """Has it left alone, until the next call has it tried whether it is back."""
    shard.mood = "hangs"
    await asyncio.gather(*(cache.mget([ADA]) for _ in range(3)))
    clock.now += 1.1


async def under_way(shard, call):
    """A call that the shard has heard of."""
    asked, task = shard.asked, asyncio.create_task(call)
    await until(lambda: shard.asked > asked)
    return task


async def test_one_call_alone_tries_whether_the_shard_is_back():
    clock = Clock()
    shard, cache = guarded(clock)
    await broken(clock, shard, cache)
    await asyncio.gather(*(cache.mget([ADA]) for _ in range(20)))
    await until(lambda: cache.health()[0].failures == 4)
    assert shard.asked == 4
    await cache.close()


async def test_a_call_of_before_that_ends_during_the_trial_lets_no_other_try():
    clock = Clock()
    shard, cache = guarded(clock)
    shard.mood = "hangs"
    long = await under_way(shard, cache.wait(ADA, 60))
    await broken(clock, shard, cache)
    await under_way(shard, cache.mget([ADA]))
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)
    await cache.mget([ADA])
    assert shard.asked == 5


ACTOR = ShardSettings("s3fifo", capacity_bytes=1000, namespace_share=1.0, minimum_hit_rate=0.0, given_at=1.0)


async def stored(actor, count):
    keys = [Key("tenant", "ada", str(number)) for number in range(count)]
    await actor.mput({key: Entry.lasting(b"x", 10, now=time.time(), fresh_s=600) for key in keys}, (await actor.mget(keys)).epochs)
    return keys


async def test_an_actor_that_is_resized_keeps_what_it_has_room_for():
    actor = CacheActor("cache-0", ACTOR)
    keys = await stored(actor, 50)
    assert await actor.configure(replace(ACTOR, capacity_bytes=2000, policy="lru", given_at=2.0))
    assert (await actor.mget(keys)).entries.keys() == set(keys)
    assert await actor.configure(replace(ACTOR, capacity_bytes=100, given_at=3.0))
    assert len((await actor.mget(keys)).entries) == 10
    assert await actor.invalidate("tenant", "ada") == 10


@pytest.mark.parametrize("policy", ["s3fifo", "lru", "lfu", "arc"])
async def test_an_actor_whose_settings_change_keeps_what_is_asked_for_and_its_counts(policy):
    actor = CacheActor("cache-0", settings := replace(ACTOR, policy=policy))
    hot, *_ = await stored(actor, 100)
    for _ in range(99):
        await actor.mget([hot])
    counted = await actor.statistics()
    changes = ({"capacity_bytes": 500}, {"namespace_share": 0.5}, {"policy": "fifo"}, {"minimum_hit_rate": 0.1}, {"capacity_bytes": 2000})
    for number, change in enumerate(changes, start=2):
        settings = replace(settings, **change, given_at=float(number))
        assert await actor.configure(settings)
        assert actor.memory.peek(hot)
    now = await actor.statistics()
    assert (now.hits, now.misses, now.insertions, now.capacity_bytes) == (counted.hits, counted.misses, counted.insertions, 2000)
    assert (now.entries, now.by_namespace["tenant"].hits) == (25, counted.hits)
    assert actor.memory.admission.minimum_hit_rate == 0.1


async def test_settings_of_an_earlier_time_change_nothing():
    actor = CacheActor("cache-0", replace(ACTOR, given_at=2.0))
    assert not await actor.configure(replace(ACTOR, capacity_bytes=10, given_at=1.0))
    assert (await actor.statistics()).capacity_bytes == 1000


async def test_an_actor_that_hits_too_rarely_takes_in_what_was_asked_for_before():
    """As the first tier does: a scan of keys that are asked for once turns nothing out."""
    actor = CacheActor("cache-0", replace(ACTOR, minimum_hit_rate=0.5))
    known = await stored(actor, 100)
    for number in range(2000):
        scanned = Key("tenant", "scan", str(number))
        await actor.mput({scanned: Entry.lasting(b"x", 10, now=time.time(), fresh_s=600)}, (await actor.mget([scanned])).epochs)
    assert len((await actor.mget(known)).entries) > 0
    assert actor.memory.statistics().rejections > 500


async def test_an_erasure_is_tried_even_where_the_breaker_is_open():
    shard, cache = guarded()
    await cache.mput({ADA: entry()}, (await cache.mget([ADA])).epochs)
    shard.mood = "raises"
    for _ in range(3):
        await cache.mget([ADA])
    shard.mood = "works"
    erased = await cache.invalidate("tenant", "ada")
    assert (erased.entries, erased.unconfirmed) == (1, ())


class LateShard(CacheShard):
    """Its answers to `lease` are held up, or lost: `when` it is granted already, or not yet."""

    def __init__(self, when):
        super().__init__(MemoryCache())
        self.when, self.go, self.given_back = when, asyncio.Event(), asyncio.Event()

    async def lease(self, *arguments):
        if self.when == "before it is granted":
            await self.go.wait()
        granted = await super().lease(*arguments)
        await self.go.wait()
        if self.when == "and is lost":
            raise ConnectionResetError("connection reset by peer")
        return granted

    async def release(self, *arguments):
        await super().release(*arguments)
        self.given_back.set()


@pytest.mark.parametrize("gone", [False, True], ids=["at its deadline", "when who asked has gone away"])
@pytest.mark.parametrize("when", ["before it is granted", "after it was granted", "and is lost"])
async def test_a_lease_that_is_granted_to_nobody_is_given_back(when, gone):
    shard = LateShard(when)
    cache = ShardedCache({"only": shard}, replace(SETTINGS, deadline_s=60.0 if gone else 0.02, operator_s=5.0), Clock())
    asked = asyncio.create_task(cache.lease(ADA, "me", 3600))
    if gone:
        await asyncio.sleep(0.01)
        asked.cancel()
        assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], asyncio.CancelledError)
    else:
        assert await asked is None
    shard.go.set()
    await shard.given_back.wait()
    assert isinstance(await CacheShard.lease(shard, ADA, "you", 30), Granted)
    assert cache.health()[0].failures == (0 if gone else 1)  # what is given back counts for nothing


async def test_a_lease_whose_answer_never_comes_is_given_back_after_a_while():
    shard = LateShard("after it was granted")
    cache = ShardedCache({"only": shard}, SETTINGS, Clock())
    assert await cache.lease(ADA, "me", 3600) is None
    await shard.given_back.wait()
    assert isinstance(await CacheShard.lease(shard, ADA, "you", 30), Granted)


async def test_closing_does_not_wait_for_ever_for_leases_that_come_late():
    shard = LateShard("before it is granted")
    cache = ShardedCache({"only": shard}, SETTINGS, Clock())
    assert await cache.lease(ADA, "me", 3600) is None
    await cache.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_no_more_late_leases_are_awaited_than_there_is_room_for():
    late, call = LateLeases(5.0, limit=0), asyncio.get_running_loop().create_future()
    late.give_back(call, lambda: CacheShard(MemoryCache()).release(ADA, "me"))
    assert call.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_broken_shard_does_not_keep_the_others_from_answering():
    shards = {name: BreakableShard() for name in NODES}
    cache = ShardedCache(shards, SETTINGS, Clock())
    keys = KEYS[:50]
    await cache.mput(dict.fromkeys(keys, entry()), (await cache.mget(keys)).epochs)
    shards[NODES[0]].mood = "hangs"
    found = (await cache.mget(keys)).entries
    assert set(found) == {key for key in keys if pick(key, NODES) != NODES[0]}
    assert {health.name for health in cache.health() if health.failures} == {NODES[0]}


async def test_a_wait_has_its_own_time_beside_the_deadline():
    _, cache = guarded()
    await cache.lease(ADA, "me", 30)
    assert await cache.wait(ADA, 0.1) is None
    assert cache.health()[0].failures == 0


async def test_is_logged_once_when_it_breaks_and_once_when_it_is_back(caplog):
    caplog.set_level(logging.INFO, logger="cluster.cache.shared")
    clock = Clock()
    shard, cache = guarded(clock)
    shard.mood = "raises"
    for _ in range(10):
        await cache.mget([ADA])
        clock.now += 0.7
    shard.mood = "works"
    clock.now += 100
    for _ in range(5):
        await cache.mget([ADA])
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "cache shard only: ConnectionResetError: connection reset; its keys are misses" in caplog.text
    assert "by peer" not in caplog.text


async def test_statistics_are_those_of_the_shards_that_answer():
    shards = {name: BreakableShard() for name in NODES[:2]}
    shards[NODES[0]].mood = "raises"
    statistics = await ShardedCache(shards, SETTINGS, Clock()).statistics()
    assert statistics.keys() == {NODES[1]}
    assert isinstance(statistics[NODES[1]], CacheStatistics)


@given(st.binary(max_size=300), st.integers(1, 2**40), st.integers(0, 2**53), *[st.floats(0, 1e12) for _ in range(4)], st.booleans())
def test_redis_gives_back_the_entry_whose_bytes_it_was_given(payload, weight, epoch, fresh, stale, cost, fresh_s, degraded):
    one = Entry(payload, weight, fresh, stale, cost, fresh_s, degraded)
    assert from_bytes(to_bytes(one, epoch)) == one


@given(st.one_of(st.none(), st.binary(max_size=100)))
def test_bytes_of_another_format_are_no_entry(raw):
    assert from_bytes(raw) is None or raw[0] == FORMAT


def test_redis_says_how_to_install_it_where_it_is_missing(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    availability = RedisCache.get_availability("redis://127.0.0.1:6379/0")
    assert (availability.ok, availability.reason) == (False, "redis is not installed; install genrec with its extra redis")


def test_redis_says_where_it_was_not_reached_and_keeps_the_password_to_itself():
    pytest.importorskip("redis", reason="redis is not installed; install genrec with its extra redis")
    availability = RedisCache.get_availability("redis://ada:secret@127.0.0.1:1/0")
    assert not availability.ok
    assert "cannot reach redis at 127.0.0.1:1: " in availability.reason
    assert "secret" not in availability.reason
