"""The event store on a request's path: away at first, slow, broken, back again."""

import asyncio
import gc

import pytest

from cluster.background import LANE, Background
from cluster.cache.single_flight import SingleFlight
from cluster.errors import BackendUnavailable, DeadlineExceeded
from cluster.events.guarded import GuardedHistories
from cluster.events.opened_later import StoreOpenedLater
from cluster.events.read_turns import ReadTurns
from cluster.events.store import Event, StoredHistory, open_event_store
from cluster.values import Behaviour, RecommendRequest
from pipelines.stored_history import StoredHistories
from tests.waiting import passed, settled, until

pytestmark = pytest.mark.virtual_time


class Playing:
    """A store that a test makes slow or breaks, and the function that opens it."""

    readers = 4

    def __init__(self):
        self.asked, self.now, self.delay, self.error, self.away, self.closed = 0, 0.0, 0.0, None, False, False

    async def open(self, url):
        if self.away:
            raise BackendUnavailable("nobody listens")
        return self

    async def version(self, tenant, user_id):
        self.asked += 1
        await asyncio.sleep(self.delay)
        if self.error:
            raise self.error
        return "v"

    async def history(self, tenant, user_id, limit, until=None):
        return StoredHistory((), await self.version(tenant, user_id))

    async def append(self, events):
        await asyncio.sleep(self.delay)
        return []

    async def close(self):
        self.closed = True


@pytest.fixture
def playing():
    return Playing()


@pytest.fixture
def store(playing):
    return StoreOpenedLater("played://", playing.open)


@pytest.fixture
def guarded(playing, store):
    return GuardedHistories(store, 0.05, clock=lambda: playing.now)


async def test_a_store_that_is_away_at_the_start_is_used_once_it_is_back(playing, store, guarded):
    playing.away = True
    assert await store.open() == "nobody listens"
    with pytest.raises(BackendUnavailable, match="nobody listens"):
        await store.append([])
    playing.away = False
    assert await store.append([]) == []
    assert await guarded.version("t", "u") == "v"


async def test_a_slow_read_for_an_answer_is_given_up_and_one_that_a_caller_asks_for_is_not(playing, store, guarded):
    playing.delay = 0.2
    with pytest.raises(BackendUnavailable, match=r"played\) did not answer within 0.05 s"):
        await guarded.version("t", "u")
    assert await store.append([]) == []
    assert (await store.history("t", "u", 10)).version == "v"


async def test_a_store_that_keeps_failing_is_left_alone_for_a_while(playing, guarded):
    playing.error = BackendUnavailable("broken")
    for _ in range(5):
        with pytest.raises(BackendUnavailable, match=r"the event store \(played\) does not answer"):
            await guarded.history("t", "u", 10)
    assert playing.asked == 3
    playing.error, playing.now = None, 1.5
    assert (await guarded.history("t", "u", 10)).version == "v"


async def test_one_read_tries_whether_a_store_that_hung_is_back_and_the_others_do_not_wait_for_it(playing, guarded):
    logged = list[object]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    playing.delay = 1.0
    await asyncio.gather(*(guarded.version("t", "u") for _ in range(3)), return_exceptions=True)
    for leaves in (True, False):  # a trial is decided even where its request leaves
        playing.now += 30.0
        before, trying = playing.asked, asyncio.create_task(guarded.version("t", "u"))
        await until(lambda before=before: playing.asked > before)
        with pytest.raises(BackendUnavailable, match=r"did not answer within 0.05 s; one request is trying it again"):
            await guarded.version("t", "u")
        assert playing.asked == before + 1
        if leaves:
            trying.cancel()
        await asyncio.gather(trying, return_exceptions=True)
        await passed(0.05)  # a trial has no more time than that
        with pytest.raises(BackendUnavailable, match="it is asked again in"):
            await guarded.version("t", "u")
    playing.delay, playing.now = 0.0, playing.now + 30.0
    assert [await guarded.version("t", "u") for _ in range(2)] == ["v", "v"]
    gc.collect()
    assert logged == [], "an error that no request waits for is no error of the program"


async def test_a_store_that_hangs_is_left_alone_even_where_every_request_is_in_a_hurry(playing, guarded):
    playing.delay = 1.0
    for _ in range(30):
        with pytest.raises((TimeoutError, BackendUnavailable)):
            await asyncio.wait_for(guarded.version("t", "u"), 0.01)
    asked = playing.asked
    with pytest.raises(BackendUnavailable, match=r"did not answer within 0.05 s; it is asked again in"):
        await guarded.version("t", "u")
    assert playing.asked == asked


async def test_requests_that_leave_a_store_that_answers_do_not_open_its_breaker(playing, guarded):
    playing.delay = 0.02
    for _ in range(30):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(guarded.version("t", "u"), 0.01)
    assert await guarded.version("t", "u") == "v"


async def test_a_read_without_a_deadline_that_waits_for_no_turn_has_one_timer(guarded, monkeypatch):
    loop, timers = asyncio.get_running_loop(), []
    call_at = loop.call_at
    monkeypatch.setattr(loop, "call_at", lambda when, *rest, **more: timers.append(when - loop.time()) or call_at(when, *rest, **more))
    assert await StoredHistories(guarded, 100).version(RecommendRequest("u")) == "v"
    assert timers == pytest.approx([0.05]), "that of the guard"


class FewReaders(Playing):
    """A store that reads four histories at a time, each for 19 ms, and has the others wait as they came; and guarded histories of it.

    `began`: the tenants of the reads that began; `longer`: by how much some tenants' take. Those of "many" are for answers, or `itself`,
    for a caller that asks for histories itself.
    """

    name = "played"

    def __init__(self, *, itself):
        super().__init__()
        self.delay, self.began, self.itself, self.free = 0.019, [], itself, asyncio.Semaphore(self.readers)
        self.turns, self.longer = ReadTurns(lambda: self.readers), {}
        self.guarded = GuardedHistories(self, 0.05, self.turns)

    async def version(self, tenant, user_id):
        async with self.free:
            self.began.append(tenant)
            await asyncio.sleep(self.longer.get(tenant, 0.0))
            return await super().version(tenant, user_id)

    async def read_of_many(self):
        return await (self.read_itself("many") if self.itself else self.guarded.version("many", "u"))

    async def read_itself(self, tenant):
        return await self.turns.read(tenant, lambda: self.version(tenant, "u"), 5.0)

    async def reads_of_many(self, count):
        """So many, those that may begin at once under way."""
        reads = [asyncio.create_task(self.read_of_many()) for _ in range(count)]
        await settled()
        return reads


@pytest.fixture(params=[False, True], ids=["for answers", "itself"])
async def few(request):
    return FewReaders(itself=request.param)


async def test_beside_many_long_reads_of_a_tenant_anothers_read_is_next_but_few_and_the_store_is_not_taken_to_be_broken(few):
    reads = await few.reads_of_many(64)
    assert await few.guarded.version("few", "u") == "v"
    assert few.began.index("few") <= few.readers + 1
    ended = await asyncio.gather(*reads, return_exceptions=True)
    assert ended.count("v") >= 8
    assert all(isinstance(one, DeadlineExceeded) and "ask for fewer histories at a time" in str(one) for one in ended if one != "v")
    assert [await few.guarded.version(tenant, "u") for tenant in ("few", "many")] == ["v", "v"]


@pytest.mark.parametrize("read_s", [0.02, 0.05])
@pytest.mark.parametrize("crowd", ["a key for many tenants", "ahead for another", "ahead for many others", "ahead for the caller itself"])
async def test_reads_of_one_key_for_many_tenants_and_those_for_answers_ahead_hold_up_no_other_caller_and_no_request(crowd, read_s):
    store, ahead = FewReaders(itself=False), Background()
    store.delay, store.guarded = read_s, GuardedHistories(store, 0.5, store.turns)

    async def of_the_key(number):
        LANE.set("key ours")
        return await store.guarded.version(f"tenant {number}", "u")

    if crowd == "a key for many tenants":
        reads = [asyncio.create_task(of_the_key(number)) for number in range(60)]
    else:
        lanes = {"ahead for many others": [f"key {number}" for number in range(32)], "ahead for the caller itself": ["few"] * 32}
        reads = [ahead.start(store.guarded.version("few", "u"), lane=lane) for lane in lanes.get(crowd, ["key ours"] * 32)]
    await settled()
    LANE.set("few")
    began = asyncio.get_running_loop().time()
    for _ in range(3):
        assert await store.guarded.version("few", "u") == "v"
    assert asyncio.get_running_loop().time() - began <= 3 * 2 * read_s + 0.001
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)


@pytest.mark.parametrize("lane", ["many", "another"])
async def test_what_is_read_ahead_has_turns_where_a_lane_always_has_requests(few, lane):
    few.guarded = GuardedHistories(few, 0.5, few.turns)

    async def always():
        while True:
            await few.read_of_many()

    callers, ahead = [asyncio.create_task(always()) for _ in range(60)], Background()
    await settled()
    callers += [ahead.start(few.guarded.version("many", "u"), lane="many") for _ in range(4)]
    assert await ahead.start(few.guarded.version("many", "u"), lane=lane) == "v"
    for caller in callers:
        caller.cancel()
    await asyncio.gather(*callers, return_exceptions=True)


@pytest.mark.parametrize("begun", ["after an event", "as a refresh"])
async def test_a_caller_that_joins_what_was_begun_ahead_waits_for_no_others_answers_ahead(begun):
    store, flights, ahead = FewReaders(itself=False), SingleFlight(), Background()

    async def answer(user):
        return await store.guarded.version("shop", user)

    async def computed(user):
        return await flights.wait(flights.start(user, lambda: answer(user)))

    reads = [ahead.start(computed(f"user {number}"), lane="ours") for number in range(32)]
    await settled()
    LANE.set("theirs")
    if begun == "as a refresh":
        flights.start("ada", lambda: answer("ada"), waiting=1)
    else:
        reads.append(ahead.start(computed("ada"), lane="theirs"))
    await settled()
    clock = asyncio.get_running_loop()
    asked = clock.time()
    assert await flights.wait(flights.get("ada")) == "v"
    assert clock.time() - asked <= 2 * store.delay + 0.001
    await asyncio.gather(*reads, return_exceptions=True)


async def test_a_store_that_hangs_is_left_alone_within_the_time_of_one_read_whatever_waits_to_be_read(few):
    few.delay, clock = 3600.0, asyncio.get_running_loop()
    reads, began = await few.reads_of_many(64), clock.time()
    asked = asyncio.gather(*(few.guarded.version("few", "u") for _ in range(3)), return_exceptions=True)
    await passed(0.03)
    reads += await few.reads_of_many(4)
    ended = await asked
    assert clock.time() - began == pytest.approx(0.05)
    assert all(isinstance(one, BackendUnavailable) and "did not answer within 0.05 s" in str(one) for one in ended)
    with pytest.raises(BackendUnavailable, match="it is asked again in"):
        await few.guarded.version("any", "u")
    assert len(few.began) == few.readers, "those that waited are refused"
    for read in reads:
        read.cancel()
    await asyncio.gather(*reads, return_exceptions=True)
    few.delay = 0.0
    await passed(1.0)
    assert await few.guarded.version("any", "u") == "v"


async def test_reads_that_are_given_up_as_they_wait_for_their_turn_are_never_begun(few):
    under_way, left = await few.reads_of_many(4), await few.reads_of_many(60)
    for read in left:
        read.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    assert [await asyncio.gather(*under_way), await few.guarded.version("few", "u")] == [["v"] * 4, "v"]
    assert few.began.count("many") <= 4 + 1, "one read without a caller tries whether the store hangs"


@pytest.mark.parametrize("tenants", [1, 20])
async def test_long_reads_that_callers_ask_for_themselves_leave_a_reader_to_answers_and_do_not_open_the_breaker(tenants):
    store = FewReaders(itself=True)
    names = [f"long {number}" for number in range(tenants)]
    store.longer = dict.fromkeys(names, 0.3)
    reads = [asyncio.create_task(store.read_itself(name)) for name in names for _ in range(40 // tenants)]
    await settled()
    assert [await store.guarded.version("any", "u") for _ in range(20)] == ["v"] * 20
    assert await asyncio.gather(*reads) == ["v"] * 40, "they are read all the same"


@pytest.mark.parametrize("asked", ["for an answer", "itself"])
async def test_a_read_keeps_its_turn_until_the_store_has_done_with_it_though_its_caller_leaves_at_once(asked):
    done, began = asyncio.Event(), []
    turns = ReadTurns(lambda: 2)

    async def held(name):
        began.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            await done.wait()

    async def read(name):
        await (turns.read_for_answer if asked == "for an answer" else turns.read)("t", lambda: held(name), 60.0)

    leaving, *following = (asyncio.create_task(read(number)) for number in range(3))
    await settled()
    before = list(began)
    leaving.cancel()
    await settled()
    left = leaving.cancelled(), list(began)
    done.set()
    await settled()
    assert left == (True, before)
    assert len(began) == len(before) + 1
    for one in following:
        one.cancel()


async def test_it_opens_once_for_all_who_come_together_and_closes_what_it_opened(tmp_path):
    opened = []

    async def open_slowly(url):
        opened.append(url)
        await asyncio.sleep(0.01)
        return await open_event_store(url)

    store = StoreOpenedLater(f"sqlite:///{tmp_path}/events.db", open_slowly)
    leaving = asyncio.create_task(store.version("t", "u"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(*(store.append([Event("u", Behaviour("1", second))]) for second in range(3)))
    assert len(opened) == 1
    assert len((await store.history("default", "u", 10)).behaviours) == 3
    await store.close()
    with pytest.raises(BackendUnavailable):
        await store.append([Event("u", Behaviour("1", 9))])


async def test_one_that_is_closed_before_it_was_opened_stays_closed_and_tells_those_that_wait_for_it():
    asked = []

    async def never_opens(url):
        asked.append(url)
        await asyncio.Event().wait()

    store = StoreOpenedLater("played://", never_opens)
    waiting = asyncio.create_task(store.append([]))
    await until(lambda: asked)
    await store.close()
    for call in (waiting, store.append([])):
        with pytest.raises(BackendUnavailable, match=r"the event store \(played\) is closed; open it again"):
            await call
    assert len(asked) == 1
