"""The cache actors on a real Ray: killed, removed, told other settings, and left by the process that wrote a large value."""

import asyncio
import os
import random
import signal
import time

import pytest
import ray
from ray.exceptions import RayError

from cluster.cache.actor import NAMESPACE
from cluster.cache.actor_shards import connect, remove_all
from cluster.cache.codec import Codec
from cluster.cache.entry import Entry, Key, weight_of
from cluster.cache.layout import Layout, shard_names
from cluster.cache.memory import MemoryCache
from cluster.cache.shard import Granted
from cluster.cache.shared import SharedSettings
from cluster.cache.tier_values import Computed, TierSettings
from cluster.cache.tiered import TieredCache
from cluster.config import CacheSettings
from cluster.errors import BackendUnavailable
from cluster.traffic.breaker import BreakerSettings
from tests.waiting import until

pytestmark = pytest.mark.cluster
NAME, WITHIN_S = "test-cache", 300
SETTINGS = CacheSettings(l2_shards=2)
PATIENT = SharedSettings(deadline_s=60.0, operator_s=120.0, breaker=BreakerSettings(failures_to_open=3, pause_s=0.1, longest_pause_s=0.1))
PROMPT = SharedSettings(deadline_s=0.05, operator_s=10.0, breaker=BreakerSettings(failures_to_open=3, pause_s=0.1, longest_pause_s=0.1))
LARGE = bytes(range(256)) * 2000


@pytest.fixture
def actors(bare):
    yield
    remove_all(NAME)


def process_of(name):
    return ray.get(ray.get_actor(name, NAMESPACE).__ray_call__.remote(lambda _: os.getpid()), timeout=WITHIN_S)


def runs_anew(name, before):
    try:
        return process_of(name) != before
    except RayError:
        return False


def entry(payload):
    return Entry.lasting(payload, len(payload), now=time.time(), fresh_s=600)


def keys(count, group="ada"):
    return [Key("tenant", group, str(number)) for number in range(count)]


async def put(cache, entries):
    return await cache.mput(entries, (await cache.mget(list(entries))).epochs)


async def all_serve(cache):
    """Whether each shard takes entries in and gives them back."""
    asked = keys(20, "probe")
    await put(cache, dict.fromkeys(asked, entry(b"probe")))
    return set((await cache.mget(asked)).entries) == set(asked)


async def serving():
    """The shared cache, of actors that have started: that takes longer than any deadline where the machine is busy."""
    shared = await connect(SETTINGS, NAME, PATIENT)
    await until(lambda: all_serve(shared))
    await shared.invalidate("tenant", "probe")
    await shared.close()
    return await connect(SETTINGS, NAME, PATIENT)  # one that has not seen a failure


async def test_no_call_fails_while_a_killed_actor_is_away_and_it_serves_again_afterwards(actors):
    shared = await connect(SETTINGS, NAME, PROMPT)
    await until(lambda: all_serve(shared))
    cache = TieredCache(MemoryCache(capacity_bytes=10 * weight_of(20)), shared, TierSettings(), Codec(str.encode, bytes.decode))
    before, over, asked = process_of(f"{NAME}-0"), asyncio.Event(), keys(40)

    async def client(seed):
        draw, answered = random.Random(seed), 0
        while not over.is_set():
            key = draw.choice(asked)

            async def compute(key=key):
                await asyncio.sleep(0.001)
                return Computed(f"answer {key.digest}")

            assert (await cache.get_or_compute(key, compute)).value == f"answer {key.digest}"
            answered += 1
        return answered

    clients = [asyncio.create_task(client(seed)) for seed in range(8)]
    try:
        await asyncio.sleep(0.3)
        os.kill(before, signal.SIGKILL)
        await until(lambda: asyncio.to_thread(runs_anew, f"{NAME}-0", before))
        await until(lambda: all_serve(shared))
    finally:
        over.set()
    assert min(await asyncio.gather(*clients)) > 0
    assert {health.name for health in shared.health() if health.failures} >= {f"{NAME}-0"}
    await cache.close()


async def test_an_actor_that_was_removed_for_good_is_made_anew(actors):
    shared = await serving()
    remove_all(NAME)
    await until(lambda: all_serve(shared))
    await shared.close()


async def test_every_replica_finds_the_same_actors_and_closing_leaves_them_to_the_others(actors):
    await serving()
    first, second = await asyncio.gather(connect(SETTINGS, NAME, PATIENT), connect(SETTINGS, NAME, PATIENT))
    stored = {key: entry(key.digest.encode()) for key in keys(20)}
    await put(first, stored)
    await first.close()
    assert (await second.mget(list(stored))).entries == stored


async def test_another_capacity_reaches_the_actors_that_are_there(actors):
    for size in (2**20, 2**22):
        shared = await connect(SETTINGS.model_copy(update={"l2_shard_bytes": size}), NAME, PATIENT)
        await until(lambda: has_capacity(shared, dict.fromkeys(shard_names(2, NAME), size)))  # noqa: B023 - awaited in this turn


async def has_capacity(cache, expected):
    return {name: figures.capacity_bytes for name, figures in (await cache.statistics()).items()} == expected


async def named(*expected):
    """Whether these are the cache actors there are of these tests."""
    there = {one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["namespace"] == NAMESPACE}
    return {name for name in there if name.startswith(NAME)} == set(expected)


async def test_actors_beyond_the_configured_number_are_ended(actors):
    before = await connect(SETTINGS.model_copy(update={"l2_shards": 3}), NAME, PATIENT)
    await before.settled()  # or it may still be at its start, and put its three in the place of the one
    stays = await connect(SETTINGS.model_copy(update={"l2_shards": 1}), f"{NAME}-1", PATIENT)  # its name begins like theirs
    assert await named(*shard_names(3, NAME), f"{NAME}-1-0")
    shared = await connect(SETTINGS.model_copy(update={"l2_shards": 1}), NAME, PATIENT)
    await until(lambda: named(f"{NAME}-0", f"{NAME}-1-0"))
    await until(lambda: all_serve(shared))
    remove_all(NAME)
    await until(lambda: named(f"{NAME}-1-0"))
    await until(lambda: all_serve(stays))
    remove_all(f"{NAME}-1")
    await until(named)
    remove_all(NAME)


async def test_entries_are_hits_after_the_actors_became_two_and_one_again(actors):
    settings = CacheSettings(l2_max_shards=2)
    shared = await connect(settings, NAME, PATIENT)
    await until(lambda: all_serve(shared))
    small = {key: entry(key.digest.encode()) for key in keys(500)}
    stored = small | dict.fromkeys(keys(8, "eve"), entry(LARGE))
    await put(shared, stored)
    held = []
    for number, owners in ((1, 2), (2, 1)):
        shared.follow(Layout(number, owners))
        await shared.settled()
        await until(lambda: named(*shard_names(owners, NAME)))  # noqa: B023 - awaited in this turn
        assert (await shared.mget(list(stored))).entries == stored
        held.append({name: figures.entries for name, figures in (await shared.statistics()).items()})
    assert sum(held[0].values()) == held[1][f"{NAME}-0"] == len(stored) + 20  # and what was put to see whether it serves
    assert min(held[0].values()) > 150
    assert (await shared.invalidate("tenant", "eve")).unconfirmed == ()
    assert (await shared.mget(list(stored))).entries == small


async def test_an_actor_that_is_killed_in_the_middle_of_a_move_costs_misses_and_no_call_fails(actors):
    shared = await connect(CacheSettings(l2_max_shards=2), NAME, PATIENT)
    await until(lambda: all_serve(shared))
    stored = {key: entry(key.digest.encode()) for key in keys(2000)}
    await put(shared, stored)
    before = process_of(f"{NAME}-0")
    shared.follow(Layout(1, 2))
    await until(lambda: shared.seen.layout.owners == 2)
    os.kill(before, signal.SIGKILL)
    assert (await shared.mget(list(stored))).entries.items() <= stored.items()
    await shared.settled()
    await until(lambda: all_serve(shared))
    assert (await shared.mget(list(stored))).entries.items() <= stored.items()
    await until(lambda: named(*shard_names(2, NAME)))


def test_nothing_is_removed_or_started_where_there_is_no_ray(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda **_: pytest.fail("this would start a Ray of its own"))
    remove_all(NAME)


def test_says_which_actors_may_live_on_where_ray_does_not_answer(monkeypatch, caplog):
    def refuse(**_):
        raise RuntimeError("the head is away")

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "list_named_actors", refuse)
    remove_all(NAME)
    assert "cache actors may live on (RuntimeError: the head is away)" in caplog.text


async def test_the_same_settings_again_leave_the_entries_where_they_are(actors):
    stored = dict.fromkeys(keys(20), entry(b"kept"))
    await put(await serving(), stored)
    again = await connect(SETTINGS, NAME, PATIENT)
    assert (await again.mget(list(stored))).entries == stored


async def test_a_restarted_actor_is_told_the_latest_settings(actors):
    await connect(SETTINGS.model_copy(update={"l2_shard_bytes": 2**20}), NAME, PATIENT)
    shared = await connect(SETTINGS.model_copy(update={"l2_shard_bytes": 2**22}), NAME, PATIENT)
    os.kill(process_of(f"{NAME}-0"), signal.SIGKILL)

    await until(lambda: has_capacity(shared, dict.fromkeys(shard_names(2, NAME), 2**22)))


async def test_a_large_value_is_a_miss_once_the_process_that_put_it_is_gone_and_may_be_computed_anew(actors):
    large = Key("tenant", "ada", "large")
    shared = await serving()

    @ray.remote(num_cpus=0)
    class Writer:
        async def write(self):
            await put(await connect(SETTINGS, NAME, PATIENT), {large: entry(LARGE)})

    writer = Writer.remote()
    ray.get(writer.write.remote(), timeout=WITHIN_S)
    assert (await shared.mget([large])).entries[large].payload == LARGE
    ray.kill(writer)

    async def lost():
        return not (await shared.mget([large])).entries

    await until(lost)
    granted = await shared.lease(large, "me", 30)
    assert isinstance(granted, Granted)
    assert await shared.mput({large: entry(LARGE)}, {large: granted.epoch}) == frozenset()
    assert (await shared.mget([large])).entries[large].payload == LARGE
    assert {health.failures for health in shared.health()} == {0}


async def test_the_bytes_of_a_large_value_do_not_pass_through_the_actor(actors):
    large = Key("tenant", "ada", "large")
    shared = await serving()
    await put(shared, {large: entry(LARGE)})
    kinds = set()
    for name in shard_names(2, NAME):
        held = ray.get_actor(name, NAMESPACE).__ray_call__.remote(
            lambda shard: [type(e.payload).__name__ for e in shard.memory._entries.values()]  # noqa: SLF001 - no door shows what an entry is held as
        )
        kinds |= set(await held)
    assert kinds == {"ObjectRef"}


async def test_says_what_to_do_where_there_is_no_ray(monkeypatch):
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(BackendUnavailable, match=r"call ray\.init first"):
        await connect(SETTINGS, NAME)
