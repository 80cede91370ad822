"""What every shared cache must do: the shards in this process, Ray actors and a Redis server."""

import asyncio
import shutil
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import pytest_asyncio

from cluster.cache.actor_shards import connect
from cluster.cache.entry import Entry, Key, merged
from cluster.cache.memory import MemoryCache
from cluster.cache.namespaces import COUNTED_NAMESPACES, OTHERS
from cluster.cache.shard import CacheShard, Granted, Held
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.config import CacheSettings
from cluster.traffic.breaker import BreakerState
from deployments.stores import open_shared
from integrations.redis.cache import AT_ONCE, RedisCache
from tests.ports import free_port
from tests.waiting import eventually, settled, until

PATIENT = SharedSettings(deadline_s=60.0, operator_s=300.0)  # what is tested is what it answers, not how soon; an actor may start slowly
ADA = Key("tenant", "ada", "1")
HOUR_S = 3600.0  # where one entry is to end before another, hours lie between them, and both outlive the test


@contextmanager
def running_redis(directory, port):
    """The URL of a Redis server of our own, which keeps nothing on disk."""
    if (program := shutil.which("redis-server")) is None:
        pytest.skip("redis-server is not on PATH; install it: apt-get install redis-server")
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(directory)]
    with (directory / "redis.log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        url = f"redis://127.0.0.1:{port}/0"
        eventually(lambda: RedisCache.get_availability(url).ok, "Redis answers", every_s=0.02)
        yield url
    finally:
        server.terminate()
        server.wait(120)


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    pytest.importorskip("redis", reason="redis is not installed; install genrec with its extra redis")
    with running_redis(tmp_path_factory.mktemp("redis"), free_port()) as url:
        yield url


@pytest_asyncio.fixture(params=["memory", pytest.param("actors", marks=pytest.mark.cluster), "redis"])
async def cache(request):
    """A shared cache with nothing in it."""
    if request.param == "memory":
        shared = ShardedCache({f"shard-{index}": CacheShard(MemoryCache()) for index in range(3)}, PATIENT)
    elif request.param == "redis":
        shared = ShardedCache({"redis": RedisCache(request.getfixturevalue("redis_url"), "contract:")}, PATIENT)
    else:
        request.getfixturevalue("bare")
        shared = await connect(CacheSettings(l2_shards=2, l2_deadline_ms=1000), "contract", PATIENT)
    await until(lambda: nothing_is_left(shared))  # a cache actor may take its time to start
    yield shared
    await shared.close()


def entry(payload=b"answer", *, fresh_s=60.0, stale_s=300.0, cost_ms=7.0, degraded=False):
    weight, now = max(1, len(payload)), time.time()
    return Entry.lasting(payload, weight, now=now, fresh_s=fresh_s, stale_s=stale_s, cost_ms=cost_ms, degraded=degraded)


def keys(count, namespace="tenant", group="ada"):
    return [Key(namespace, group, str(index)) for index in range(count)]


async def put(cache, entries):
    looked_up = await cache.mget(list(entries))
    return await cache.mput(entries, looked_up.epochs)


async def present(cache, *asked):
    return set((await cache.mget(asked)).entries)


async def test_gives_back_what_was_put_and_an_epoch_to_put_another_with(cache):
    stored = {key: entry(f"answer {key.digest}".encode()) for key in keys(20)}
    assert await put(cache, stored) == frozenset()
    missing = Key("tenant", "bob", "1")
    looked_up = await cache.mget([*stored, missing])
    assert looked_up.entries == stored
    assert looked_up.epochs.keys() == {*stored, missing}
    assert await cache.mput(dict.fromkeys(stored, entry(b"another")), looked_up.epochs) == frozenset()
    assert {one.payload for one in (await cache.mget(list(stored))).entries.values()} == {b"another"}


async def test_looks_up_nothing_where_nothing_is_asked(cache):
    looked_up = await cache.mget([])
    assert (dict(looked_up.entries), dict(looked_up.epochs)) == ({}, {})


async def test_gives_back_every_byte_and_every_field(cache):
    stored = {
        key: Entry(payload, 12345, time.time() + HOUR_S + 5.25, time.time() + HOUR_S + 9.5, 1.75, 5.5)
        for key, payload in zip(keys(4), (b"", bytes(range(256)), b"\r\n\x00", b"x" * 99_999), strict=True)
    }
    await put(cache, stored)
    assert (await cache.mget(list(stored))).entries == stored


async def test_gives_back_a_large_value(cache):
    large = entry(bytes(range(256)) * 4000)
    await put(cache, {ADA: large})
    assert (await cache.mget([ADA])).entries == {ADA: large}
    assert await cache.lease(ADA, "me", 300) == large


async def test_replaces_an_entry(cache):
    await put(cache, {ADA: entry(b"old")})
    granted = await cache.lease(ADA, "me", 300, newer_than=time.time() + 100)
    await cache.mput({ADA: entry(b"new")}, {ADA: granted.epoch})
    assert (await cache.mget([ADA])).entries[ADA].payload == b"new"


@pytest.mark.parametrize("kept", [{}, {"fresh_s": -1.0}], ids=["fresh", "stale"])
async def test_a_degraded_entry_does_not_take_the_place_of_one_that_is_kept_for_longer(cache, kept):
    """Two have computed it: the holder of the lease, and one that waited too long for that."""
    granted, held = await cache.lease(ADA, "me", 300), await cache.lease(ADA, "you", 300)
    good = entry(b"good", stale_s=3 * HOUR_S, **kept)
    before = merged((await cache.statistics()).values()).insertions
    await cache.mput({ADA: good}, {ADA: granted.epoch})
    assert await cache.mput({ADA: entry(b"degraded", fresh_s=HOUR_S, stale_s=0, degraded=True)}, {ADA: held.epoch}) == frozenset()
    assert (await cache.mget([ADA])).entries == {ADA: good}
    assert merged((await cache.statistics()).values()).insertions == before + 1
    longer = entry(b"degraded, and kept for longer", fresh_s=6 * HOUR_S, degraded=True)
    await cache.mput({ADA: longer}, {ADA: held.epoch})
    assert (await cache.mget([ADA])).entries == {ADA: longer}
    await cache.mput({ADA: entry(b"good again", fresh_s=HOUR_S, stale_s=0)}, {ADA: held.epoch})
    assert (await cache.mget([ADA])).entries[ADA].payload == b"good again"


async def test_a_degraded_entry_is_put_where_the_good_one_was_erased(cache):
    await put(cache, {ADA: entry(b"good")})
    await cache.invalidate("tenant", "ada")
    degraded = entry(b"degraded", degraded=True)
    await put(cache, {ADA: degraded})
    assert (await cache.mget([ADA])).entries == {ADA: degraded}


async def test_a_degraded_entry_that_is_left_out_lets_the_next_compute_a_newer_one(cache):
    await put(cache, {ADA: entry(b"good", stale_s=3 * HOUR_S)})
    soon = time.time() + 2 * HOUR_S
    granted = await cache.lease(ADA, "me", 300, newer_than=soon)
    waiting = asyncio.create_task(cache.wait(ADA, 300, newer_than=soon))
    await settled()
    await cache.mput({ADA: entry(b"degraded", fresh_s=HOUR_S, stale_s=0, degraded=True)}, {ADA: granted.epoch})
    assert await waiting is None
    assert isinstance(await cache.lease(ADA, "you", 300, newer_than=soon), Granted)


async def test_does_not_mix_up_keys_whose_parts_contain_separators(cache):
    alike = [
        Key("a:b", "c", "d"),
        Key("a", "b:c", "d"),
        Key("a", "b", "c:d"),
        Key("", "a:b:c", "d"),
        Key("a%3Ab", "c", "d"),
        Key("ä", "\n", "*"),
    ]
    stored = {key: entry(str(number).encode()) for number, key in enumerate(alike)}
    await put(cache, stored)
    assert (await cache.mget(alike)).entries == stored
    await cache.invalidate("a", "b")
    assert await present(cache, *alike) == set(alike) - {Key("a", "b", "c:d")}
    await cache.invalidate("")
    assert await present(cache, *alike) == set(alike) - {Key("a", "b", "c:d"), Key("", "a:b:c", "d")}


async def test_an_entry_is_gone_when_its_time_is_over(cache):
    await put(cache, {ADA: entry(fresh_s=0.05, stale_s=0.05)})
    await asyncio.sleep(0.15)
    assert await present(cache, ADA) == set()


async def test_a_stale_entry_is_given_unless_a_newer_one_is_asked_for(cache):
    stale = entry(fresh_s=-1, stale_s=300)
    await put(cache, {ADA: stale})
    assert await cache.lease(ADA, "me", 300) == stale
    assert isinstance(await cache.lease(ADA, "me", 300, newer_than=time.time()), Granted)


async def test_grants_a_lease_to_exactly_one_of_many(cache):
    answers = await asyncio.gather(*(cache.lease(ADA, f"replica {number}", 300) for number in range(20)))
    assert sum(isinstance(answer, Granted) for answer in answers) == 1
    assert all(0 < answer.seconds <= 300 for answer in answers if isinstance(answer, Held))
    assert sum(isinstance(answer, Held) for answer in answers) == 19


async def test_grants_a_lease_again_to_who_has_it(cache):
    assert isinstance(await cache.lease(ADA, "me", 300), Granted)
    assert isinstance(await cache.lease(ADA, "me", 300), Granted)


async def test_a_put_ends_the_lease_and_wakes_who_waits(cache):
    granted = await cache.lease(ADA, "me", 300)
    waiting = [asyncio.create_task(cache.wait(ADA, 300)) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in waiting)
    computed = entry(b"computed")
    await cache.mput({ADA: computed}, {ADA: granted.epoch})
    assert await asyncio.gather(*waiting) == [computed] * 5
    assert isinstance(await cache.lease(ADA, "you", 300, newer_than=time.time() + 1000), Granted)


async def test_a_caller_for_whom_no_kept_answer_will_do_takes_the_one_that_another_computes_now(cache):
    await put(cache, {ADA: entry(b"kept")})
    anew = 1e15

    async def takes_it():
        granted = await cache.lease(ADA, "first", 300, newer_than=anew)
        assert isinstance(await cache.lease(ADA, "second", 300, newer_than=anew), Held)
        waiting = asyncio.create_task(cache.wait(ADA, 300, newer_than=anew))
        await asyncio.wait([waiting], timeout=0.05)  # one that only begins to wait after the put is told that none is computed
        assert not waiting.done()
        computed = entry(b"computed")
        await cache.mput({ADA: computed}, {ADA: granted.epoch})
        return await waiting == computed

    await until(takes_it, within_s=60)


async def test_a_release_wakes_who_waits_and_lets_the_next_compute(cache):
    await cache.lease(ADA, "me", 300)
    waiting = asyncio.create_task(cache.wait(ADA, 300))
    await asyncio.sleep(0.05)
    await cache.release(ADA, "me")
    assert await waiting is None
    assert isinstance(await cache.lease(ADA, "you", 300), Granted)


async def test_only_the_holder_can_release(cache):
    await cache.lease(ADA, "me", 300)
    await cache.release(ADA, "you")
    assert isinstance(await cache.lease(ADA, "you", 300), Held)


async def test_a_lease_ends_with_its_time(cache):
    await cache.lease(ADA, "dead", 0.1)
    assert await cache.wait(ADA, 300) is None
    await asyncio.sleep(0.01)
    assert isinstance(await cache.lease(ADA, "you", 300), Granted)


async def test_waits_no_longer_than_asked_and_not_at_all_for_what_nobody_computes(cache):
    assert await cache.wait(ADA, 300) is None
    await cache.lease(ADA, "me", 300)
    assert await cache.wait(ADA, 0.05) is None


async def test_a_wait_is_over_at_once_where_the_entry_is_there(cache):
    await put(cache, {ADA: entry(b"there")})
    assert (await cache.wait(ADA, 300)).payload == b"there"


async def test_forgets_a_group_and_nothing_else(cache):
    groups = [("tenant", "ada"), ("tenant", "bob"), ("other", "ada")]
    stored = {key: entry() for namespace, group in groups for key in keys(7, namespace, group)}
    await put(cache, stored)
    erased = await cache.invalidate("tenant", "ada")
    assert (erased.entries, erased.unconfirmed) == (7, ())
    assert await present(cache, *stored) == set(stored) - set(keys(7))


async def test_forgets_a_namespace_or_everything(cache):
    stored = {key: entry() for namespace in ("tenant", "other") for group in ("ada", "") for key in keys(3, namespace, group)}
    await put(cache, stored)
    assert (await cache.invalidate("tenant")).entries == 6
    assert {key.namespace for key in await present(cache, *stored)} == {"other"}
    assert (await cache.invalidate()).entries == 6
    assert await present(cache, *stored) == set()


async def test_forgets_the_group_of_nobody_in_particular_alone(cache):
    stored = {key: entry() for group in ("ada", "") for key in keys(3, group=group)}
    await put(cache, stored)
    assert (await cache.invalidate("tenant", "")).entries == 3
    assert await present(cache, *stored) == set(keys(3))


@pytest.mark.parametrize("scope", [("tenant", "ada"), ("tenant", None), (None, None)])
async def test_what_began_before_an_erasure_is_not_put_back(cache, scope):
    leased, looked_up, written = ADA, Key("tenant", "ada", "2"), Key("tenant", "ada", "3")
    granted = await cache.lease(leased, "me", 300)
    held = await cache.lease(leased, "you", 300)
    epochs = {**(await cache.mget([looked_up])).epochs, **await cache.epochs([written])}
    await cache.invalidate(*scope)
    for key, epoch in ((leased, granted.epoch), (leased, held.epoch), *epochs.items()):
        assert await cache.mput({key: entry()}, {key: epoch}) == {key}
    assert await present(cache, leased, looked_up, written) == set()


async def test_an_erasure_ends_leases_and_what_begins_after_it_is_put(cache):
    await cache.lease(ADA, "me", 300)
    waiting = asyncio.create_task(cache.wait(ADA, 300))
    await asyncio.sleep(0.05)
    await cache.invalidate("tenant", "ada")
    assert await waiting is None
    granted = await cache.lease(ADA, "you", 300)
    assert isinstance(granted, Granted)
    assert await cache.mput({ADA: entry()}, {ADA: granted.epoch}) == frozenset()
    assert await present(cache, ADA) == {ADA}


async def test_an_erasure_of_one_user_does_not_refuse_what_is_computed_for_another(cache):
    bob = Key("tenant", "bob", "1")
    granted = await cache.lease(bob, "me", 300)
    await cache.invalidate("tenant", "ada")
    assert await cache.mput({bob: entry()}, {bob: granted.epoch}) == frozenset()
    assert await present(cache, bob) == {bob}


async def test_epochs_alone_let_entries_in_and_count_as_no_lookup(cache):
    before = merged((await cache.statistics()).values())
    assert await cache.epochs([]) == {}
    assert await cache.mput({key: entry() for key in keys(3)}, await cache.epochs(keys(3))) == frozenset()
    after = merged((await cache.statistics()).values())
    assert (after.hits - before.hits, after.misses - before.misses, after.insertions - before.insertions) == (0, 0, 3)
    assert await present(cache, *keys(3)) == set(keys(3))


async def test_refuses_what_has_no_epoch(cache):
    assert await cache.mput({ADA: entry()}, {}) == {ADA}
    assert await present(cache, ADA) == set()


async def test_counts_hits_misses_and_entries_by_namespace(cache):
    before = merged((await cache.statistics()).values())
    await put(cache, {key: entry() for key in keys(3)})
    await cache.mget([*keys(3), Key("tenant", "bob", "1")])
    after = merged((await cache.statistics()).values())
    assert (after.hits - before.hits, after.misses - before.misses, after.insertions - before.insertions) == (3, 4, 3)
    assert (after.entries, after.by_namespace["tenant"].entries) == (3, 3)


@pytest.mark.parametrize(("counted", "hits", "misses"), [(True, 3, 1), (False, 0, 0)])
async def test_counts_the_lookups_of_requests_and_no_others(cache, counted, hits, misses):
    await put(cache, {key: entry() for key in keys(3)})
    before = merged((await cache.statistics()).values())
    assert len((await cache.mget([*keys(3), Key("tenant", "bob", "1")], counted=counted)).entries) == 3
    after = merged((await cache.statistics()).values())
    assert (after.hits - before.hits, after.misses - before.misses) == (hits, misses)


async def test_an_entry_that_never_ends_is_kept(cache):
    await put(cache, {ADA: (endless := entry(fresh_s=float("inf")))})
    assert (await cache.mget([ADA])).entries == {ADA: endless}
    assert {shard.last_error for shard in cache.health()} == {""}


async def test_all_of_it_went_without_a_failure(cache):
    await put(cache, {key: entry() for key in keys(3)})
    assert {(shard.breaker, shard.failures, shard.last_error) for shard in cache.health()} == {(BreakerState.CLOSED, 0, "")}


async def test_knows_the_entry_of_a_waiter_that_was_cancelled_no_more_and_serves_the_others(cache):
    granted = await cache.lease(ADA, "me", 300)
    gone, stays = (asyncio.create_task(cache.wait(ADA, 300)) for _ in range(2))
    await asyncio.sleep(0.05)
    gone.cancel()
    computed = replace(entry(), cost_ms=99.0)
    await cache.mput({ADA: computed}, {ADA: granted.epoch})
    assert await stays == computed
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_a_waiter_ends_in_whatever_turn_of_the_loop_it_is_cancelled(cache):
    await cache.lease(ADA, "me", 300)
    for turns in range(30):
        gone = asyncio.create_task(cache.wait(ADA, 300))
        for _ in range(turns):
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone], timeout=120)
        assert gone.cancelled(), f"after {turns} turns"


async def test_a_redis_that_was_restarted_serves_again_and_refuses_what_began_before(tmp_path):
    pytest.importorskip("redis", reason="redis is not installed; install genrec with its extra redis")
    port = free_port()
    with running_redis(tmp_path, port) as url:
        cache = ShardedCache({"redis": RedisCache(url, "contract:")}, PATIENT)
        granted = await cache.lease(ADA, "me", 300)
        for _ in range(20):
            await cache.invalidate("tenant", "bob")
    assert await cache.lease(ADA, "me", 300) is None
    with running_redis(tmp_path, port):
        assert await cache.mput({ADA: entry()}, {ADA: granted.epoch}) == {ADA}
        assert await put(cache, {ADA: entry()}) == frozenset()
        assert await present(cache, ADA) == {ADA}
        await cache.close()


@pytest.mark.parametrize("l2", [pytest.param("actors", marks=pytest.mark.cluster), "redis"])
async def test_applications_share_nothing_and_one_that_keeps_nothing_leaves_the_others_theirs(l2, request):
    where = {"redis_url": request.getfixturevalue("redis_url")} if l2 == "redis" else {}
    if l2 == "actors":
        request.getfixturevalue("bare")
    settings = CacheSettings(l2=l2, l2_deadline_ms=1000, **where)
    shop, shop_1 = [await open_shared(settings, name) for name in ("shop", "shop-1")]  # one name begins with the other

    async def finds(cache):
        return await present(cache, ADA) == {ADA}

    async def puts_and_finds(cache):
        await put(cache, {ADA: entry()})
        return await finds(cache)

    await until(lambda: puts_and_finds(shop))
    await until(lambda: nothing_is_left(shop_1))
    await until(lambda: finds(shop))
    assert not await finds(shop_1)
    await until(lambda: puts_and_finds(shop_1))
    await until(lambda: nothing_is_left(shop_1))
    assert await open_shared(settings.model_copy(update={"l2": "off"}), "shop-1") is None
    await until(lambda: finds(shop))
    for cache in (shop, shop_1):
        await cache.close()


async def nothing_is_left(cache):
    """Whether every shard confirms that it holds nothing any more."""
    return (await cache.invalidate()).unconfirmed == ()


def server_at(url):
    """A client of the tests' own."""
    return pytest.importorskip("redis").Redis.from_url(url)


async def test_redis_counts_and_erases_the_entries_of_many_tenants_in_a_few_exchanges(redis_url, monkeypatch):
    redis = RedisCache(redis_url, prefix="many:")
    cache, tenants = ShardedCache({"redis": redis}, PATIENT), 300
    await put(cache, {Key(f"tenant-{number}", "ada", "1"): entry() for number in range(tenants)})
    connection_type = pytest.importorskip("redis.asyncio").Connection
    exchanges, sent = [], connection_type.send_packed_command

    async def counting(connection, *args, **named):
        exchanges.append(connection)
        await sent(connection, *args, **named)

    monkeypatch.setattr(connection_type, "send_packed_command", counting)
    assert (await cache.statistics())["redis"].entries == tenants
    assert (await cache.invalidate()).entries == tenants
    assert len(exchanges) < 20
    await cache.close()


async def test_an_erasure_of_many_entries_in_redis_that_is_given_up_has_dropped_what_it_came_to(redis_url, monkeypatch):
    redis, many, answered = RedisCache(redis_url, prefix="large:"), keys(3 * AT_ONCE + 7), 3
    for loaded in ([ADA], many):  # with the first, Redis comes to know all scripts
        await redis.invalidate()
        await redis.mput(dict.fromkeys(loaded, entry()), await redis.epochs(loaded))
    connection_type = pytest.importorskip("redis.asyncio").Connection
    exchanges, names, sent, read = [], [], connection_type.send_packed_command, connection_type.read_response

    async def stalling(connection, *args, **named):
        exchanges.append(connection)
        if len(exchanges) > answered:
            await asyncio.Event().wait()
        await sent(connection, *args, **named)

    async def noting(connection, *args, **named):
        reply = await read(connection, *args, **named)
        names.append(len(reply) if isinstance(reply, list) else 0)
        return reply

    with monkeypatch.context() as patch:
        patch.setattr(connection_type, "send_packed_command", stalling)
        patch.setattr(connection_type, "read_response", noting)
        erasure = asyncio.create_task(redis.invalidate("tenant"))
        await until(lambda: len(exchanges) > answered, "the erasure is noted, what there is is counted, and some of it dropped")
        erasure.cancel()
        await asyncio.wait([erasure])
    assert max(names) <= AT_ONCE, "of a set of any size, one exchange has so much"
    with server_at(redis_url) as server:
        assert len(list(server.scan_iter("large:v:*"))) == len(many) - AT_ONCE
        assert await redis.invalidate("tenant") == len(many) - AT_ONCE
        assert list(server.scan_iter("large:[gnv]:*")) == []
    await redis.close()


async def test_redis_keeps_nothing_for_longer_than_the_entries_live(redis_url):
    cache = ShardedCache({"redis": RedisCache(redis_url, prefix="short:")}, PATIENT)
    await put(cache, {ADA: entry(fresh_s=0.05, stale_s=0.05)})
    await cache.lease(Key("tenant", "ada", "2"), "dead", 0.05)
    with server_at(redis_url) as server:
        assert [name for name in server.scan_iter("short:*") if name not in (b"short:e", b"short:x") and server.pttl(name) == -1] == []
    await cache.close()


async def test_redis_names_nobody_who_was_erased(redis_url):
    cache = ShardedCache({"redis": RedisCache(redis_url, prefix="erased:")}, PATIENT)
    await put(cache, {key: entry() for key in (*keys(3), *keys(3, group="bob"))})
    await cache.lease(Key("tenant", "ada", "leased"), "me", 60)

    def held():
        with server_at(redis_url) as server:
            names = list(server.scan_iter("erased:*"))
            indexes = [name for name in names if server.type(name) == b"zset"]
            return b" ".join(names + [member for name in indexes for member in server.zrange(name, 0, -1)])

    assert b"ada" in held()
    await cache.invalidate("tenant", "ada")
    assert b"ada" not in held()
    assert b"bob" in held()
    assert b"erased:x" in held()
    await cache.close()


@pytest.mark.parametrize("scope", [("tenant", "ada"), ("tenant", None), (None, None)])
@pytest.mark.parametrize("lost", ["g:* n:* a", "g:* n:* a x", "g:* n:* a e"])
async def test_an_entry_whose_index_redis_has_lost_is_erased_all_the_same(redis_url, scope, lost):
    cache = ShardedCache({"redis": RedisCache(redis_url, prefix="lost:")}, PATIENT)
    await nothing_is_left(cache)
    await put(cache, {ADA: entry(), Key("other", "bob", "1"): entry()})
    with server_at(redis_url) as server:
        for part in lost.split():
            server.delete(*server.scan_iter(f"lost:{part}"), "lost:nothing")
        assert (await cache.invalidate(*scope)).unconfirmed == ()
        assert server.exists("lost:v:-tenant:-ada:-1"), "nothing leads to it any more"
    assert ADA not in await present(cache, ADA)
    assert await cache.wait(ADA, 0) is None
    granted = await cache.lease(ADA, "me", 300)
    assert isinstance(granted, Granted)
    assert await cache.mput({ADA: entry()}, {ADA: granted.epoch}) == frozenset()
    assert await present(cache, ADA) == {ADA}
    await cache.close()


async def test_where_redis_evicts_an_index_before_its_entries_an_erasure_counts_all_the_same(tmp_path):
    pytest.importorskip("redis", reason="redis is not installed; install genrec with its extra redis")
    with running_redis(tmp_path, free_port()) as url, server_at(url) as server:
        cache = ShardedCache({"redis": RedisCache(url, "full:")}, PATIENT)
        await put(cache, {ADA: entry(), Key("tenant", "bob", "1"): entry()})
        await cache.invalidate("tenant", "bob")
        indexes, others = ("full:g:-tenant:-ada", "full:n:-tenant"), [f"other:{number}" for number in range(20)]

        def wait_until_idle(*names):
            eventually(lambda: all(server.object("idletime", name) >= 2 for name in names), "Redis tells what is used from what is not")

        def evicted():
            """The entry is used while others come, and what leads to it is the first to go: the others were put later, the entry last."""
            assert server.get("full:v:-tenant:-ada:-1")
            server.set(f"another:{time.monotonic_ns()}", b"x" * 100_000, ex=3600)
            return not server.exists(*indexes)

        wait_until_idle(*indexes)
        for name in others:
            server.set(name, b"x" * 100_000, ex=3600)
        wait_until_idle(*others)
        assert server.get("full:v:-tenant:-ada:-1")
        for setting, value in {"maxmemory-policy": "volatile-lru", "maxmemory-samples": 64}.items():
            server.config_set(setting, value)
        server.config_set("maxmemory", server.info("memory")["used_memory"])
        eventually(evicted, "the index is evicted", every_s=0.0)
        assert await present(cache, ADA) == {ADA}
        assert (await cache.invalidate("tenant", "ada")).unconfirmed == ()
        assert await present(cache, ADA) == set()
        assert server.zcard("full:x") == 2, "erasures are never evicted"
        await cache.close()


@pytest.mark.parametrize("others", [0, 3])
async def test_where_redis_has_no_room_for_an_erasure_all_that_it_keeps_counts_as_erased(tmp_path, others):
    """With `noeviction`, or where erasures alone take up the memory; `others`: erasures that it knows already."""
    pytest.importorskip("redis", reason="redis is not installed; install genrec with its extra redis")
    with running_redis(tmp_path, free_port()) as url, server_at(url) as server:
        cache = ShardedCache({"redis": RedisCache(url, "full:")}, PATIENT)
        await put(cache, {ADA: entry(), Key("tenant", "bob", "1"): entry()})
        for number in range(others):
            await cache.invalidate("tenant", str(number))
        server.config_set("maxmemory", 1)
        assert (await cache.invalidate("tenant", "ada")).unconfirmed == ()
        server.config_set("maxmemory", 0)
        assert await present(cache, ADA, Key("tenant", "bob", "1")) == set()
        assert not server.exists("full:v:-tenant:-ada:-1"), "its bytes are gone too"
        await put(cache, {ADA: entry()})
        assert await present(cache, ADA) == {ADA}
        await cache.close()


async def test_a_redis_that_may_evict_what_remembers_erasures_is_warned_of_where_it_tells_its_policy(tmp_path, caplog):
    pytest.importorskip("redis", reason="redis is not installed; install genrec with its extra redis")
    with running_redis(tmp_path, free_port()) as url, server_at(url) as server:
        server.execute_command("ACL", "SETUSER", "plain", "on", ">secret", "~*", "+@all", "-config")
        mute = url.replace("//", "//plain:secret@")
        for policy, asked, warns in (("noeviction", url, 1), ("allkeys-lru", url, 1), ("volatile-ttl", url, 0), ("allkeys-lru", mute, 0)):
            server.config_set("maxmemory-policy", policy)
            caplog.clear()
            await (await RedisCache.connect(CacheSettings(l2="redis", redis_url=asked), "shop")).close()
            assert caplog.text.count(f"has the maxmemory-policy {policy}") == warns, (policy, asked)


async def test_redis_counts_lookups_of_so_many_tenants_and_those_of_all_others_together(redis_url):
    cache = RedisCache(redis_url, "tenants:")
    await cache.mget([Key(f"tenant-{number}", "ada", "1") for number in range(COUNTED_NAMESPACES + 50)])
    assert (await cache.statistics()).by_namespace[OTHERS].misses == 50
    await cache.close()


@pytest.mark.parametrize(("comes", "left"), [("an erasure", 2), ("an entry", 1)])
async def test_redis_forgets_erasures_once_no_entry_from_before_can_live_as_the_next_erasure_or_entry_comes(redis_url, comes, left):
    cache = ShardedCache({"redis": RedisCache(redis_url, prefix="old:")}, PATIENT)
    long = entry(fresh_s=7200.0, stale_s=0.0)
    await nothing_is_left(cache)
    await put(cache, {ADA: long})
    with server_at(redis_url) as server:
        server.delete("old:x")
        hours_us = 3600 * 10**6
        began = int(server.hget("old:e", "now"))
        for age, digest in ((4, "older than an entry lives and is computed"), (2, "younger")):
            server.zadd("old:x", {digest: began - age * hours_us})
        server.hset("old:e", "marks", server.zcard("old:x"))
        if comes == "an erasure":
            await cache.invalidate("tenant", "bob")
        else:
            await put(cache, {Key("tenant", "bob", "1"): long})
        assert server.zcard("old:x") == left
        assert await present(cache, ADA) == {ADA}
    await cache.close()


async def test_a_look_up_is_one_round_trip(redis_url):
    cache = RedisCache(redis_url, prefix="trips:")
    await cache.mput({key: entry() for key in keys(9)}, (await cache.mget(keys(9))).epochs)
    with server_at(redis_url) as server:

        def sent():
            return {name: server.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("evalsha", "mget")}

        before = sent()
        assert len((await cache.mget(keys(9))).entries) == 9
        assert sent() == {**before, "evalsha": before["evalsha"] + 1}
    await cache.close()
