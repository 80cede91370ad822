"""The two tiers together, over shards in this process and with a clock of our own."""

import asyncio
import random
from contextvars import ContextVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from cluster import tracing
from cluster.background import LANE
from cluster.cache.admission import admission_of
from cluster.cache.codec import DECODED_TIMES, Codec
from cluster.cache.entry import Key, weight_of
from cluster.cache.memory import MemoryCache
from cluster.cache.policy import POLICIES
from cluster.cache.shard import CacheShard, Granted, Held
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.cache.tier_values import KEPT_TIMES, Computed, TierSettings
from cluster.cache.tiered import COMPUTED_TIMES, TieredCache
from cluster.errors import BackendUnavailable, ConfigError
from cluster.traffic.breaker import BreakerSettings
from tests.fakes.clock import Clock
from tests.reachable import strings_in
from tests.waiting import settled, until

pytestmark = pytest.mark.virtual_time

ADA = Key("tenant", "ada", "1")
TEXT = Codec(str.encode, bytes.decode)
WEIGHT = weight_of(DECODED_TIMES * len("answer 1000"))
"""What an entry of the tests takes at most."""
SHARED = SharedSettings(deadline_s=0.02, operator_s=0.05, breaker=BreakerSettings(failures_to_open=3))
PATIENT = SharedSettings(deadline_s=5.0)


class Work:
    """What is computed: "answer 1", "answer 2", ... It can be held up, fail or be degraded."""

    def __init__(self):
        self.calls, self.cancelled, self.error, self.options = 0, 0, None, {}
        self.go = asyncio.Event()
        self.go.set()
        self.begun, self.started = asyncio.Event(), asyncio.Semaphore(0)

    async def __call__(self):
        self.calls += 1
        number = self.calls
        self.begun.set()
        self.started.release()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error:
            raise self.error
        return Computed(f"answer {number}", **self.options)

    def hold(self):
        self.go.clear()
        self.begun.clear()


class Cluster:
    """Replicas, each with a memory of its own, that share the shards."""

    def __init__(self, replicas=3, shards=2, shared=PATIENT, **settings):
        self.clock = Clock()
        self.shards = {f"shard-{index}": CacheShard(MemoryCache(clock=self.clock), self.clock) for index in range(shards)}
        self.settings = TierSettings(**{"jitter": 0.0, "wait_s": 5.0, "lease_s": 60.0, **settings})
        self.replicas = [self.replica(shared) for _ in range(replicas)]

    def replica(self, shared=PATIENT, codec=TEXT, l2=True, rng=None, memory=None):
        second = ShardedCache(self.shards, shared) if l2 else None
        memory = MemoryCache(clock=self.clock) if memory is None else memory
        return TieredCache(memory, second, self.settings, codec, clock=self.clock, rng=rng or random.Random(7))


async def settle(cache):
    """Let its background tasks end."""
    await asyncio.gather(*(asyncio.all_tasks() - {asyncio.current_task()}), return_exceptions=True)
    await cache.flush()


async def ask(cache, work, key=ADA, **options):
    found = await cache.get_or_compute(key, work, **options)
    await cache.flush()
    return found


async def test_computes_once_then_answers_from_memory_and_elsewhere_from_the_shared_cache():
    cluster, work = Cluster(), Work()
    first, second, _ = cluster.replicas
    assert (await ask(first, work)).tier == "computed"
    cluster.clock.now += 10
    found = [await ask(first, work), await ask(second, work), await ask(second, work)]
    assert [(one.value, one.tier, one.age_s, one.stale) for one in found] == [
        ("answer 1", "l1", 10.0, False), ("answer 1", "l2", 10.0, False), ("answer 1", "l1", 10.0, False),
    ]  # fmt: skip
    assert work.calls == 1


@pytest.mark.parametrize("asked", ["where it was computed", "elsewhere"])
async def test_after_a_scan_what_is_computed_ahead_is_there_as_it_is_asked_for(asked):
    """Each visit gives the user's answer another key: before the lookup that it is computed ahead of, no tier was asked for it."""
    cluster, work = Cluster(replicas=0), Work()
    memories = [MemoryCache("s3fifo", 80 * WEIGHT, admission=admission_of(0.05), clock=cluster.clock) for _ in range(3)]
    cluster.shards = {"only": CacheShard(memories[0], cluster.clock)}
    first, second = (cluster.replica(memory=memory) for memory in memories[1:])
    for number in range(2000):
        await ask(first, work, Key("tenant", f"scanned {number}", "1"))
    assert [memory.admission.strict for memory in memories] == [True, True, False]
    tiers = []
    for visit in range(300):
        key = Key("tenant", f"user {visit % 50}", str(visit))
        first.refresh(key, work)
        await settle(first)
        tiers.append((await (first if asked == "where it was computed" else second).get_or_compute(key, work)).tier)
        cluster.clock.now += 7200 if visit % 50 == 49 else 1
    assert set(tiers) == {"l1" if asked == "where it was computed" else "l2"}


async def test_a_flood_of_refreshes_of_new_keys_does_not_drive_out_of_the_shared_cache_what_is_there():
    cluster, work = Cluster(replicas=0), Work()
    memory = MemoryCache("s3fifo", 80 * WEIGHT, admission=admission_of(0.05), clock=cluster.clock)
    cluster.shards = {"only": CacheShard(memory, cluster.clock)}
    cache = cluster.replica()
    for number in range(2000):
        await ask(cache, work, Key("tenant", f"scanned {number}", "1"))
    assert memory.admission.strict
    kept = memory.entries()
    for number in range(200):
        found = await cache.get_or_compute(Key("tenant", f"refreshed {number}", "1"), work, refresh=True)
        await cache.flush()
        assert found.tier == "computed"
    assert memory.entries() == kept


async def test_a_hundred_callers_of_three_replicas_compute_once():
    cluster, work = Cluster(), Work()
    work.hold()
    asked = [asyncio.create_task(cluster.replicas[number % 3].get_or_compute(ADA, work)) for number in range(100)]
    await work.begun.wait()
    await asyncio.sleep(0.02)
    work.go.set()
    found = await asyncio.gather(*asked)
    assert work.calls == 1
    assert {one.value for one in found} == {"answer 1"}
    assert sorted(one.tier for one in found) == ["computed"] + ["joined"] * 99


async def test_without_a_shared_cache_each_replica_computes_for_itself():
    cluster, work = Cluster(replicas=0), Work()
    replicas = [cluster.replica(l2=False) for _ in range(2)]
    found = await asyncio.gather(*(replicas[number % 2].get_or_compute(ADA, work) for number in range(20)))
    assert work.calls == 2
    assert {one.tier for one in found} == {"computed", "joined"}
    statistics = await replicas[0].statistics()
    assert (statistics.l2, statistics.shards, statistics.computed, statistics.joined) == (None, (), 1, 9)


async def test_another_replica_computes_when_the_one_that_began_dies():
    cluster, work = Cluster(lease_s=0.05), Work()
    shard = ShardedCache(cluster.shards, PATIENT)
    await shard.lease(ADA, "a replica that died", 0.05)
    asked = asyncio.create_task(cluster.replicas[0].get_or_compute(ADA, work))
    await asyncio.sleep(0)
    cluster.clock.now += 0.06
    assert (await asked).tier == "computed"
    assert work.calls == 1


async def test_computes_itself_when_another_replica_takes_too_long_and_shares_the_result():
    cluster, work = Cluster(wait_s=0.03), Work()
    await ShardedCache(cluster.shards, PATIENT).lease(ADA, "a slow replica", 60)
    assert (await ask(cluster.replicas[0], work)).tier == "computed"
    assert (await ask(cluster.replicas[1], work)).tier == "l2"


async def test_an_error_reaches_all_who_wait_here_and_is_not_kept():
    cluster, work = Cluster(), Work()
    work.hold()
    work.error = ArithmeticError("no such user")
    asked = [asyncio.create_task(cluster.replicas[0].get_or_compute(ADA, work)) for _ in range(5)]
    await work.begun.wait()
    work.go.set()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["no such user"] * 5
    work.error = None
    assert (await ask(cluster.replicas[0], work)).value == "answer 2"


async def test_an_error_in_one_replica_lets_the_one_that_waits_compute():
    cluster, failing, work = Cluster(), Work(), Work()
    failing.hold()
    failing.error = ArithmeticError("broken")
    first = asyncio.create_task(cluster.replicas[0].get_or_compute(ADA, failing))
    await failing.begun.wait()
    second = asyncio.create_task(cluster.replicas[1].get_or_compute(ADA, work))
    await asyncio.sleep(0.01)
    assert work.calls == 0
    failing.go.set()
    with pytest.raises(ArithmeticError):
        await first
    assert (await second).tier == "computed"


@pytest.mark.parametrize("goes", [0, 1], ids=["who began it", "who joined"])
async def test_who_goes_away_does_not_take_the_computation_along(goes):
    cluster, work = Cluster(), Work()
    work.hold()
    asked = [asyncio.create_task(cluster.replicas[0].get_or_compute(ADA, work)) for _ in range(2)]
    await work.begun.wait()
    await asyncio.sleep(0)
    asked[goes].cancel()
    await asyncio.gather(asked[goes], return_exceptions=True)
    work.go.set()
    assert (await asked[1 - goes]).value == "answer 1"
    assert (asked[goes].cancelled(), work.calls) == (True, 1)


async def test_what_several_wait_for_is_computed_in_the_context_of_none_of_them_and_in_the_trace_of_the_first():
    """Serve cancels the calls that were made in the context of a request whose client leaves, also where others wait for them."""
    caller, seen = ContextVar("caller", default="none"), []
    cache = Cluster().replicas[0]

    async def compute():
        seen.append((caller.get(), tracing.here()))
        return Computed("answer")

    caller.set("the first one's")
    with TracerProvider().get_tracer("test").start_as_current_span("request") as request:
        await cache.get_or_compute(ADA, compute)
    assert seen == [("none", request.get_span_context())]


async def test_what_nobody_waits_for_any_more_is_cancelled_and_its_leases_are_given_back():
    cluster, work = Cluster(), Work()
    work.hold()
    keys = [Key("tenant", "ada", str(number)) for number in range(50)]
    asked = [asyncio.create_task(cluster.replicas[0].get_or_compute(key, work)) for key in keys for _ in range(2)]
    for _ in keys:
        await work.started.acquire()
    for first in asked[::2]:
        first.cancel()
    await asyncio.gather(*asked[::2], return_exceptions=True)
    assert work.cancelled == 0
    for second in asked[1::2]:
        second.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    await cluster.replicas[0].flush()
    assert (work.calls, work.cancelled) == (50, 50)
    shared = ShardedCache(cluster.shards, PATIENT)
    assert {type(await shared.lease(key, "the next", 60)) for key in keys} == {Granted}


async def test_who_asks_while_an_abandoned_computation_ends_has_its_own_and_its_own_lease():
    cluster, work, leave = Cluster(), Work(), asyncio.Event()
    begun = asyncio.Event()

    async def ends_slowly():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await leave.wait()

    gone = asyncio.create_task(cluster.replicas[0].get_or_compute(ADA, ends_slowly))
    await begun.wait()
    gone.cancel()
    await asyncio.gather(gone, return_exceptions=True)
    work.hold()
    asked = asyncio.create_task(cluster.replicas[0].get_or_compute(ADA, work))
    await asyncio.sleep(0.01)
    leave.set()
    await work.begun.wait()
    await cluster.replicas[0].flush()
    assert isinstance(await ShardedCache(cluster.shards, PATIENT).lease(ADA, "the next", 60), Held)
    work.go.set()
    assert ((await asked).value, work.calls) == ("answer 1", 1)


async def joined_a_refresh(count):
    """A cache, the work of a refresh that has begun, and tasks that wait for it."""
    cache, work = Cluster().replicas[0], Work()
    work.hold()
    cache.refresh(ADA, work)
    await work.begun.wait()
    joined = [asyncio.create_task(cache.get_or_compute(ADA, work)) for _ in range(count)]
    await settled()
    return cache, work, joined


async def test_what_is_computed_in_the_background_goes_on_when_those_who_joined_go_away():
    cache, work, joined = await joined_a_refresh(3)
    for one in joined:
        one.cancel()
    await asyncio.gather(*joined, return_exceptions=True)
    work.go.set()
    await settle(cache)
    assert ((await ask(cache, work)).value, work.cancelled) == ("answer 1", 0)


async def test_gives_a_stale_answer_at_once_and_computes_the_next_one_once():
    cluster, work = Cluster(), Work()
    cache = cluster.replicas[0]
    await ask(cache, work)
    cluster.clock.now += 100
    work.hold()
    found = await asyncio.gather(*(cache.get_or_compute(ADA, work) for _ in range(10)))
    assert {(one.value, one.tier, one.stale, one.age_s) for one in found} == {("answer 1", "l1", True, 100.0)}
    work.go.set()
    await settle(cache)
    assert work.calls == 2
    assert (await ask(cache, work)).value == "answer 2"
    assert (await cache.statistics()).refreshes == 1


async def test_replicas_with_the_same_stale_answer_compute_the_next_one_once():
    cluster, work = Cluster(), Work()
    for cache in cluster.replicas:
        await ask(cache, work)
    cluster.clock.now += 100
    work.hold()
    stale = [await cache.get_or_compute(ADA, work) for cache in cluster.replicas]
    assert [one.stale for one in stale] == [True] * 3
    await work.begun.wait()
    await asyncio.sleep(0.01)
    work.go.set()
    for cache in cluster.replicas:
        await settle(cache)
    assert work.calls == 2
    assert [(await ask(cache, work)).value for cache in cluster.replicas] == ["answer 2"] * 3


async def test_a_stale_answer_of_the_shared_cache_is_given_and_replaced_too():
    cluster, work = Cluster(), Work()
    await ask(cluster.replicas[0], work)
    cluster.clock.now += 100
    found = await ask(cluster.replicas[1], work)
    assert (found.value, found.tier, found.stale) == ("answer 1", "l2", True)
    await settle(cluster.replicas[1])
    assert (await ask(cluster.replicas[1], work)).value == "answer 2"


async def test_an_answer_is_not_given_when_it_is_too_old():
    cluster, work = Cluster(ttl_s=60, stale_s=300), Work()
    await ask(cluster.replicas[0], work)
    cluster.clock.now += 361
    assert [(await ask(cache, work)).value for cache in cluster.replicas] == ["answer 2"] * 3


async def test_a_failed_refresh_leaves_the_stale_answer_and_is_repeated_a_little_later():
    cluster, work = Cluster(negative_ttl_s=1.0), Work()
    cache = cluster.replicas[0]
    await ask(cache, work)
    cluster.clock.now += 100
    work.error = ArithmeticError("broken")
    for _ in range(5):
        assert (await ask(cache, work)).value == "answer 1"
        await settle(cache)
    assert work.calls == 2
    cluster.clock.now += 1.1
    work.error = None
    await ask(cache, work)
    await settle(cache)
    assert (await ask(cache, work)).value == "answer 3"


@pytest.mark.parametrize(
    "options", [{"keep": False}, {"keep": False, "degraded": True}, {"degraded": True}, {"value": "unspeakable"}], ids=str
)
async def test_a_refresh_that_leaves_nothing_to_keep_is_repeated_a_little_later(options):
    def encode(value):
        if value == "unspeakable":
            raise ValueError(value)
        return value.encode()

    cluster, calls = Cluster(replicas=0, negative_ttl_s=1.0), []
    cache = cluster.replica(codec=Codec(encode, bytes.decode))
    outcomes = {1: {"value": "answer"}}

    async def work():
        calls.append(None)
        return Computed(**{"value": "another", **outcomes.get(len(calls), options)})

    await ask(cache, work)
    cluster.clock.now += 100
    for _ in range(5):
        assert (await ask(cache, work)).value == "answer"
        await settle(cache)
    assert len(calls) == 2
    cluster.clock.now += 1.1
    await ask(cache, work)
    await settle(cache)
    assert len(calls) == 3


async def test_a_degraded_answer_lives_for_a_moment_and_is_never_stale():
    cluster, work = Cluster(negative_ttl_s=1.0), Work()
    work.options = {"degraded": True}
    first, second, _ = cluster.replicas
    assert (await ask(first, work)).tier == "computed"
    cluster.clock.now += 0.9
    assert [(await ask(first, work)).tier, (await ask(second, work)).tier] == ["l1", "l2"]
    cluster.clock.now += 0.2
    assert [(await ask(first, work)).value, (await ask(second, work)).value] == ["answer 2"] * 2


async def test_a_degraded_answer_does_not_take_the_place_of_a_good_one_that_is_stale():
    cluster, work = Cluster(), Work()
    cache = cluster.replicas[0]
    await ask(cache, work)
    cluster.clock.now += 100
    work.options = {"degraded": True}
    for _ in range(3):
        await ask(cache, work)
        await settle(cache)
    found = await ask(cache, work)
    assert (found.value, found.stale, work.calls) == ("answer 1", True, 2)
    cluster.clock.now += 1.1
    work.options = {}
    await ask(cache, work)
    await settle(cache)
    assert (await ask(cache, work)).value == "answer 3"


async def test_nor_does_it_take_its_place_in_the_shared_cache_where_this_memory_did_not_take_it_in():
    cluster, work = Cluster(replicas=1), Work()
    small = cluster.replica(memory=MemoryCache(capacity_bytes=1, clock=cluster.clock))
    await ask(cluster.replicas[0], work)
    cluster.clock.now += 100
    work.options = {"degraded": True}
    for _ in range(3):
        found = await ask(small, work)
        await settle(small)
        assert (found.value, found.tier, found.stale, work.calls) == ("answer 1", "l2", True, 2)
    granted = await small.shared.lease(ADA, "another replica", 60, newer_than=cluster.clock.now)
    assert isinstance(granted, Granted), "the lease is given back"
    await small.shared.release(ADA, "another replica")
    cluster.clock.now += 1.1
    work.options = {}
    await ask(small, work)
    await settle(small)
    assert (await ask(cluster.replica(), work)).value == "answer 3"


async def test_nor_does_it_take_the_place_of_one_that_another_replica_computed_meanwhile():
    cluster, good, degraded = Cluster(wait_s=0.05), Work(), Work()
    first, second, third = cluster.replicas
    degraded.options = {"degraded": True}
    for work in (good, degraded):
        work.hold()
    asked = []
    for cache, work in ((first, good), (second, degraded)):
        asked.append(asyncio.create_task(ask(cache, work)))
        await work.begun.wait()
    for work, one in zip((good, degraded), asked, strict=True):
        work.go.set()
        assert (await one).tier == "computed"
    found = await ask(third, work := Work())
    assert (found.tier, work.calls) == ("l2", 0)


async def test_nor_does_it_take_the_place_of_one_that_is_fresh_where_none_is_ever_stale():
    cluster, work = Cluster(stale_s=0.0, ttl_s=60), Work()
    cache = cluster.replicas[0]
    await ask(cache, work)
    work.options = {"degraded": True}
    assert (await cache.get_or_compute(ADA, work, refresh=True)).value == "answer 2"
    assert (await ask(cache, work)).value == "answer 1"


@pytest.mark.parametrize("outcome", ["fails", "is not kept"])
async def test_the_lease_of_a_computation_that_leaves_nothing_is_given_back(outcome):
    cluster, work = Cluster(), Work()
    work.error = ArithmeticError("broken") if outcome == "fails" else None
    work.options = {"keep": False}
    await asyncio.gather(cluster.replicas[0].get_or_compute(ADA, work), return_exceptions=True)
    await cluster.replicas[0].flush()
    assert isinstance(await ShardedCache(cluster.shards, PATIENT).lease(ADA, "the next", 60), Granted)


async def test_the_lease_of_an_answer_that_finds_no_room_on_its_way_is_given_back():
    cluster, work = Cluster(max_writes=0), Work()
    await ask(cluster.replicas[0], work)
    assert isinstance(await ShardedCache(cluster.shards, PATIENT).lease(ADA, "the next", 60), Granted)


@pytest.mark.parametrize("turns", range(6))
async def test_a_lease_that_is_granted_as_its_caller_leaves_is_given_back(turns):
    """`turns`: of the event loop, from the grant until the caller leaves."""
    cluster, work, granted = Cluster(shards=1), Work(), asyncio.Event()
    (shard,) = cluster.shards.values()
    grant = shard.lease

    async def noted(*arguments):
        leased = await grant(*arguments)
        granted.set()
        return leased

    shard.lease = noted
    work.hold()
    asked = asyncio.create_task(cluster.replicas[0].get_or_compute(ADA, work, look_up_s=60.0))
    await granted.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    asked.cancel()
    await settled()
    await cluster.replicas[0].flush()
    assert asked.cancelled()
    assert isinstance(await ShardedCache(cluster.shards, PATIENT).lease(ADA, "the next", 60), Granted)


async def test_what_is_not_to_be_kept_is_given_to_those_who_wait_and_to_nobody_else():
    cluster, work = Cluster(), Work()
    work.options = {"keep": False}
    found = await asyncio.gather(*(cluster.replicas[0].get_or_compute(ADA, work) for _ in range(3)))
    assert [one.value for one in found] == ["answer 1"] * 3
    assert (await ask(cluster.replicas[0], work)).value == "answer 2"
    assert (await ask(cluster.replicas[1], work)).value == "answer 3"


async def test_times_vary_by_the_jitter_so_that_answers_do_not_end_together():
    cluster = Cluster(replicas=0, jitter=0.1, ttl_s=60.0)
    memory = MemoryCache(clock=cluster.clock)
    cache = cluster.replica(l2=False, rng=random.Random(3), memory=memory)
    work = Work()
    keys = [Key("tenant", "ada", str(number)) for number in range(200)]
    for key in keys:
        await cache.get_or_compute(key, work)
    lasting = [memory.peek(key).fresh_s for key in keys]
    assert 54 <= min(lasting) < 56
    assert 64 < max(lasting) <= 66


def test_what_reckons_with_the_time_that_an_answer_is_kept_leaves_room_for_the_jitter():
    assert 1 + TierSettings().jitter < KEPT_TIMES


async def test_a_hot_answer_is_computed_anew_before_its_time_is_over():
    cluster, work = Cluster(ttl_s=60.0, hot_per_minute=6.0), Work()
    cache = cluster.replicas[0]
    for _ in range(47):
        await ask(cache, work)
        cluster.clock.now += 1
    assert work.calls == 1
    cluster.clock.now += 2  # a fifth of 60 s is left at 48 s
    found = await ask(cache, work)
    await settle(cache)
    assert (found.value, found.stale, work.calls) == ("answer 1", False, 2)
    assert (await ask(cache, work)).value == "answer 2"
    ((digest, rate),) = (await cache.statistics()).hot
    assert digest == "1"
    assert rate > 6


async def test_a_cold_answer_is_not_computed_ahead_of_its_time():
    cluster, work = Cluster(ttl_s=60.0), Work()
    await ask(cluster.replicas[0], work)
    cluster.clock.now += 55
    await ask(cluster.replicas[0], work)
    await settle(cluster.replicas[0])
    assert work.calls == 1


async def test_computes_the_next_answer_in_the_background_when_told_to():
    cluster, work = Cluster(), Work()
    cache = cluster.replicas[0]
    assert cache.refresh(ADA, work)
    assert not cache.refresh(ADA, work)
    await settle(cache)
    assert ((await ask(cache, work)).tier, (await ask(cluster.replicas[1], work)).tier, work.calls) == ("l1", "l2", 1)


async def test_who_asks_while_it_is_computed_in_the_background_waits_for_that():
    cluster, work = Cluster(), Work()
    work.hold()
    cluster.replicas[0].refresh(ADA, work)
    await work.begun.wait()
    asked = [asyncio.create_task(cache.get_or_compute(ADA, work)) for cache in cluster.replicas]
    await asyncio.sleep(0.01)
    work.go.set()
    assert [one.tier for one in await asyncio.gather(*asked)] == ["joined"] * 3
    assert work.calls == 1


async def test_no_more_is_computed_in_the_background_than_there_is_room_for():
    cluster, work = Cluster(max_background=4), Work()
    cache = cluster.replicas[0]
    work.hold()
    begun = [cache.refresh(Key("tenant", "ada", str(number)), work) for number in range(5)]
    assert begun == [True, True, False, False, False]
    work.go.set()
    await settle(cache)
    assert (await cache.statistics()).dropped == 3
    assert cache.refresh(Key("tenant", "ada", "4"), work)
    await settle(cache)


@pytest.mark.parametrize("lanes", [("ours", "theirs"), (None, None)], ids=["keys", "tenants without keys"])
async def test_refreshes_of_one_caller_take_no_room_of_anothers(lanes):
    cluster, work = Cluster(), Work()
    cache, begun = cluster.replicas[0], []
    work.hold()
    for tenant, lane, count in (("shop", lanes[0], 64), ("press", lanes[1], 1)):
        LANE.set(lane)
        begun.append([cache.refresh(Key(tenant, "ada", str(number)), work) for number in range(count)])
    assert begun == [[True] * 32 + [False] * 32, [True]]
    work.go.set()
    await settle(cache)


@pytest.mark.parametrize(("free", "begun"), [(0, 0), (1, 1), (8, 4), (1000, 32)])
async def test_no_more_refreshes_are_under_way_than_places_are_free(free, begun):
    cluster, work = Cluster(), Work()
    cache = cluster.replicas[0]
    cache.give_way(lambda: free)
    work.hold()
    assert sum(cache.refresh(Key("tenant", "ada", str(number)), work) for number in range(64)) == begun
    work.go.set()
    await settle(cache)


async def test_what_is_expected_is_computed_by_the_time_that_it_returns_and_takes_no_room_from_refreshes():
    cluster, work = Cluster(max_background=1), Work()
    cache = cluster.replicas[0]
    keys = [Key("tenant", "ada", f"expected {number}") for number in range(3)]
    work.hold()
    expected = [asyncio.create_task(cache.expect(key, work)) for key in keys]
    await until(lambda: work.calls == 3)
    assert cache.refresh(ADA, work)
    asked = asyncio.create_task(cache.get_or_compute(keys[2], work))
    await settled()
    await cache.expect(ADA, work)
    work.go.set()
    await asyncio.gather(*expected)
    assert [(await ask(cache, work, key)).tier for key in keys] == ["l1"] * 3
    assert ((await asked).tier, work.calls) == ("joined", 4)
    await settle(cache)


async def test_what_is_expected_is_not_computed_again_where_a_good_answer_is_kept_here_or_elsewhere():
    cluster, work = Cluster(ttl_s=60.0), Work()
    first, second, _ = cluster.replicas
    await ask(first, work)
    for cache in (first, second):
        await cache.expect(ADA, work)
    assert work.calls == 1
    cluster.clock.now += 70
    await first.expect(ADA, work)
    assert ((await ask(first, work)).value, work.calls) == ("answer 2", 2)
    work.options, other = {"degraded": True}, Key("tenant", "bob", "1")
    await ask(first, work, other)
    work.options = {}
    await first.expect(other, work)
    assert ((await ask(first, work, other)).value, work.calls) == ("answer 4", 4)


async def test_what_is_expected_and_breaks_is_not_tried_again_at_once_and_ends_with_the_one_that_waits():
    cluster, work = Cluster(), Work()
    cache = cluster.replicas[0]
    work.error = ValueError("broken")
    for _ in range(2):
        await cache.expect(ADA, work)
    assert work.calls == 1
    work.hold()
    waits = asyncio.create_task(cache.expect(Key("tenant", "bob", "1"), work))
    await work.begun.wait()
    waits.cancel()
    await settle(cache)
    assert work.cancelled == 1


async def test_asked_to_refresh_it_gives_nothing_that_was_kept():
    cluster, work = Cluster(), Work()
    first, second, _ = cluster.replicas
    await ask(first, work)
    found = await first.get_or_compute(ADA, work, refresh=True)
    await first.flush()
    assert (found.value, found.tier) == ("answer 2", "computed")
    assert [(await ask(first, work)).value, (await ask(second, work)).value] == ["answer 2"] * 2


async def test_asked_to_refresh_it_does_not_take_what_somebody_only_looks_up():
    cluster, work = Cluster(), Work()
    first, second, _ = cluster.replicas
    await ask(first, work)
    looked_up, anew = await asyncio.gather(second.get_or_compute(ADA, work), second.get_or_compute(ADA, work, refresh=True))
    assert [(one.value, one.tier) for one in (looked_up, anew)] == [("answer 1", "l2"), ("answer 2", "computed")]


async def test_looks_without_computing():
    cluster, work = Cluster(), Work()
    first, second, _ = cluster.replicas
    assert await first.get(ADA) is None
    await ask(first, work)
    assert [(await cache.get(ADA)).tier for cache in (first, second, second)] == ["l1", "l2", "l1"]


async def test_forgets_a_user_in_both_tiers():
    cluster, work = Cluster(), Work()
    cache = cluster.replicas[0]
    bob = Key("tenant", "bob", "1")
    for key in (ADA, Key("tenant", "ada", "2"), bob):
        await ask(cache, work, key)
    erased = await cache.invalidate("tenant", "ada")
    assert (erased.l1, erased.l2, erased.dropped, erased.unconfirmed) == (2, 2, 4, ())
    assert (await cache.get(ADA), (await cache.get(bob)).tier) == (None, "l1")


@pytest.mark.parametrize("scope", [("tenant", "ada"), ("tenant", None), (None, None)])
async def test_an_erasure_while_it_is_computed_keeps_it_from_coming_back(scope):
    cluster, work = Cluster(), Work()
    first, second, _ = cluster.replicas
    work.hold()
    asked = asyncio.create_task(first.get_or_compute(ADA, work))
    await work.begun.wait()
    await first.invalidate(*scope)
    work.go.set()
    assert (await asked).value == "answer 1"  # asked before: answered
    await first.flush()
    assert (await first.get(ADA), await second.get(ADA)) == (None, None)


async def test_an_erasure_keeps_it_out_of_memory_also_where_that_is_the_only_tier():
    cluster, work = Cluster(replicas=0), Work()
    cache = cluster.replica(l2=False)
    work.hold()
    asked = asyncio.create_task(cache.get_or_compute(ADA, work))
    await work.begun.wait()
    await cache.invalidate("tenant", "ada")
    work.go.set()
    await asked
    assert await cache.get(ADA) is None


async def test_an_erasure_in_another_replica_keeps_what_is_computed_here_from_coming_back():
    cluster, work = Cluster(), Work()
    first, second, _ = cluster.replicas
    work.hold()
    asked = asyncio.create_task(first.get_or_compute(ADA, work))
    await work.begun.wait()
    await second.invalidate("tenant", "ada")
    work.go.set()
    await asked
    await first.flush()
    assert (await first.get(ADA), await second.get(ADA)) == (None, None)


async def test_who_asks_after_an_erasure_is_not_given_what_began_before_it():
    cluster, work = Cluster(), Work()
    cache = cluster.replicas[0]
    work.hold()
    before = asyncio.create_task(cache.get_or_compute(ADA, work))
    await work.begun.wait()
    await cache.invalidate("tenant", "ada")
    after = asyncio.create_task(cache.get_or_compute(ADA, work))
    await asyncio.sleep(0.01)
    work.go.set()
    assert [(await before).value, (await after).value] == ["answer 1", "answer 2"]
    await cache.flush()
    assert (await cluster.replicas[1].get(ADA)).value == "answer 2"


async def test_an_erasure_while_it_comes_from_the_shared_cache_keeps_it_out_of_memory():
    cluster, work = Cluster(shards=1), Work()
    first, second, _ = cluster.replicas
    await ask(first, work)
    (shard,) = cluster.shards.values()
    found, arrived = shard.lease, asyncio.Event()

    async def slowly(*arguments):
        entry = await found(*arguments)
        await arrived.wait()
        return entry

    shard.lease = slowly
    asked = asyncio.create_task(second.get_or_compute(ADA, work))
    await asyncio.sleep(0.01)
    second.forget("tenant", "ada")
    arrived.set()
    await asked
    assert (await second.statistics()).l1.entries == 0


class HangingShard:
    """Whatever is asked of it, it does not answer."""

    def __getattr__(self, name):
        async def hang(*_):
            await asyncio.Event().wait()

        return hang


class RaisingShard:
    def __getattr__(self, name):
        async def fail(*_):
            raise OSError("broken pipe")

        return fail


@pytest.mark.parametrize("shard", [HangingShard(), RaisingShard()], ids=["hangs", "raises"])
async def test_a_shared_cache_that_is_broken_is_a_miss_and_memory_serves_on(shard):
    cluster, work = Cluster(replicas=0), Work()
    cluster.shards = {"only": shard}
    cache = cluster.replica(SHARED)
    found = [await ask(cache, work, Key("tenant", "ada", str(number % 10))) for number in range(20)]
    assert [one.tier for one in found] == ["computed"] * 10 + ["l1"] * 10
    statistics = await cache.statistics()
    assert 3 <= statistics.l2_failures < 10  # the breaker spares the rest
    assert (await cache.invalidate("tenant", "ada")).unconfirmed == ("only",)
    await cache.close()


async def test_what_cannot_be_decoded_is_a_miss_and_is_replaced():
    cluster, work = Cluster(), Work()
    other = cluster.replica(codec=Codec(lambda value: b"\xff" + value.encode(), lambda payload: payload[1:].decode()))
    await ask(other, work)
    found = await ask(cluster.replicas[0], work)
    assert (found.value, found.tier) == ("answer 2", "computed")
    assert (await cluster.replicas[0].statistics()).codec_failures == 1
    assert (await ask(cluster.replicas[1], work)).tier == "l2"


async def test_what_cannot_be_encoded_is_answered_and_not_kept():
    def refuse(value):
        raise ValueError(value)

    cluster, work = Cluster(), Work()
    cache = cluster.replica(codec=Codec(refuse, bytes.decode))
    assert [(await ask(cache, work)).tier for _ in range(2)] == ["computed"] * 2
    assert (await cache.statistics()).codec_failures == 2
    assert (await ask(cluster.replicas[0], work)).tier == "computed"


async def test_weighs_in_memory_what_the_objects_take_and_in_the_shared_cache_what_the_bytes_do():
    cluster, work = Cluster(), Work()
    for cache in cluster.replicas[:2]:
        await ask(cache, work)
        statistics = await cache.statistics()
        times = COMPUTED_TIMES if cache is cluster.replicas[0] else DECODED_TIMES
        assert (statistics.l1.used_bytes, statistics.l2.used_bytes) == (weight_of(times * len("answer 1")), weight_of(len("answer 1")))


@pytest.mark.parametrize("policy", sorted(POLICIES))
async def test_after_an_erasure_nothing_here_or_in_the_shards_names_the_user_any_more(policy):
    cluster, work = Cluster(replicas=0, shards=1), Work()
    (shard,) = cluster.shards.values()
    shard.memory = MemoryCache(policy, 10 * WEIGHT, clock=cluster.clock)  # most is evicted, and may be remembered as such
    cache = cluster.replica(memory=MemoryCache(policy, 10 * WEIGHT, clock=cluster.clock))
    for number in range(40):
        await ask(cache, work, Key("tenant", "ada", str(number // 2 % 17)))
    await ask(cache, work, Key("tenant", "bob", "1"))
    work.options = {"keep": False}
    await ask(cache, work, Key("tenant", "ada", "not kept"), refresh=True)
    await ShardedCache(cluster.shards, PATIENT).lease(Key("tenant", "ada", "leased"), "a replica", 60)
    assert "ada" in strings_in(cache) & strings_in(shard)
    assert not cache.refresh(Key("tenant", "ada", "not kept"), work), "that it was not kept is remembered for a while"
    await cache.invalidate("tenant", "ada")
    assert "ada" not in strings_in([cache, shard])
    assert "bob" in strings_in(cache)


async def test_closing_ends_what_goes_on_in_the_background_and_sends_what_was_computed():
    cluster, work = Cluster(), Work()
    first, second, _ = cluster.replicas
    await first.get_or_compute(ADA, work)
    work.hold()
    first.refresh(Key("tenant", "ada", "2"), work)
    await work.begun.wait()
    await first.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert not first.refresh(Key("tenant", "ada", "3"), work)
    assert (await second.get(ADA)).value == "answer 1"


async def test_a_request_that_joined_what_closing_ends_gets_an_error_of_ours_for_it_was_not_cancelled_itself():
    cache, _, (joined, left) = await joined_a_refresh(2)
    left.cancel()
    await cache.close()
    with pytest.raises(BackendUnavailable, match="this process ends"):
        await joined
    with pytest.raises(asyncio.CancelledError):
        await left


async def test_writes_that_find_no_room_are_dropped_and_counted():
    cluster = Cluster(max_writes=3)
    keys = [Key("tenant", "ada", str(number)) for number in range(10)]
    work = Work()
    work.hold()
    asked = [asyncio.create_task(cluster.replicas[0].get_or_compute(key, work)) for key in keys]
    await asyncio.sleep(0.01)
    work.go.set()
    await asyncio.gather(*asked)
    await cluster.replicas[0].flush()
    statistics = await cluster.replicas[0].statistics()
    assert statistics.dropped > 0
    assert statistics.l2.insertions == 10 - statistics.dropped


PARTS = st.text(alphabet="ab:\0é", max_size=3)
ANY_KEYS = st.lists(st.builds(Key, PARTS, PARTS, PARTS), min_size=1, max_size=8)


@given(ANY_KEYS, st.integers(0, 2**32))
def test_no_key_is_ever_given_the_answer_of_another(keys, seed):
    async def checked():
        cluster, draw = Cluster(), random.Random(seed)
        for _ in range(3 * len(keys)):
            key = draw.choice(keys)

            async def compute(key=key):
                return Computed(repr(tuple(key)))

            assert (await ask(draw.choice(cluster.replicas), compute, key)).value == repr(tuple(key))

    asyncio.run(checked())


@given(ANY_KEYS, st.integers(0, 2**32))
def test_an_erasure_leaves_nothing_of_its_user_and_everything_of_the_others(keys, seed):
    async def checked():
        cluster, draw = Cluster(replicas=2), random.Random(seed)
        first, second = cluster.replicas
        for key in keys:
            await ask(first, Work(), key)
        erased = draw.choice(keys)
        await first.invalidate(erased.namespace, erased.group)
        for key in keys:
            assert (await second.get(key) is None) == (key[:2] == erased[:2])

    asyncio.run(checked())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"ttl_s": 0}, "ttl_s is 0"),
        ({"stale_s": -1}, "stale_s is -1"),
        ({"jitter": 1.0}, "jitter is 1.0"),
        ({"max_background": -1}, "max_background is -1"),
    ],
)
def test_refuses_settings_that_make_no_sense(settings, problem):
    with pytest.raises(ConfigError, match=problem):
        TierSettings(**settings)
