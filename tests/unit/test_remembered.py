"""What a gateway remembers of users, and what gateways tell each other of them through the shared cache."""

import asyncio
import dataclasses
import itertools
from contextlib import asynccontextmanager
from contextvars import ContextVar
from time import time
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from cluster.cache.admission import admission_of
from cluster.cache.entry import Entry, Key
from cluster.cache.memory import MemoryCache
from cluster.cache.recent import REMEMBERED
from cluster.cache.shard import CacheShard
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.cache.shared_notes import KEPT_S, SharedNotes
from cluster.values import Behaviour, RecommendRequest, SamplingOptions
from deployments.shown_items import Followed, ShownItems
from pipelines.answer_key import request_key
from pipelines.remembered import HALF_LIFE_S, RECALLED_AT_ONCE, REQUEST_CODEC, TELL_AGAIN_S, UsualRequests, usual_key
from pipelines.stale_fallback import StaleFallback
from tests.fakes.clock import Clock
from tests.waiting import until

NUMBERS = itertools.count()
ADA, BOB, CYD = (("default", user) for user in ("ada", "bob", "cyd"))
ASKED = RecommendRequest("ada", k=3, allowed=frozenset("123"), sampling=SamplingOptions(seed=7))


class Shard(CacheShard):
    """As it is, and counts what it is asked; `late` holds the answers back to what is read, and `sent` the questions themselves."""

    def __init__(self, memory=None):
        super().__init__(MemoryCache() if memory is None else memory)
        self.puts, self.gets, self.asked, self.late, self.sent = 0, 0, 0, asyncio.Event(), asyncio.Event()
        self.late.set()
        self.sent.set()

    async def mput(self, entries, epochs):
        self.puts += 1
        return await super().mput(entries, epochs)

    async def mget(self, keys, *, counted=True):
        async with self.held_back():
            return await super().mget(keys, counted=counted)

    async def epochs(self, keys):
        async with self.held_back():
            return await super().epochs(keys)

    @asynccontextmanager
    async def held_back(self):
        self.asked += 1
        await self.sent.wait()
        yield
        self.gets += 1
        await self.late.wait()


@pytest.fixture
async def shard():
    return Shard()


def gateway(shard, *, wall=time, **options):
    shared = ShardedCache({"only": shard}, SharedSettings(deadline_s=60))
    return UsualRequests(SharedNotes(shared, REQUEST_CODEC, wall), **options)


async def answers(shard, count):
    """Answers of 1 kB that are asked for once."""
    for _ in range(count):
        key = Key("default", "scanned", f"answer {next(NUMBERS)}")
        await shard.mput({key: Entry.lasting(b"", 1000, now=time(), fresh_s=3600)}, (await shard.mget([key])).epochs)


async def noted(usual, *requests):
    for request in requests:
        usual.note(request)
    await usual.shared.flush()


async def test_what_is_noted_is_sent_in_the_context_of_none_of_the_requests(shard):
    """Serve cancels the calls that were made in the context of a request whose client leaves."""
    caller, seen = ContextVar("caller", default="none"), []
    put, usual = shard.mput, gateway(shard)
    shard.mput = lambda entries, epochs: seen.append(caller.get()) or put(entries, epochs)
    caller.set("the first one's")
    await noted(usual, ASKED)
    assert seen == ["none"]


async def test_a_gateway_recalls_what_another_was_asked(shard):
    first, second = gateway(shard), gateway(shard)
    await noted(first, ASKED)
    assert second.of(*ADA) is None
    assert await second.recall([ADA, BOB]) == [ADA]
    assert second.of(*ADA) == ASKED
    assert (shard.memory.statistics().hits, shard.memory.statistics().misses) == (0, 0), "they are lookups of no request"


async def test_the_latest_request_holds_and_what_was_told_is_not_told_again(shard):
    first, second = gateway(shard), gateway(shard)
    await noted(first, ASKED)
    await noted(first, ASKED, replace(ASKED, cache="refresh", deadline_ms=20))
    assert shard.puts == 1
    await noted(first, replace(ASKED, k=5))
    await second.recall([ADA])
    assert second.of(*ADA) == replace(ASKED, k=5)


async def test_what_is_noted_here_while_another_request_is_recalled_is_later(shard):
    first, second = gateway(shard), gateway(shard)
    await noted(first, ASKED)
    shard.late.clear()
    asked, recalled = shard.gets, asyncio.create_task(second.recall([ADA]))
    await until(lambda: shard.gets > asked)
    second.note(replace(ASKED, k=5))
    shard.late.set()
    await recalled
    assert second.of(*ADA) == replace(ASKED, k=5)


async def test_what_is_on_its_way_to_the_others_is_later_than_what_is_recalled(shard):
    first, second = gateway(shard), gateway(shard)
    await noted(first, ASKED)
    shard.sent.clear()
    second.note(replace(ASKED, k=5))
    recalled = asyncio.create_task(second.recall([ADA]))
    shard.sent.set()
    assert await recalled == []
    assert second.of(*ADA) == replace(ASKED, k=5)
    await second.shared.flush()


async def test_what_a_user_goes_on_asking_for_is_told_again_before_it_is_dropped(shard):
    now = [1000.0]
    first, second = gateway(shard, clock=lambda: now[0]), gateway(shard)
    await noted(first, ASKED)
    await noted(second, replace(ASKED, k=5))
    now[0] += TELL_AGAIN_S
    await noted(first, ASKED)
    assert (shard.puts, await second.recall([ADA])) == (3, [ADA])
    assert second.of(*ADA) == ASKED


async def test_a_gateway_that_was_asked_last_keeps_to_that_though_it_did_not_tell_it_again_and_tells_it_now(shard):
    now = Clock(time())
    first, second = (gateway(shard, clock=now, wall=now) for _ in range(2))
    for usual, request in ((first, ASKED), (second, replace(ASKED, k=5)), (first, ASKED)):
        await noted(usual, request)
        now.advance(60)
    assert shard.puts == 2
    assert await first.recall([ADA]) == [ADA]
    assert first.of(*ADA) == ASKED
    await first.shared.flush()
    assert await second.recall([ADA]) == [ADA]
    assert second.of(*ADA) == ASKED


async def test_what_is_told_again_late_is_no_later_than_what_another_gateway_was_asked_meanwhile(shard):
    now = Clock(time())
    first, second = (gateway(shard, clock=now, wall=now) for _ in range(2))
    for usual, request in ((first, ASKED), (second, replace(ASKED, k=5)), (first, ASKED), (second, replace(ASKED, k=5))):
        await noted(usual, request)
        now.advance(60)
    await first.recall([ADA])
    await first.shared.flush()
    await second.recall([ADA])
    assert second.of(*ADA) == replace(ASKED, k=5)


async def test_what_is_recalled_again_and_again_is_not_driven_out_by_answers():
    shard = Shard(MemoryCache("s3fifo", 100_000))
    first, second = gateway(shard), gateway(shard)
    await answers(shard, 150)
    await noted(first, ASKED)
    for _ in range(200):
        await answers(shard, 3)
        assert await second.recall([ADA]) == [ADA]


async def test_after_a_scan_what_is_told_and_looked_for_is_known_again():
    now = [1000.0]
    shard = Shard(MemoryCache("s3fifo", 50_000, admission=admission_of(0.05)))
    first, second = gateway(shard, clock=lambda: now[0]), gateway(shard)
    await answers(shard, 1000)
    assert shard.memory.admission.strict
    await noted(first, ASKED)
    for _ in range(2):
        assert await second.recall([ADA]) == []
    now[0] += TELL_AGAIN_S
    await noted(first, ASKED)
    assert await second.recall([ADA]) == [ADA]


async def test_what_is_told_again_and_again_and_read_by_none_takes_no_place_in_a_cache_that_hits_too_rarely():
    now = [1000.0]
    shard = Shard(MemoryCache("s3fifo", 50_000, admission=admission_of(0.05)))
    usual = gateway(shard, clock=lambda: now[0])
    await answers(shard, 1000)
    kept = shard.memory.entries()
    for _ in range(5):
        await noted(usual, ASKED, RecommendRequest("bob"))
        now[0] += TELL_AGAIN_S
    assert shard.puts == 1000 + 5
    assert shard.memory.entries() == kept


async def tell(usual, users):
    await noted(usual, *map(RecommendRequest, users))


async def look_for(usual, users):
    assert await usual.recall([("default", user) for user in users]) == []


@pytest.mark.parametrize("done", [tell, look_for])
async def test_what_is_told_or_looked_for_of_users_that_never_ask_counts_as_no_lookup_that_misses(done):
    shard = Shard(MemoryCache("s3fifo", 100_000, admission=admission_of(0.5), window=100))
    usual = gateway(shard)
    await answers(shard, 1)
    [(known, _)] = shard.memory.entries()
    for number in range(300):
        await shard.mget([known])
        await done(usual, [f"user {number}-{one}" for one in range(3)])
    assert not shard.memory.admission.strict


async def test_what_is_computed_from_a_history_that_was_sent_is_not_told(shard):
    await noted(gateway(shard), replace(ASKED, behaviours=(Behaviour("1", 1),)))
    assert shard.puts == 0


@pytest.mark.parametrize(("length", "remembered"), [(3, True), (256, False)])
@pytest.mark.parametrize("field", ["blocked", "allowed"])
def test_a_request_that_lists_long_ids_is_not_remembered(field, length, remembered):
    usual = UsualRequests()
    usual.note(RecommendRequest("ada", **{field: frozenset(f"{number:0{length}}" for number in range(100))}))
    assert (usual.of(*ADA) is not None) == remembered


async def test_the_requests_of_many_users_are_recalled_some_at_a_time(shard):
    first, second = gateway(shard), gateway(shard)
    users = [("default", f"user {number}") for number in range(3 * RECALLED_AT_ONCE)]
    await noted(first, *(RecommendRequest(user) for _, user in users))
    sizes, mget = [], shard.mget
    shard.mget = lambda keys, **options: sizes.append(len(keys)) or mget(keys, **options)
    assert await second.recall(users) == users
    assert sizes == 3 * [RECALLED_AT_ONCE]


async def test_an_erased_user_is_recalled_nowhere(shard):
    first, second = gateway(shard), gateway(shard)
    await noted(first, ASKED, RecommendRequest("bob"))
    await shard.invalidate(*ADA)
    assert await second.recall([ADA, BOB]) == [BOB]


async def test_what_was_noted_before_an_erasure_is_not_told_after_it(shard):
    usual = gateway(shard)
    shard.late.clear()
    usual.note(RecommendRequest("bob"))
    await until(lambda: shard.gets)
    usual.note(ASKED)  # behind the other, which is on its way
    usual.forget(*ADA)
    await shard.invalidate("default", "bob")
    shard.late.set()
    await usual.shared.flush()
    assert (shard.memory.peek(usual_key(*ADA)), shard.memory.peek(usual_key(*BOB))) == (None, None)


async def test_what_is_about_to_be_told_as_its_user_is_erased_is_not_told_after_it(shard):
    usual = gateway(shard)
    shard.sent.clear()
    usual.note(RecommendRequest("bob"))
    usual.note(ASKED)
    await until(lambda: shard.asked)  # for the epoch, which is that of after the erasure
    usual.forget(*ADA)
    await shard.invalidate(*ADA)
    shard.sent.set()
    await usual.shared.flush()
    assert shard.memory.peek(usual_key(*ADA)) is None
    assert shard.memory.peek(usual_key(*BOB)) is not None


async def test_what_is_recalled_while_users_are_erased_is_forgotten(shard):
    first, second = gateway(shard), gateway(shard)
    await noted(first, ASKED)
    shard.late.clear()
    asked, recalled = shard.gets, asyncio.create_task(second.recall([ADA]))
    await until(lambda: shard.gets > asked)
    second.forget(*ADA)
    shard.late.set()
    assert await recalled == []
    assert second.of(*ADA) is None


async def test_the_users_that_ask_most_are_told_first_and_older_requests_count_less(shard):
    now = [1000.0]
    usual, other = gateway(shard, clock=lambda: now[0]), gateway(shard)
    await noted(usual, *map(RecommendRequest, ["cyd"] * 3))
    now[0] += 2 * HALF_LIFE_S
    await noted(usual, *map(RecommendRequest, ["bob", "ada", "bob"]))
    assert usual.hottest(9) == [BOB, ADA, CYD]
    now[0] += 100 * HALF_LIFE_S
    await noted(usual, *map(RecommendRequest, ["cyd", "bob", "cyd"]))
    assert usual.hottest(2) == [CYD, BOB]
    await noted(other, RecommendRequest("dee"), RecommendRequest("bob", k=5), RecommendRequest("bob"))
    await usual.recall([("default", "dee"), BOB])
    assert usual.of("default", "dee") is not None
    assert usual.hottest(9) == [CYD, BOB], "those that ask this gateway, and have lately"
    usual.forget(*CYD)
    assert usual.hottest(9) == [BOB]


def test_one_tenants_many_users_drive_out_no_other_tenants():
    usual, fallback, shown = UsualRequests(), StaleFallback("m"), ShownItems()
    honest = [RecommendRequest(f"user {number}", tenant="honest") for number in range(100)]
    flood = [RecommendRequest(f"user {number}", tenant="flood") for number in range(REMEMBERED)]
    for request in honest + flood:
        usual.note(request)
        note(fallback, request)
        shown.show(request.tenant, request.user_id, ["1"], "tiny/1", now=1000)
    assert (known(usual, honest + flood), len(shown)) == (REMEMBERED, REMEMBERED)
    assert all(usual.of(one.tenant, one.user_id) == one for one in honest)
    assert all(knows(fallback, one) for one in honest)
    assert {shown.follow(one.tenant, one.user_id, "1", 1000, now=1000)[0] for one in honest} == {Followed.YES}
    assert usual.of("flood", "user 99") is None
    assert sum(tenant == "honest" for tenant, _ in usual.hottest(100)) == 50


def test_tenants_that_have_long_been_idle_make_room_for_one_that_has_more_users():
    now = 0.0
    usual = UsualRequests(limit=100, clock=lambda: now)
    idle = [RecommendRequest(f"user {number % 10}", tenant=f"idle {number // 10}") for number in range(100)]
    for request in idle:
        usual.note(request)
    now = KEPT_S + 1
    usual.note(RecommendRequest("user 0", tenant="busy"))
    assert known(usual, idle) == 99
    assert usual.hottest(9) == [("busy", "user 0")]
    for number in range(80):
        usual.note(RecommendRequest(f"user {number}", tenant="busy"))
    assert all(usual.of("busy", f"user {number}") for number in range(80))


def test_answers_as_of_many_times_drive_out_no_last_good_answer():
    fallback = StaleFallback("m")
    note(fallback, RecommendRequest("ada"))
    for second in range(REMEMBERED):
        note(fallback, RecommendRequest("bob", request_time=second))
    assert knows(fallback, RecommendRequest("ada"))


async def test_requests_of_users_that_ask_other_gateways_drive_out_none_of_those_that_ask_this_one(shard):
    other, usual = gateway(shard), gateway(shard, limit=4)
    strangers = [RecommendRequest(f"stranger {number}") for number in range(4)]
    await noted(other, *strangers)
    await noted(usual, ASKED)
    await usual.recall([("default", one.user_id) for one in strangers])
    assert (usual.hottest(9), usual.of(*ADA), usual.of("default", "stranger 3")) == ([ADA], ASKED, strangers[3])
    await noted(usual, replace(strangers[3], k=5))
    assert usual.of("default", "stranger 3") == replace(strangers[3], k=5)
    usual.forget("default")
    assert [usual.of("default", one.user_id) for one in strangers] == [None] * 4


async def test_what_another_release_wrote_is_not_known(shard):
    first, second = gateway(shard), gateway(shard)
    await noted(first, ASKED)
    key = usual_key(*ADA)
    shard.memory.put(key, dataclasses.replace(shard.memory.peek(key), payload=b"another's"))
    assert await second.recall([ADA]) == []


def known(usual, requests):
    """How many of these users have a usual request."""
    return sum(usual.of(one.tenant, one.user_id) is not None for one in requests)


def note(fallback, request):
    """Have an answer be the request's last good one."""
    fallback.note(request, Key(request.tenant, request.user_id, "answer"), SimpleNamespace(degraded=False, stages=()))


def knows(fallback, request):
    return fallback._keys.get(request_key(request, "m")) is not None  # noqa: SLF001 - or it would take a cache that holds the answers


class Name(str):
    """A user's id that counts how often it is looked at."""

    looks = 0

    def __eq__(self, other):
        self.looks += 1
        return str.__eq__(self, other)

    def __hash__(self):
        self.looks += 1
        return str.__hash__(self)


@pytest.mark.parametrize("kept", ["usual requests", "last good answers", "shown items"])
def test_an_erasure_of_one_user_looks_at_none_of_the_others(kept):
    usual, fallback, shown = UsualRequests(), StaleFallback("m"), ShownItems()
    names = [Name(f"user {number}") for number in range(100)]
    for name in names:
        request = RecommendRequest(name)
        usual.note(request)
        note(fallback, request)
        shown.show("default", name, ["1"], "tiny/1", now=1000)
    before = [name.looks for name in names]
    {"usual requests": usual, "last good answers": fallback, "shown items": shown}[kept].forget("default", "user 7")
    assert [name for name, looks in zip(names, before, strict=True) if name.looks > looks] in ([], [names[7]])


def test_what_was_dropped_for_want_of_room_or_forgotten_may_be_noted_and_forgotten_again():
    usual, names = UsualRequests(limit=2), ("ada", "bob", "cyd")
    for tenant, erased in (("default", "ada"), ("default", None), (None, None), ("default", "cyd")):
        for name in names:
            usual.note(RecommendRequest(name))
        assert [usual.of("default", name) is not None for name in names] == [False, True, True]
        usual.forget(tenant, erased)
        left = {"ada": [False, True, True], "cyd": [False, True, False], None: [False] * 3}[erased]
        assert [usual.of("default", name) is not None for name in names] == left
