"""The entries of batches over the real routes: what runs at a time is counted behind them."""

import asyncio
from collections import Counter
from itertools import pairwise

import httpx
import pytest

from cluster import metrics as m
from cluster.config import AdmissionSettings, GatewaySettings
from cluster.errors import InvalidRequest
from cluster.values import Recommendation
from deployments.http.api import create_api
from deployments.http.batches import Batches
from tests.fakes.callers import Client
from tests.fakes.data import Data
from tests.fakes.service import Service
from tests.noted import Noted
from tests.waiting import settled

pytestmark = pytest.mark.virtual_time
ADMISSION = {"max_concurrent": 128, "max_concurrent_entries": 16, "max_held_entries": 4096}


class Counting(Service):
    """Each answer takes some turns; what runs at a time is counted, and the order of what began. `stuck`: users without an answer."""

    def __init__(self):
        super().__init__()
        self.running, self.most, self.stuck, self.broken = 0, 0, (), {}

    async def recommend(self, request):
        self.asked.append(request)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if request.user_id in self.broken:
                raise self.broken[request.user_id]
            if request.user_id in self.stuck:
                await self.gate.wait()
            await settled()
        finally:
            self.running -= 1
        return Recommendation(request.user_id, (), (), "tiny/1", degraded=False)


class Served:
    def __init__(self, **admission):
        self.service, self.noted = Counting(), Noted()
        self.api = create_api(self.service, Data(), GatewaySettings.model_validate({"admission": ADMISSION | admission}), meter=self.noted)
        self.edge = self.api.edge
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.api), base_url="http://genrec")

    async def batch(self, *user_ids, tenant="default"):
        requests = [{"user_id": user_id, "tenant": tenant} for user_id in user_ids]
        return await self.http.post("/v1/recommend:batch", json={"requests": requests})

    async def arrived(self, *user_ids, **more):
        task = asyncio.create_task(self.batch(*user_ids, **more))
        await settled()
        return task

    async def single(self, user_id="single"):
        return await self.http.post("/v1/recommend", json={"user_id": user_id})

    @property
    def users(self):
        return [request.user_id for request in self.service.asked]


def users_of(answer):
    return [one["user_id"] for one in answer.json()["answers"]]


async def test_sixteen_batches_of_256_run_no_more_entries_at_a_time_than_there_are_places_for_them_and_are_answered_whole():
    served = Served()
    users = [[f"{batch}-{entry}" for entry in range(256)] for batch in range(16)]
    answers = await asyncio.gather(*(served.batch(*of_one) for of_one in users))
    assert [users_of(answer) for answer in answers] == users
    assert served.service.most == 16
    assert (served.edge.statistics().entries, served.edge.batches.running) == (0, 0)


async def test_single_requests_do_not_wait_for_entries():
    served = Served(max_concurrent=1, max_queued=0)
    served.service.stuck = ("stuck",)
    batches = [await served.arrived(*["stuck"] * 8) for _ in range(4)]
    assert (await served.single()).status_code == 200
    served.service.gate.set()
    assert {(await batch).status_code for batch in batches} == {200}


async def test_other_requests_have_their_turn_between_entries_that_are_answered_without_a_wait():
    served, turns = Served(max_concurrent_entries=4), []

    async def at_once(request):
        served.service.asked.append(request)
        return Recommendation(request.user_id, (), (), "tiny/1", degraded=False)

    async def others():
        while len(served.users) < 100:
            turns.append(len(served.users))
            await asyncio.sleep(0)

    served.service.recommend = at_once
    answer, _ = await asyncio.gather(served.batch(*map(str, range(100))), others())
    assert users_of(answer) == [str(entry) for entry in range(100)]
    assert max(later - earlier for earlier, later in pairwise([*turns, 100])) <= 4


async def test_entries_never_run_more_than_single_requests_may():
    served = Served(max_concurrent=2)
    assert (await served.batch(*map(str, range(20)))).status_code == 200
    assert served.service.most == 2


async def test_a_small_batch_takes_turns_with_a_large_one():
    served = Served(max_concurrent_entries=4)
    large = await served.arrived(*["large"] * 100)
    small = await served.batch("small", "small")
    assert small.status_code == 200
    assert len(served.users) < 20
    assert len(users_of(await large)) == 100


class Held:
    """Batches with entries that end once `may_end` is set; `done`: their callers, in order."""

    def __init__(self, places, **admission):
        self.done, self.may_end = list[str](), asyncio.Event()
        self.batches = Batches(AdmissionSettings(max_concurrent=64, **admission), lambda: places)

    def batch(self, caller, entries, *, held=True):
        async def entry():
            if held:
                await self.may_end.wait()
            self.done.append(caller)

        return asyncio.create_task(self.batches.run([entry] * entries, Counter({"default": entries}), caller))

    async def end(self, *tasks):
        await settled()
        self.may_end.set()
        await asyncio.gather(*tasks)
        assert self.batches.held == self.batches.running == 0


async def test_callers_take_turns_however_many_batches_one_of_them_sends():
    held = Held(4, max_concurrent_entries=1, max_held_entries=100)
    tasks = [held.batch("shop", 10) for _ in range(5)]
    await settled()
    await held.end(*tasks, held.batch("any", 2))
    assert (len(held.done), held.done[:8].count("any")) == (52, 2)


async def test_the_batch_of_a_caller_that_holds_fewer_entries_is_taken_on_before_those_that_waited():
    held = Held(64, max_concurrent_entries=16, max_held_entries=10, max_wait_ms=60_000)
    tasks = [held.batch("shop", 8), *(held.batch("shop", 4, held=False) for _ in range(5))]
    await settled()
    await held.batch("any", 2, held=False)
    assert held.done == ["any"] * 2
    leaves = held.batch("shop", 4)
    await settled()
    leaves.cancel()
    await held.end(*tasks)
    assert held.done.count("shop") == 28


async def test_a_batch_that_is_left_takes_no_turns_of_its_callers_next_one():
    held = Held(1, max_concurrent_entries=8, max_held_entries=100)
    running, left = held.batch("running", 1), held.batch("shop", 8)
    await settled()
    left.cancel()
    await settled()
    await held.end(running, held.batch("any", 4), held.batch("shop", 4))
    assert held.done == ["running", *["any", "shop"] * 4]


async def test_a_batch_that_finds_no_room_in_time_is_refused_with_when_to_come_again():
    served = Served(max_held_entries=10, max_wait_ms=50)
    served.service.stuck = ("stuck",)
    held = await served.arrived(*["stuck"] * 8)
    refused = await served.batch("a", "b", "c")
    assert (refused.status_code, refused.headers["content-type"]) == (503, "application/problem+json")
    assert int(refused.headers["retry-after"]) >= 1
    fits = await served.batch("a", "b")
    served.service.gate.set()
    assert [fits.status_code, (await held).status_code] == [200, 200]
    assert served.edge.statistics().refused == {503: 1}
    assert served.noted.total(m.REFUSALS) == served.noted.total(m.REFUSALS, route="/v1/recommend:batch", status="503") == 1


async def test_a_batch_that_waits_for_room_holds_no_place_and_runs_once_there_is_room():
    served = Served(max_concurrent=1, max_held_entries=10)
    served.service.stuck = ("stuck",)
    held = await served.arrived(*["stuck"] * 8)
    waiting = [await served.arrived("a", "b", "c"), await served.arrived("overtakes none")]
    assert (await served.single()).status_code == 200
    assert served.users == ["stuck", "single"]
    served.service.gate.set()
    assert [(await batch).status_code for batch in (held, *waiting)] == [200, 200, 200]
    assert served.users[-4:] == ["a", "b", "c", "overtakes none"]


async def test_a_batch_of_more_entries_than_may_be_held_is_answered_where_no_other_is():
    served = Served(max_held_entries=1)
    assert len(users_of(await served.batch(*map(str, range(256))))) == 256


async def test_a_client_that_leaves_midway_gives_its_places_back_and_its_other_entries_never_run():
    served = Served(max_concurrent_entries=2)
    served.service.stuck = ("stuck",)
    client = Client(served, "/v1/recommend:batch", {"requests": [{"user_id": "stuck"}] * 100})
    await settled()
    waiting = await served.arrived("next")
    client.gone.set()
    await client.task
    assert client.sent == []
    assert (await waiting).status_code == 200
    assert served.users == ["stuck", "stuck", "next"]
    assert (served.service.running, served.edge.batches.running, served.edge.batches.held) == (0, 0, 0)


@pytest.mark.parametrize(("error", "status"), [(InvalidRequest("k", "is odd"), 422), (RuntimeError("a bug"), 500)])
async def test_an_entry_that_fails_ends_its_own_batch_and_no_other(error, status):
    served = Served(max_concurrent_entries=4)
    served.service.broken, served.service.stuck = {"bad": error}, ("stuck",)
    other = await served.arrived("stuck", "fine", "fine")
    served.http = httpx.AsyncClient(transport=httpx.ASGITransport(served.api, raise_app_exceptions=False), base_url="http://genrec")
    failed = await served.batch("fine", "bad", *["never"] * 50)
    assert failed.status_code == status
    served.service.gate.set()
    assert users_of(await other) == ["stuck", "fine", "fine"]
    assert served.users.count("never") < 10
    assert (served.service.running, served.edge.batches.running, served.edge.batches.held) == (0, 0, 0)


async def test_a_tenant_leaves_room_for_the_entries_of_others():
    served = Served(max_concurrent_share=0.5, max_held_entries=10)
    served.service.stuck = ("stuck",)
    first = await served.arrived(*["stuck"] * 4, tenant="ours")
    assert (await served.batch("a", "b", tenant="ours")).status_code == 503
    assert (await served.batch("a", "b", tenant="theirs")).status_code == 200
    served.service.gate.set()
    assert (await first).status_code == 200
    assert (await served.batch(*"abcdefg", tenant="ours")).status_code == 200


async def test_places_that_grow_fewer_are_fewer_for_entries_too_and_come_back():
    places, running, most = 4, 0, Counter()
    batches = Batches(AdmissionSettings(), lambda: places)

    async def entry():
        nonlocal running
        running += 1
        most[places] = max(most[places], running)
        await settled()
        running -= 1

    for now in (4, 1, 3):
        places = now
        await batches.run([entry] * 12, Counter(shop=12))
    assert most == {4: 4, 1: 1, 3: 3}
