"""The protection of the HTTP interface, over the real routes in this process; what stands behind them is played."""

import asyncio
import gc
import json
import logging
import re
import socket
import sys
import threading
import time
import tracemalloc
from base64 import b64decode
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import httpx
import pytest
import uvicorn
from starlette.exceptions import HTTPException

from cluster import metrics as m
from cluster.config import GatewaySettings
from cluster.values import Item, Recommendation, ScoredItem
from deployments.http.api import create_api
from deployments.http.api_pages import FILES
from deployments.http.edge import BATCH_PATH, Edge, identify
from deployments.http.event_messages import HistoryOut, PastEventOut
from deployments.http.exchange import HttpRequest, exchange
from deployments.http.open_paths import OPEN
from deployments.http.pieces import PIECE
from deployments.http.places import MOST_ERASING
from tests.fakes.callers import HASHED, KEYS, Client, authorization, bearer
from tests.fakes.data import Data
from tests.fakes.service import Service
from tests.noted import Noted
from tests.waiting import passed, settled, until

ONE_PLACE = {"max_concurrent": 1, "max_queued": 2, "max_wait_ms": 60_000}


class Served:
    def __init__(self, gateways=1, proxied=False, **settings):
        self.service, self.data, self.noted = Service(), Data(), Noted()
        limits = GatewaySettings.model_validate(settings)
        self.api = create_api(self.service, self.data, limits, lambda: gateways, self.noted, proxied=proxied)
        self.edge = self.api.edge
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.api), base_url="http://genrec")

    def ask(self, user_id="u", headers=None, **more):
        return asyncio.create_task(self.http.post("/v1/recommend", json={"user_id": user_id, **more}, headers=headers))

    def store(self, headers=None):
        return asyncio.create_task(self.http.post("/v1/events", json=EVENT, headers=headers))

    async def asking(self, *user_ids, **more):
        """Requests that have arrived, one after the other."""
        return [await self.arrived(self.ask(user_id, **more)) for user_id in user_ids]

    async def arrived(self, task):
        await settled()
        return task

    @property
    def users(self):
        return [request.user_id for request in self.service.asked]


# Places


async def test_beyond_the_places_and_the_queue_a_request_is_refused_at_once_with_when_to_come_again():
    served = Served(admission=ONE_PLACE)
    accepted = await served.asking("a", "b", "c")
    refused = await served.ask("d")
    assert (refused.status_code, refused.headers["content-type"]) == (503, "application/problem+json")
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["instance"] == "/v1/recommend"
    served.service.gate.set()
    assert [(await answer).status_code for answer in accepted] == [200, 200, 200]
    assert served.users == ["a", "b", "c"]
    assert served.edge.statistics().refused == {503: 1}


async def test_a_refusal_reads_no_body():
    served = Served(admission={**ONE_PLACE, "max_queued": 0})
    await served.asking("a")
    client = Client(served)
    await client.task
    assert (client.status, client.read) == (503, 0)


@pytest.mark.virtual_time
async def test_never_more_than_the_places_work_at_a_time():
    served = Served(admission={"max_concurrent": 3, "max_queued": 50, "max_wait_ms": 60_000})
    accepted = await served.asking(*map(str, range(20)))
    assert len(served.service.asked) == 3
    served.service.gate.set()
    assert {(await answer).status_code for answer in accepted} == {200}


async def test_interactive_comes_before_batch_and_both_before_neither_by_the_priority_header():
    served = Served(admission={**ONE_PLACE, "max_queued": 9})
    waiting = await served.asking("running")
    waiting.append(
        await served.arrived(asyncio.create_task(served.http.post("/v1/recommend:batch", json={"requests": [{"user_id": "batch"}]})))
    )
    waiting += await served.asking("idle", headers={"priority": "i, u=7"})
    waiting += await served.asking("no priority at all", headers={"priority": "u=9, u=12"})
    waiting += await served.asking("urgent", headers={"priority": "u=1;x, i"})
    served.service.gate.set()
    await asyncio.gather(*waiting)
    assert served.users[:3] == ["running", "urgent", "no priority at all"]
    assert sorted(served.users[3:]) == ["batch", "idle"]  # the batch gave its place back before its entry ran


async def test_a_key_asks_for_no_more_urgency_than_it_may():
    keys = [KEYS[0], {**KEYS[1], "most_urgent": 0}]
    served = Served(admission={**ONE_PLACE, "max_queued": 4}, api_keys=keys)
    first = await served.arrived(served.ask("first", headers=bearer("shop")))
    pushing = await served.arrived(served.ask("pushing", headers=bearer("shop") | {"priority": "u=0"}))
    usual = await served.arrived(served.ask("usual", headers=bearer("any")))
    urgent = await served.arrived(served.ask("urgent", headers=bearer("any") | {"priority": "u=0"}))
    served.service.gate.set()
    answers = await asyncio.gather(first, pushing, usual, urgent)
    assert served.users == ["first", "urgent", "pushing", "usual"]
    assert [answer.headers.get("genrec-urgent") for answer in answers] == [None, None, "1", "1"], "the key is known to haproxy.sh"


async def test_the_proxy_is_told_which_keys_are_known_and_which_operate():
    served = Served(api_keys=KEYS, allow_anonymous=True)
    marks = {}
    for headers in (bearer("shop"), bearer("any"), bearer("boss"), bearer("unknown"), {}):
        answer = await served.http.get("/v1/items/1", headers=headers)
        marks[headers.get("authorization")] = [name in answer.headers for name in ("genrec-operates", "genrec-known")]
    assert list(marks.values()) == [[False, True], [False, True], [True, True], [False, False], [False, False]]


async def test_an_urgent_request_takes_the_place_of_a_waiting_one_that_is_less_so():
    served = Served(admission={**ONE_PLACE, "max_queued": 1})
    [running, displaced] = await served.asking("running", "displaced")
    [urgent] = await served.asking("urgent", headers={"priority": "u=0"})
    assert (await displaced).status_code == 503
    served.service.gate.set()
    assert [(await answer).status_code for answer in (running, urgent)] == [200, 200]


async def test_who_has_waited_too_long_is_refused():
    served = Served(admission={**ONE_PLACE, "max_wait_ms": 20})
    [running, late] = await served.asking("running", "late")
    assert (await late).status_code == 503
    served.service.gate.set()
    assert (await running).status_code == 200
    assert served.users == ["running"]


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/docs", "/openapi.json"])
async def test_health_and_documentation_need_neither_a_place_nor_a_key(path):
    served = Served(admission={**ONE_PLACE, "max_queued": 0}, api_keys=KEYS)
    await served.asking("a", headers=bearer("any"))
    assert (await served.http.get(path)).status_code == 200
    assert (await served.http.get("/v1/items/1", headers=bearer("any"))).status_code == 503
    assert (await served.http.get("/no/such/path")).status_code == 401


async def test_operators_need_no_place_and_other_callers_of_their_paths_do():
    served = Served(admission={**ONE_PLACE, "max_queued": 0}, api_keys=KEYS)
    running = await served.arrived(served.ask("running", headers=bearer("any")))
    statuses = [(await served.http.get("/v1/gateway", headers=bearer(key))).status_code for key in ("boss", "shop")]
    assert statuses == [200, 503]
    served.service.gate.set()
    assert (await running).status_code == 200


@pytest.mark.parametrize("calm", ["calm", None], ids=["of a tenant", "a key without tenant"])
@pytest.mark.parametrize("flood", ["flood", None, "default"], ids=["of a tenant", "a key without tenant", "without a key"])
async def test_a_flood_takes_no_other_tenants_turn_and_none_of_a_key_without_tenant(flood, calm):
    """With the settings that are there by themselves, but for the wait: 700 requests may take seconds to come."""
    keys = [{**KEYS[0], "tenant": flood}, {**KEYS[1], "tenant": calm}]
    served = Served(api_keys=keys, allow_anonymous=True, admission={"max_wait_ms": 60_000})
    headers = {} if flood == "default" else bearer("shop")
    flood = [served.ask(f"flood {number}", headers=headers) for number in range(700)]
    await until(lambda: sum(task.done() for task in flood) + len(served.users) + served.edge.statistics().waiting == 700)
    calm = await served.arrived(served.ask("calm", headers=bearer("any")))
    assert not calm.done()
    started = len(served.users)
    served.service.gate.set()
    assert (await calm).status_code == 200
    assert served.users.index("calm") <= started + 1, "it is next but one"
    assert {(await answer).status_code for answer in flood} == {200, 503}


async def test_a_tenant_leaves_places_for_the_others():
    served = Served(admission={"max_concurrent": 2, "max_queued": 4, "max_wait_ms": 60_000, "max_concurrent_share": 0.5})
    [ours] = await served.asking("ours", tenant="ours")
    refused = await served.ask("ours too", tenant="ours")
    [theirs] = await served.asking("theirs", tenant="theirs")
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    served.service.gate.set()
    assert [(await answer).status_code for answer in (ours, theirs)] == [200, 200]


def takes(answer: httpx.Response) -> int:
    """How many requests the proxy is told that the gateway takes."""
    requests, body_bytes, *_ = answer.headers["genrec-most"].split(", ")
    assert body_bytes == str(2**20)
    return int(requests)


async def test_each_answer_tells_the_proxy_how_many_requests_the_gateway_takes():
    served = Served(admission={"max_concurrent": 4, "max_queued": 2, "max_wait_ms": 60_000, "max_concurrent_share": 0.5}, api_keys=KEYS)
    ours = await served.asking("1", "2", "waits", headers=bearer("shop"))
    assert served.edge.free_places() == 2, "one waits for its tenant's share alone"
    refused = await served.ask("beyond", headers=bearer("shop"))
    assert (refused.status_code, takes(refused)) == (503, 6), "what one tenant may not, the others may"
    assert refused.json()["detail"] == "tenant 'shop' has its share of the places and 1 requests wait; ask again later"
    served.service.gate.set()
    answered = [await answer for answer in ours]
    assert [(one.status_code, takes(one)) for one in answered] == [(200, 6)] * 3


async def test_what_a_request_leaves_behind_may_begin_where_a_place_is_free_or_no_other_request_runs():
    served = Served(admission={"max_concurrent": 1})
    asked = await served.asking("alone")
    assert (served.edge.free_places(), served.edge.spare_places()) == (0, 1)
    served.edge.reconfigure(GatewaySettings(admission={"max_concurrent": 2}))
    asked += await served.asking("another")
    assert served.edge.spare_places() == 0
    served.service.gate.set()
    assert [(await answer).status_code for answer in asked] == [200, 200]


async def test_each_answer_tells_the_proxy_each_callers_part():
    served = Served(admission={"max_concurrent": 6, "max_queued": 20, "max_wait_ms": 60_000}, api_keys=KEYS)
    flood = await served.asking(*(f"flood{number}" for number in range(9)), headers=bearer("shop"))
    calm = [*await served.asking("calm", headers=bearer("any")), *await served.asking("calm", headers=bearer("boss"))]
    served.service.gate.set()
    answers = [await answer for answer in (*flood, *calm)] + [await served.ask(headers=bearer("any"))]
    parts = [answer.headers["genrec-most"].split(", ")[2] for answer in answers]
    assert (parts[0], parts[-1]) == ("2", "3"), "of three callers, and of one beside another that comes"


async def test_batches_that_hold_no_place_take_nothing_from_what_the_proxy_is_told_that_the_gateway_takes(monkeypatch):
    monkeypatch.setattr("deployments.http.pieces.PIECE", 100)
    served = Served(admission={"max_concurrent": 4, "max_queued": 0, "max_concurrent_entries": 2})
    clients = [SlowReader(served, path="/v1/recommend:batch", body={"requests": [{"user_id": "u"}] * 3}) for _ in range(5)]
    await settled()
    assert takes(await served.http.get("/v1/items/none")) == 9, "they wait for their entries"
    served.service.gate.set()
    await settled()
    assert [client.status for client in clients] == [200] * 5
    assert takes(await served.ask()) == 9, "they wait for their readers"
    for client in clients:
        client.gone.set()
        await client.task
    assert takes(await served.ask()) == 4


@pytest.mark.virtual_time
async def test_events_that_wait_for_the_store_leave_all_places_to_recommendations():
    served = Served()
    served.service.gate.set()
    served.data.stores.clear()
    waiting = [served.store() for _ in range(20)]
    await until(lambda: len(served.data.tenants) == 20, "more are being stored than there are places", within_s=60)
    assert (await served.ask()).status_code == 200
    assert served.edge.statistics().running == 0
    assert takes(await served.http.get("/v1/items/none")) == 16 + 512 + 20, "they take nothing from what the proxy is told"
    served.data.stores.set()
    assert [(await one).status_code for one in waiting] == [201] * 20
    assert takes(await served.http.get("/v1/items/none")) == 16 + 512


@pytest.mark.virtual_time
async def test_a_burst_of_events_is_stored_and_none_is_refused_before_the_store_is_slow(monkeypatch):
    monkeypatch.setattr("deployments.http.places.MOST_STORING", 8)
    served = Served()
    served.data.stores.clear()
    waiting = [served.store() for _ in range(20)]
    await until(lambda: len(served.data.tenants) == 20, within_s=60)
    await passed(1.1)
    assert (await served.store()).status_code == 503
    served.data.stores.set()
    assert [(await one).status_code for one in waiting] == [201] * 20
    assert (await served.store()).status_code == 201


async def test_beyond_what_may_wait_for_the_store_a_callers_events_are_refused_and_another_callers_are_not(monkeypatch):
    monkeypatch.setattr("deployments.http.places.MOST_STORING", 8)
    monkeypatch.setattr("deployments.http.places.SLOW_S", -1.0)
    served = Served(api_keys=KEYS)
    served.data.stores.clear()
    waiting = [served.store(bearer("shop")) for _ in range(4)]
    await until(lambda: len(served.data.tenants) == 4)
    refused = await served.store(bearer("shop"))
    assert (refused.status_code, refused.headers["retry-after"], len(served.data.tenants)) == (503, "2", 4)
    assert "nothing of this one is stored" in refused.json()["detail"]
    assert (served.edge.statistics().refused, served.edge.statistics().failed) == ({503: 1}, {}), "a refusal is no failure"
    waiting.append(served.store(bearer("any")))
    await until(lambda: len(served.data.tenants) == 5)
    served.data.stores.set()
    assert [(await one).status_code for one in waiting] == [201] * 5
    assert (await served.store(bearer("shop"))).status_code == 201, "there is room again"


async def test_events_whose_client_leaves_make_room_for_others_at_a_store_that_hangs(monkeypatch):
    monkeypatch.setattr("deployments.http.places.MOST_STORING", 2)
    monkeypatch.setattr("deployments.http.places.SLOW_S", -1.0)
    served = Served()
    served.data.stores.clear()
    leaves = Client(served, "/v1/events", EVENT)
    await until(lambda: len(served.data.tenants) == 1)
    assert (await served.store()).status_code == 503
    leaves.gone.set()
    await leaves.task
    served.data.stores.set()
    assert (await served.store()).status_code == 201


async def test_beyond_what_is_not_followed_yet_a_callers_erasures_are_refused_before_anything_begins_and_another_callers_are_not(tmp_path):
    served = Served(api_keys=KEYS, audit_log=str(tmp_path / "audit.jsonl"))

    async def erased(key):
        return await served.http.delete("/v1/users/u/history", headers=bearer(key))

    assert [(await erased("shop")).status_code for _ in range(MOST_ERASING + 1)] == [200] * (MOST_ERASING + 1), "each was followed"
    served.data.silent, served.data.tenants = True, []
    lines = (tmp_path / "audit.jsonl").read_text().count("\n")
    assert [(await erased("shop")).status_code for _ in range(MOST_ERASING)] == [200] * MOST_ERASING
    refused = await erased("shop")
    assert (refused.status_code, refused.headers["retry-after"], len(served.data.tenants)) == (503, "1", MOST_ERASING)
    assert "nothing of this one is begun" in refused.json()["detail"]
    assert (tmp_path / "audit.jsonl").read_text().count("\n") == lines + 2 * MOST_ERASING
    assert (served.edge.statistics().refused, served.edge.statistics().failed) == ({503: 1}, {})
    assert [(await erased(key)).status_code for key in ("any", "boss")] == [200] * 2
    served.data.turns.pop(0).close()
    assert [(await erased("shop")).status_code for _ in range(2)] == [200, 503], "there is room for one again"


async def test_bodies_on_their_way_take_nothing_from_what_the_proxy_is_told_either():
    served = Served(admission={"max_concurrent": 4, "max_queued": 0})
    clients = [Client(served, body={"user_id": "u" * 100}, chunk=50, parts=1) for _ in range(3)]
    await settled()
    assert takes(await served.http.get("/v1/items/none")) == 7
    for client in clients:
        client.gone.set()
        await client.task
    assert takes(await served.http.get("/v1/items/none")) == 4


@pytest.mark.parametrize(
    ("headers", "status", "unread"),
    [
        ([(b"content-length", b"1000000")], 401, True),
        ([(b"transfer-encoding", b"chunked")], 401, True),
        ([(b"content-length", b"2000000")], 413, True),
        ([(b"content-length", b"100")], 401, False),
        ([], 401, False),
    ],
    ids=str,
)
async def test_a_refusal_before_the_body_is_there_tells_the_proxy_the_answer_that_it_is_to_give(headers, status, unread):
    """HAProxy has small bodies before it hands a request on; with others it would keep the exchange until their clients have sent them."""
    served = Served(api_keys=KEYS)
    client = Client(served, parts=0, headers=headers)
    await client.task
    told = dict(client.sent[0]["headers"]).get(b"genrec-unread")
    assert (client.status, told is not None) == (status, unread)
    assert told is None or b64decode(told) == client.sent[1]["body"]


async def test_pages_go_as_their_readers_take_them_so_many_at_a_time_and_the_proxy_is_told():
    served = Served(admission={"max_concurrent": 4, "max_queued": 0})
    page = "/docs/swagger-ui.css"
    readers = [SlowReader(served, path=page, method="GET", body="") for _ in range(64)]
    await settled()
    assert {reader.status for reader in readers} == {200}
    assert {len(reader.sent[1]["body"]) for reader in readers} == {PIECE}
    beyond = await served.http.get(page)
    assert (beyond.status_code, beyond.headers["retry-after"]) == (503, "1")
    assert [(await served.http.get(path)).status_code for path in ("/healthz", "/readyz", "/v1/items/none")] == [200, 200, 404]
    assert takes(await served.http.get("/v1/items/none")) == 68
    for reader in readers:
        reader.gone.set()
        await reader.task
    assert (await served.http.get(page)).status_code == 200


@pytest.mark.virtual_time
async def test_of_pages_no_more_are_given_in_a_second_than_leave_time_for_answers():
    served = Served()

    async def statuses(path, count):
        return [(await served.http.get(path)).status_code for _ in range(count)]

    assert "genrec-pages" not in (await served.http.get("/docs/start.js")).headers
    assert await statuses("/docs/start.js", 384) == [200] * 383 + [503]
    told = ["genrec-pages" in (await served.http.get(path)).headers for path in ("/docs/start.js", "/readyz", "/v1/items/none")]
    assert told == [True, False, False]
    assert [await statuses(path, 1) for path in ("/healthz", "/v1/items/none")] == [[200], [404]]
    assert takes(await served.http.get("/v1/items/none")) == 16 + 512, "a connection takes so short a page at once"
    began = time.monotonic()
    await until(lambda: time.monotonic() >= began + 1)
    assert await statuses("/docs/start.js", 65) == [200] * 64 + [503]
    await until(lambda: time.monotonic() >= began + 17)
    largest = len(FILES["/docs/swagger-ui-bundle.js"].body)
    assert await statuses("/docs/swagger-ui-bundle.js", 25) == [200] * 16 + [503] * 9
    assert -(-largest // 2**16) * 16 == 384
    assert takes(await served.http.get("/v1/items/none")) == 16 + 512 + 16, "HAProxy may still hold them"
    await until(lambda: time.monotonic() >= began + 33)
    assert takes(await served.http.get("/v1/items/none")) == 16 + 512
    known = {"if-none-match": FILES["/docs/swagger-ui-bundle.js"].etag}
    assert {(await served.http.get("/docs/swagger-ui-bundle.js", headers=known)).status_code for _ in range(384)} == {304}


@pytest.mark.virtual_time
async def test_a_reader_of_a_page_that_never_takes_it_is_left_in_the_end():
    served = Served(request_within_s=30)
    reader = SlowReader(served, path="/docs/swagger-ui-bundle.js", method="GET", body="")
    await reader.task
    assert (reader.status, len(reader.sent)) == (200, 2)


# Deadlines


async def test_the_time_in_the_queue_counts_against_the_deadline():
    served = Served(admission=ONE_PLACE)
    [running] = await served.asking("running")
    before = time.monotonic()
    [waiting] = await served.asking("waiting", deadline_ms=5000)
    after = time.monotonic()
    await asyncio.sleep(0.02)
    served.service.gate.set()
    await asyncio.gather(running, waiting)
    assert before <= served.service.asked[-1].deadline - 5 <= after


# Clients that leave


async def test_what_runs_for_a_client_that_leaves_is_cancelled_and_its_place_is_free():
    served = Served(admission=ONE_PLACE)
    client = Client(served)
    await settled()
    [waiting] = await served.asking("next")
    client.gone.set()
    await client.task
    assert (served.service.cancelled, served.service.late, client.sent) == (["u"], [], [])
    served.service.gate.set()
    assert (await waiting).status_code == 200


async def test_a_stream_whose_client_leaves_is_ended():
    served = Served(admission=ONE_PLACE)
    client = Client(served, headers=[(b"accept", b"text/event-stream")])
    await settled()
    assert client.status == 200
    client.gone.set()
    await client.task
    assert served.service.closed == ["u"]
    assert served.edge.statistics().running == 0
    assert served.noted.total(m.HTTP_REQUESTS, status="200") == 1, "a client that leaves is no failure"


class SlowReader(Client):
    """Takes the head of the answer and the first message, and nothing more."""

    async def send(self, message):
        await super().send(message)
        if len(self.sent) > 1:
            await asyncio.get_running_loop().create_future()


async def test_a_stream_whose_reader_is_slow_holds_no_place_once_it_is_computed():
    served = Served(admission=ONE_PLACE)
    client = SlowReader(served, headers=[(b"accept", b"text/event-stream")])
    await settled()
    assert (client.status, served.edge.statistics().running) == (200, 1)
    [honest] = await served.asking("honest")
    served.service.gate.set()
    assert (await honest).status_code == 200
    assert (served.service.closed, client.task.done()) == (["u"], False)
    client.gone.set()
    await client.task


async def test_streams_hold_their_places_while_slow_readers_leave_too_many_bytes_unread_and_bodies_have_room():
    served = Served(admission={"max_concurrent": 4}, max_held_bytes=1500)
    served.service.gate.set()
    clients = [SlowReader(served, headers=[(b"accept", b"text/event-stream")]) for _ in range(4)]
    await settled()
    assert {client.status for client in clients} == {200}
    assert 0 < served.edge.statistics().running < 4
    for client in clients:
        client.gone.set()
        await client.task
    assert served.edge.statistics().running == 0
    again = SlowReader(served, headers=[(b"accept", b"text/event-stream")])
    await settled()
    assert served.edge.statistics().running == 0, "there is room for its answer again"
    again.gone.set()
    await again.task


async def test_a_large_answer_holds_no_place_while_its_reader_is_slow_but_the_memory_that_answers_may_have():
    served = Served(admission=ONE_PLACE, max_held_bytes=5 * PIECE)
    served.service.recommend = lambda request: answer_of(request.user_id, ScoredItem(Item("1", "x" * (3 * PIECE // 2), {}), 1.0))
    first = SlowReader(served)
    await settled()
    assert (first.status, len(first.sent[1]["body"]), served.edge.statistics().running) == (200, PIECE, 0)
    second = SlowReader(served)
    await settled()
    assert (second.status, served.edge.statistics().running) == (200, 1), "both are more than the half that answers may have"
    for client in (first, second):
        client.gone.set()
        await client.task
    response = await served.ask()
    assert (response.status_code, response.json()["items"][0]["title"]) == (200, "x" * (3 * PIECE // 2))
    assert served.edge.statistics().running == 0


async def test_a_long_history_is_sent_as_its_reader_takes_it():
    served = Served(admission=ONE_PLACE)
    events = [PastEventOut(item_id=str(n), title="x" * 200, timestamp=n, action="view", value=None) for n in range(1000)]

    async def history(tenant, user_id, limit, until):
        return HistoryOut(user_id=user_id, tenant=tenant, version="1", total=len(events), events=events).model_dump_json().encode()

    served.data.history = history
    client = SlowReader(served, path="/v1/users/u/history", method="GET")
    await settled()
    assert (client.status, len(client.sent[1]["body"]), served.edge.statistics().running) == (200, PIECE, 0)
    client.gone.set()
    await client.task
    response = await served.http.get("/v1/users/u/history")
    assert (response.status_code, len(response.json()["events"])) == (200, 1000)


class QuickReader(Client):
    """Takes each part of an answer at once, and keeps its size alone."""

    async def send(self, message):
        self.sent.append(len(message.get("body", b"")))


async def test_a_large_answer_is_sent_without_a_second_copy_of_it():
    served, page = Served(), "/docs/swagger-ui-bundle.js"
    size = len(FILES[page].body)
    tracemalloc.start()
    try:
        reader = QuickReader(served, path=page, method="GET", body="")
        await reader.task
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (reader.sent[1], max(reader.sent), sum(reader.sent)) == (PIECE, PIECE, size)
    assert most < size / 2, "more than some pieces"


def answering(*parts):
    """An application that answers in these parts, and ends with None."""

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in parts:
            await send({"type": "http.response.body", "body": part or b"", "more_body": part is not None})

    return answer


async def test_a_large_answer_by_another_door_leaves_the_loop_to_others_between_its_pieces():
    turns = 0

    async def others():
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    answered = await exchange(answering(*[b"x"] * 20, None), HttpRequest("GET", "/"))
    beside.cancel()
    assert (answered.body, turns) == (b"x" * 20, 20)


async def test_an_answer_that_ends_before_it_is_whole_is_none_by_another_door():
    with pytest.raises(RuntimeError, match="GET /v1/items: the application returned without a whole answer"):
        await exchange(answering(b"x", b"y"), HttpRequest("GET", "/v1/items"))


BATCH_OF_TEN = {"requests": [{"user_id": "u"}] * 10}


async def test_a_batch_whose_answers_take_up_too_much_memory_is_refused_until_slow_readers_have_taken_those_of_others(monkeypatch):
    monkeypatch.setattr("deployments.http.pieces.PIECE", 100)
    served = Served(max_held_bytes=4000)
    served.service.gate.set()
    reads_nothing = SlowReader(served, path="/v1/recommend:batch", body=BATCH_OF_TEN)
    await settled()
    refused = await served.http.post("/v1/recommend:batch", json=BATCH_OF_TEN)
    assert (reads_nothing.status, refused.status_code, refused.headers["retry-after"]) == (200, 503, "1")
    assert "answers of batches and others that wait take up the 4000 bytes" in refused.json()["detail"]
    assert (await served.ask()).status_code == 200, "half of the memory is left for bodies"
    reads_nothing.gone.set()
    await reads_nothing.task
    assert (await served.http.post("/v1/recommend:batch", json=BATCH_OF_TEN)).status_code == 200
    assert served.edge.statistics().refused == {503: 1}


async def test_the_answer_of_a_batch_counts_as_held_until_its_reader_has_taken_it():
    """A server takes all of one message at once, so it is sent in pieces."""
    served = Served(max_held_bytes=60_000_000)
    title = "x" * 2**21  # ten are more than the system's buffers of a connection take
    served.service.recommend = lambda request: answer_of(request.user_id, ScoredItem(Item("1", title, {}), 1.0))
    async with running(served.api) as address:
        reader, writer = await asyncio.open_connection(*address, limit=2**10)
        body = json.dumps(BATCH_OF_TEN).encode()
        writer.write(b"POST /v1/recommend:batch HTTP/1.1\r\nhost: genrec\r\ncontent-type: application/json\r\nconnection: close\r\n")
        writer.write(b"content-length: %d\r\n\r\n%b" % (len(body), body))
        assert await reader.readline() == b"HTTP/1.1 200 OK\r\n"
        assert (await served.http.post("/v1/recommend:batch", json=BATCH_OF_TEN)).status_code == 503
        assert len(await reader.read()) > 10 * len(title)
        assert (await served.http.post("/v1/recommend:batch", json=BATCH_OF_TEN)).status_code == 200
        writer.close()


async def answer_of(user_id, *items):
    return Recommendation(user_id, items, (), "tiny/1", degraded=False)


async def test_a_refusal_says_nothing_of_how_long_answers_take():
    """However long it took the gateway to read what it then refused, as many places are left."""
    served = Served(admission={"max_concurrent": 8, "target_ms": 1e-6})
    for _ in range(20):
        assert (await served.ask(k="many")).status_code == 422
    assert served.edge.statistics().places == 8
    served.service.gate.set()
    assert (await served.ask()).status_code == 200
    assert served.edge.statistics().places == 4


@pytest.mark.virtual_time
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_answers_that_take_too_long_lower_the_places_streams_too(accept):
    served = Served(admission={"max_concurrent": 64, "target_ms": 50})
    answers = await served.asking(*map(str, range(16)), headers={"accept": accept})
    await passed(0.3)
    served.service.gate.set()
    assert {(await answer).status_code for answer in answers} == {200}
    assert served.edge.statistics().places == 8


@pytest.mark.virtual_time
async def test_a_stream_that_its_client_leaves_counts_as_no_quick_answer():
    served = Served(admission={"max_concurrent": 64, "target_ms": 50})
    clients = [Client(served, headers=[(b"accept", b"text/event-stream")]) for _ in range(16)]
    await settled()
    assert (served.edge.statistics().running, served.edge.statistics().places) == (16, 16)
    for client in clients:
        client.gone.set()
        await client.task
    assert (served.edge.statistics().running, served.edge.statistics().places) == (0, 16)


async def test_a_server_that_tells_more_than_the_body_ends_no_stream():
    served = Served()
    client = Client(served, headers=[(b"accept", b"text/event-stream")])
    client.parts.append(b"")  # a message after the whole body
    client.most += 1
    await settled()
    served.service.gate.set()
    await client.task
    assert (client.status, client.sent[-1]["more_body"]) == (200, False)
    assert b"answer" in b"".join(message["body"] for message in client.sent[1:])


async def test_a_waiting_client_that_leaves_makes_room_in_the_queue():
    served = Served(admission={**ONE_PLACE, "max_queued": 1})
    [running] = await served.asking("running")
    client = Client(served, body={"user_id": "left"})
    await settled()
    assert served.edge.statistics().waiting == 1
    client.gone.set()
    await client.task
    assert (served.edge.statistics().waiting, client.sent) == (0, [])
    [waiting] = await served.asking("next")
    served.service.gate.set()
    assert [(await answer).status_code for answer in (running, waiting)] == [200, 200]
    assert served.users == ["running", "next"]


@pytest.mark.parametrize("waits", [False, True])
async def test_a_request_that_is_cancelled_from_outside_ends_as_cancelled_and_frees_its_place(waits):
    served = Served(admission=ONE_PLACE)
    others = await served.asking("running") if waits else []
    client = Client(served)
    await settled()
    client.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await client.task
    served.service.gate.set()
    await asyncio.gather(*others, await served.arrived(served.ask("next")))
    statistics = served.edge.statistics()
    assert (statistics.running, statistics.waiting) == (0, 0)


async def test_a_client_that_leaves_after_its_answer_disturbs_nothing():
    served = Served()
    served.service.gate.set()
    client = Client(served)
    await settled()
    client.gone.set()
    await client.task
    assert (client.status, client.task.cancelling(), served.service.cancelled) == (200, 0, [])


@pytest.mark.parametrize("headers", [b"", b"accept: text/event-stream\r\n"], ids=["answer", "stream"])
async def test_over_a_real_connection_a_client_that_hangs_up_ends_the_work(headers):
    served = Served(admission=ONE_PLACE)
    async with running(served.api) as address:
        _, writer = await asyncio.open_connection(*address)
        writer.write(b"POST /v1/recommend HTTP/1.1\r\nhost: genrec\r\ncontent-type: application/json\r\n" + headers)
        writer.write(b'content-length: 15\r\n\r\n{"user_id":"u"}')
        await until(lambda: served.users == ["u"])
        writer.close()
        await until(lambda: served.service.cancelled + served.service.closed == ["u"])
        await until(lambda: served.edge.statistics().running == 0)


async def test_over_a_real_connection_requests_that_are_sent_together_are_answered_one_after_the_other():
    served = Served()
    async with running(served.api) as address:
        reader, writer = await asyncio.open_connection(*address)
        for number in range(50):
            body = b'{"user_id":"%d"}' % number
            head = b"POST /v1/recommend HTTP/1.1\r\nhost: genrec\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            writer.write(head % len(body) + body)
        await until(lambda: served.users)
        await settled()
        assert (served.users, served.edge.statistics().running) == (["0"], 1)
        served.service.gate.set()
        for number in range(50):
            answer = await reader.readuntil(b'"user_id":"%d"' % number)
            assert answer.count(b"HTTP/1.1 200") == 1
        writer.close()
        assert served.users == [str(number) for number in range(50)]


@asynccontextmanager
async def running(api):
    """The address at which it is served."""
    server = uvicorn.Server(uvicorn.Config(api, port=0, lifespan="off", log_config=None))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        serving = asyncio.create_task(server.serve([listening]))
        try:
            yield listening.getsockname()
        finally:
            server.should_exit = server.force_exit = True
            await serving


# Bodies


async def test_a_large_body_in_many_parts_arrives_whole_though_it_waits_for_a_place():
    served = Served(admission=ONE_PLACE)
    [running] = await served.asking("running")
    blocked = [f"item {i}" for i in range(10_000)]
    client = Client(served, body={"user_id": "large", "blocked": blocked}, chunk=2**12)
    await settled()
    assert served.edge.statistics().waiting == 1
    served.service.gate.set()
    await asyncio.gather(running, client.task)
    assert client.status == 200
    assert served.service.asked[-1].blocked == set(blocked)


async def test_clients_that_send_no_body_take_no_place():
    """As many connections as there are places send headers and nothing more: an honest request is answered all the same."""
    served = Served(admission=ONE_PLACE)
    served.service.gate.set()
    slow = [Client(served, body={"user_id": "slow"}, chunk=4, parts=1) for _ in range(20)]
    await settled()
    assert served.edge.statistics().running == 0
    assert (await served.ask("honest")).status_code == 200
    for client in slow:
        client.gone.set()
        await client.task
        assert client.sent == []


@pytest.mark.virtual_time
async def test_a_body_that_does_not_arrive_in_time_is_answered_408():
    served = Served(body_within_s=10)
    client = Client(served, body={"user_id": "slow"}, chunk=4, parts=1)
    began = asyncio.get_running_loop().time()
    await client.task
    assert asyncio.get_running_loop().time() - began == pytest.approx(10)
    assert (client.status, client.task.cancelling()) == (408, 0)
    assert served.edge.statistics().refused == {408: 1}


@pytest.mark.virtual_time
async def test_an_answer_that_takes_too_long_is_504_and_its_work_ends():
    served = Served(request_within_s=20)
    client = Client(served)
    await client.task
    assert (client.status, served.service.cancelled, client.task.cancelling()) == (504, ["u"], 0)
    assert served.edge.statistics().running == 0


@pytest.mark.virtual_time
@pytest.mark.parametrize("path", ["/v1/recommend", BATCH_PATH])
async def test_a_request_that_was_worked_on_for_too_long_has_failed_and_is_no_refusal(path):
    """By what GenrecAnswersFail looks at: 5xx of a route that are no refusals."""
    served = Served(request_within_s=20)
    client = Client(served, path, {"requests": [{"user_id": "u"}] * 2} if path == BATCH_PATH else None)
    await client.task
    assert client.status == 504
    assert served.service.late == served.service.cancelled != []
    assert served.noted.total(m.HTTP_REQUESTS, route=path, status="504") == served.noted.total(m.HTTP_REQUESTS) == 1
    assert (served.noted.total(m.REFUSALS), served.edge.statistics().refused) == (0, {})


@pytest.mark.virtual_time
async def test_a_stream_that_takes_too_long_ends():
    served = Served(request_within_s=20)
    client = Client(served, headers=[(b"accept", b"text/event-stream")])
    await client.task
    assert (client.status, served.service.closed) == (200, ["u"])
    assert served.noted.total(m.HTTP_REQUESTS, status="504") == served.noted.total(m.HTTP_REQUESTS) == 1


@pytest.mark.virtual_time
async def test_a_reader_that_takes_too_long_is_left_and_the_stream_counts_as_answered():
    served = Served(request_within_s=20)
    served.service.gate.set()
    reader = SlowReader(served, headers=[(b"accept", b"text/event-stream")])
    await reader.task
    assert (reader.status, served.service.closed) == (200, ["u"])
    assert served.noted.total(m.HTTP_REQUESTS, status="200") == served.noted.total(m.HTTP_REQUESTS) == 1


async def test_beyond_the_bytes_that_a_gateway_holds_the_next_body_is_refused_and_room_comes_back():
    served = Served(max_body_bytes=4096, max_held_bytes=5000)
    first = Client(served, body={"user_id": "first", "blocked": ["x" * 200] * 15})
    await settled()
    second = Client(served, body={"user_id": "second", "blocked": ["x" * 200] * 15})
    await second.task
    assert second.status == 503
    served.service.gate.set()
    await first.task
    third = Client(served, body={"user_id": "third", "blocked": ["x" * 200] * 15})
    await third.task
    assert (first.status, third.status) == (200, 200)


async def test_the_large_bodies_of_one_caller_leave_room_for_its_small_ones_and_for_other_callers():
    served = Served(api_keys=KEYS[:2], max_held_bytes=4 * 2**20)
    served.service.gate.set()
    large = {"user_id": "u", "blocked": ["x" * 200] * 4500}  # more than 900 KB, of which the last part stays away

    def asked(key, parts=-1):
        client = Client(served, body=large, headers=authorization(key))
        client.most = client.whole + parts
        return client

    clients = [asked("shop") for _ in range(4)]
    await settled()
    assert [client.status for client in clients if client.sent] == [503, 503], "half of the room is one caller's"
    assert b"other large bodies of this caller" in clients[-1].sent[1]["body"]
    assert (await served.ask(headers=bearer("shop"))).status_code == 200
    other = asked("any", parts=0)
    await other.task
    assert other.status != 503
    for client in clients:
        client.gone.set()
        await client.task
    again = asked("shop", parts=0)
    await again.task
    assert again.status == other.status, "there is room again"


@pytest.mark.parametrize("path", ["/v1/recommend", "/healthz"])
async def test_bodies_that_never_end_take_no_room_of_other_callers_batches(path):
    """Those of one key, or of callers without one at a path that needs none."""
    served = Served(api_keys=KEYS[:2], max_held_bytes=4 * 2**20)
    served.service.gate.set()
    clients = [Client(served, path, {"user_id": "u", "blocked": ["x" * 200] * 4500}, authorization("shop")) for _ in range(4)]
    for client in clients:
        client.most = client.whole - 1
    await settled()
    assert (await served.http.post("/v1/recommend:batch", json=BATCH_OF_TEN, headers=bearer("any"))).status_code == 200
    for client in clients:
        client.gone.set()
        await client.task


async def test_a_path_without_a_key_reads_no_body():
    """Such bodies, sent without their last byte, held the connections that HAProxy has to a gateway."""
    for announced in ((b"content-length", b"100"), (b"content-length", b"1000000"), (b"transfer-encoding", b"chunked")):
        client = Client(Served(api_keys=KEYS[:2]), "/healthz", headers=[announced])
        await client.task
        assert (client.status, client.read) == (413, 0)


async def test_bodies_on_their_way_leave_connections_to_other_callers(monkeypatch):
    monkeypatch.setattr("deployments.http.edge.MOST_ARRIVING", 2)
    served = Served(api_keys=KEYS[:2])
    served.service.gate.set()
    large = [*authorization("shop"), (b"content-length", b"100000")]
    clients = [Client(served, "/v1/recommend", {"user_id": "u" * 10}, large) for _ in range(3)]
    for client in clients:
        client.most = client.whole - 1
    await settled()
    assert [[one["status"] for one in client.sent[:1]] for client in clients] == [[], [], [503]]
    for caller in ("any", "shop"):
        assert (await served.http.post("/v1/recommend", json={"user_id": "u"}, headers=bearer(caller))).status_code == 200
    for client in clients:
        client.gone.set()
        await client.task
    again = Client(served, "/v1/recommend", {"user_id": "u" * 10}, large)
    await again.task
    assert again.status == 200


async def test_a_body_that_is_too_large_is_refused_by_its_length_before_it_is_read():
    served = Served(max_body_bytes=1024)
    for length in (b"1025", b"9" * 50):
        client = Client(served, headers=[(b"content-length", length)])
        await client.task
        assert (client.status, client.read) == (413, 0)
        assert json.loads(client.sent[1]["body"])["errors"][0]["field"] == "body"


async def test_a_body_that_does_not_tell_its_length_is_refused_once_it_is_too_large():
    served = Served(max_body_bytes=1024)
    client = Client(served, body={"user_id": "u" * 10_000}, chunk=512)
    await client.task
    assert client.status == 413


MALFORMED = {"user_id": "u", "behaviours": [{"item_id": 1, "timestamp": "x"}] * 10_000}


@pytest.mark.virtual_time
@pytest.mark.parametrize(
    ("path", "body", "counted"),
    [
        ("/v1/recommend", MALFORMED, 1),
        ("/v1/recommend", {"user_id": "u", "behaviours": [{"item_id": 1, "timestamp": 1}] * 10_001}, 1),
        ("/v1/recommend:batch", {"requests": [MALFORMED]}, 1),
        ("/v1/recommend:batch", {"requests": [{"user_id": "u", "behaviours": [{"item_id": "1", "timestamp": 1}] * 20_001}]}, 1 / 8),
        ("/v1/events", {"events": [{**entry, "user_id": "u"} for entry in MALFORMED["behaviours"]]}, 1),
    ],
    ids=["malformed", "converted", "batch", "batch without a conversion", "events"],
)
async def test_large_bodies_that_are_slow_to_read_are_read_one_after_the_other_and_wait_without_a_place(path, body, counted):
    served = Served(admission=ONE_PLACE, slow_bytes_per_s=int(len(json.dumps(body)) * counted))
    served.service.gate.set()
    clients = [Client(served, path, body) for _ in range(5)]
    answered = []
    for second in range(5):
        await until(lambda least=second + 1: sum(client.task.done() for client in clients) >= least)
        answered.append(asyncio.get_running_loop().time())
        assert (await served.ask("honest")).status_code == 200, "it needs no turn, and there is a place"
        assert [client.task.done() for client in clients] == [True] * (second + 1) + [False] * (4 - second)
    assert [later - answered[0] for later in answered] == pytest.approx(range(5), abs=0.1)
    assert {client.status for client in clients} == {422}
    assert all(json.loads(client.sent[1]["body"])["errors"][0]["problem"] for client in clients)


async def test_while_a_large_body_is_read_no_garbage_is_collected_and_afterwards_it_is():
    threads = []

    def note(phase, _):
        if phase == "start":
            threads.append(threading.current_thread().name)

    gc.callbacks.append(note)
    try:
        client = Client(Served(), body=MALFORMED)
        await client.task
    finally:
        gc.callbacks.remove(note)
    assert sum(name.startswith("reads a body") for name in threads) <= 1, "one may have been due before"
    assert (client.status, gc.isenabled()) == (422, True)


async def test_where_large_bodies_are_read_threads_hand_the_interpreter_over_after_half_a_millisecond():
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    try:
        await Client(Served(), body=MALFORMED).task
        assert sys.getswitchinterval() == pytest.approx(0.0005)
    finally:
        sys.setswitchinterval(before)


@pytest.mark.virtual_time
async def test_a_large_body_whose_turn_would_come_too_late_is_refused_and_told_to_come_again():
    served = Served(admission={"max_wait_ms": 2500}, slow_bytes_per_s=len(json.dumps(MALFORMED)))
    clients = [Client(served, body=MALFORMED) for _ in range(5)]
    await asyncio.gather(clients[0].task, clients[-1].task)
    assert [client.task.done() for client in clients] == [True, False, False, True, True], "two wait"
    assert dict(clients[-1].sent[0]["headers"])[b"retry-after"] == b"3"
    assert "in smaller parts" in json.loads(clients[-1].sent[1]["body"])["detail"]
    await asyncio.gather(*[client.task for client in clients])
    assert [client.status for client in clients] == [422, 422, 422, 503, 503]


@pytest.mark.virtual_time
async def test_the_turn_of_a_client_that_leaves_before_it_is_read_is_another_s():
    served = Served(admission={"max_wait_ms": 2500}, slow_bytes_per_s=len(json.dumps(MALFORMED)))
    first, second, third = (Client(served, body=MALFORMED) for _ in range(3))
    await first.task
    second.gone.set()
    await second.task
    fourth = Client(served, body=MALFORMED)
    await asyncio.gather(third.task, fourth.task)
    assert [client.status for client in (first, third, fourth)] == [422, 422, 422]


@pytest.mark.virtual_time
@pytest.mark.parametrize("flood", ["flood", None, "default"], ids=["of a tenant", "a key without tenant", "without a key"])
async def test_large_bodies_of_one_caller_take_no_other_callers_turn_to_be_read(flood):
    keys = [{**KEYS[0], "tenant": flood}, {**KEYS[1], "tenant": "calm"}]
    size = len(json.dumps(MALFORMED))
    served = Served(api_keys=keys, allow_anonymous=True, slow_bytes_per_s=4 * size)
    headers = [] if flood == "default" else authorization("shop")
    clients, began = {"flood": [], "calm": []}, time.monotonic()
    for tenth in range(200):  # one asks for half as much again as is read, the other for a sixth of that
        clients["flood"] += [Client(served, body=MALFORMED, headers=headers) for _ in range(tenth % 5 < 3)]
        if tenth % 3 == 0:
            part = {**MALFORMED, "behaviours": MALFORMED["behaviours"][:2000]}
            clients["calm"] += [Client(served, body=part, headers=authorization("any"))]
        await until(lambda due=began + (tenth + 1) / 10: time.monotonic() >= due)
    await asyncio.gather(*[client.task for of_one in clients.values() for client in of_one])
    assert {client.status for client in clients["calm"]} == {422}
    assert {client.status for client in clients["flood"]} == {422, 503}


@pytest.mark.virtual_time
async def test_two_callers_with_too_many_large_bodies_have_half_of_the_readings_each():
    served = Served(api_keys=KEYS[:2], slow_bytes_per_s=8 * len(json.dumps(MALFORMED)))
    clients, began = {key: [] for key in ("shop", "any")}, time.monotonic()
    for tenth in range(100):
        for key, of_one in clients.items():
            of_one += [Client(served, body=MALFORMED, headers=authorization(key)) for _ in range(1 if key == "any" else 4)]
        await until(lambda due=began + (tenth + 1) / 10: time.monotonic() >= due)
    await asyncio.gather(*[client.task for of_one in clients.values() for client in of_one])
    read = {key: sum(client.status == 422 for client in of_one) for key, of_one in clients.items()}
    assert read["any"] + read["shop"] == pytest.approx(88, abs=2), "those of ten seconds, and those that waited"
    assert read["any"] == pytest.approx(44, abs=4)


@pytest.mark.virtual_time
async def test_large_bodies_that_are_fast_to_read_and_small_ones_take_no_turns():
    served = Served(slow_bytes_per_s=2**16)
    served.service.gate.set()
    large = {"user_id": "u", "behaviours": [{"item_id": "1", "timestamp": 1}] * 10_000}
    small = {"user_id": "u", "behaviours": [{"item_id": 1, "timestamp": 1}] * 1000}
    began = asyncio.get_running_loop().time()
    clients = [Client(served, body=body) for body in [large, small] * 5]
    await asyncio.gather(*[client.task for client in clients])
    assert {client.status for client in clients} == {200}
    assert asyncio.get_running_loop().time() == pytest.approx(began)


@pytest.mark.virtual_time
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/nothing"), ("DELETE", "/v1/users/u/history")])
async def test_a_large_body_that_is_not_read_at_all_takes_no_turn(method, path):
    served = Served(admission={"max_wait_ms": 2500}, slow_bytes_per_s=len(json.dumps(MALFORMED)))
    useless = [Client(served, path, MALFORMED, method=method) for _ in range(9)]
    await asyncio.gather(*[client.task for client in useless])
    events = Client(served, "/v1/events", {"events": [{"user_id": "u", "item_id": "1" * 250}] * 300})
    await events.task
    assert ({client.status for client in useless} <= {200, 404}, events.status) == (True, 201)


@pytest.mark.virtual_time
async def test_waiting_to_be_read_counts_against_the_deadline_and_ends_when_the_client_leaves():
    body = {"user_id": "u", "deadline_ms": 5000, "behaviours": [{"item_id": 1, "timestamp": 1}] * 10_000}
    served = Served(slow_bytes_per_s=len(json.dumps(body)), admission={"max_wait_ms": 2500})
    served.service.gate.set()
    began = time.monotonic()
    first, second, third = (Client(served, body=body) for _ in range(3))
    await first.task
    second.gone.set()
    await asyncio.gather(second.task, third.task)
    assert ([client.status for client in (first, third)], second.sent) == ([200, 200], [])
    assert [request.deadline for request in served.service.asked] == pytest.approx([began + 5] * 2)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/recommend", {"user_id": "u", "behaviours": [{"item_id": 1, "timestamp": 1}] * 9000}, 200),
        ("/v1/recommend", MALFORMED, 422),
        ("/v1/recommend:batch", {"requests": [{"user_id": "u", "blocked": [1] * 500}] * 50}, 200),
        ("/v1/events", {"events": [{"user_id": "u", "item_id": "1" * 250}] * 300}, 201),
    ],
    ids=["converted", "malformed", "batch", "events"],
)
async def test_other_requests_are_answered_while_a_large_body_becomes_a_message(path, body, status, monkeypatch):
    begun, others_are_answered = threading.Event(), threading.Event()

    def waits(value):
        if threading.current_thread() is not threading.main_thread():
            begun.set()
            assert others_are_answered.wait(120)
        return value

    served = Served()
    served.service.gate.set()
    monkeypatch.setattr("deployments.http.messages.few_fields", waits)
    large = Client(served, path, body)
    await until(lambda: begun.is_set() or large.task.done())
    assert [(await served.ask("honest")).status_code, large.task.done()] == [200, False]
    others_are_answered.set()
    await large.task
    assert large.status == status


# Rates


@pytest.mark.virtual_time
async def test_beyond_its_rate_a_tenant_is_answered_429_and_others_are_not():
    served = Served(rate_limits={"tenants": {"shop": {"per_s": 0.1, "burst": 2}}})
    served.service.gate.set()
    first, second, third = [await served.ask(tenant="shop") for _ in range(3)]
    assert [answer.status_code for answer in (first, second, third)] == [200, 200, 429]
    assert [answer.headers["ratelimit-remaining"] for answer in (first, second, third)] == ["1", "0", "0"]
    assert third.headers["retry-after"] == "10"
    assert third.json()["title"] == "Too many requests"
    assert "ratelimit-limit" not in (await served.ask(tenant="other")).headers


@pytest.mark.virtual_time
async def test_a_batch_that_comes_again_when_it_was_told_is_let_in():
    """Its first token is taken before its body is read, each time."""
    served = Served(api_keys=KEYS[:1], rate_limits={"default": {"per_s": 0.1, "burst": 5}})
    served.service.gate.set()

    async def batch():
        return await served.http.post("/v1/recommend:batch", json={"requests": [{"user_id": "u"}] * 3}, headers=bearer("shop"))

    first, refused = await batch(), await batch()
    assert (first.status_code, refused.status_code) == (200, 429)
    await asyncio.sleep(int(refused.headers["retry-after"]) + 1e-6)
    assert (await batch()).status_code == 200


async def test_a_batch_costs_as_many_tokens_as_it_has_requests():
    served = Served(rate_limits={"default": {"per_s": 0.001, "burst": 5}})
    served.service.gate.set()

    async def batch(size):
        return await served.http.post("/v1/recommend:batch", json={"requests": [{"user_id": "u", "tenant": "shop"}] * size})

    assert [(await batch(size)).status_code for size in (3, 3, 2, 1)] == [200, 429, 200, 429]
    never = await batch(6)
    assert (never.status_code, never.json()["errors"][0]["field"]) == (422, "requests")


async def test_a_key_bound_to_a_tenant_is_charged_once_a_request_and_before_its_body_is_read():
    served = Served(rate_limits={"default": {"per_s": 0.001, "burst": 3}}, api_keys=KEYS)
    served.service.gate.set()
    batch = {"requests": [{"user_id": "u"}] * 2}
    assert (await served.http.post("/v1/recommend:batch", json=batch, headers=bearer("shop"))).status_code == 200
    assert (await served.ask(headers=bearer("shop"))).status_code == 200
    client = Client(served, headers=[(b"authorization", b"Bearer genrec_shop")])
    await client.task
    assert (client.status, client.read) == (429, 0)


async def test_events_and_histories_count_as_well():
    served = Served(rate_limits={"default": {"per_s": 0.001, "burst": 1}})
    event = {"user_id": "u", "item_id": "1"}
    assert [(await served.http.post("/v1/events", json=event)).status_code for _ in range(2)] == [201, 429]
    histories = [await served.http.get("/v1/users/u/history?tenant=shop") for _ in range(2)]
    assert [answer.status_code for answer in histories] == [200, 429]


async def test_refusals_that_need_the_message_are_counted_as_those_before_it_are():
    served = Served(rate_limits={"tenants": {"shop": {"per_s": 0.001, "burst": 1}}}, api_keys=KEYS)
    served.service.gate.set()
    for key in ("any", "any", "shop", "shop", "nobody"):
        await served.ask(tenant="shop", headers=bearer(key))
    assert served.edge.statistics().refused == {429: 3, 401: 1}


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/recommend", {"user_id": "u", "tenant": "other"}),
        ("POST", "/v1/recommend", {"user_id": "u", "tenant": "other", "k": "3"}),
        ("POST", "/v1/events", {"user_id": "u", "item_id": "1", "tenant": "other"}),
        ("DELETE", "/v1/users/u/history?tenant=other", None),
        ("GET", "/v1/backends", None),
    ],
    ids=["tenant, answered directly", "tenant, answered by FastAPI", "tenant of an event", "tenant in the query", "right"],
)
async def test_what_a_key_may_not_do_is_counted_among_the_refusals(method, path, body):
    served = Served(api_keys=KEYS)
    assert (await served.http.request(method, path, json=body, headers=bearer("shop"))).status_code == 403
    assert served.edge.statistics().refused == {403: 1}
    assert served.noted.total(m.REFUSALS, status="403") == 1


async def test_an_operators_call_from_another_sites_page_is_counted_among_the_refusals():
    served = Served()
    answer = await served.http.post("/v1/cache:invalidate", json={}, headers={"origin": "http://elsewhere.example"})
    assert (answer.status_code, served.edge.statistics().refused) == (403, {403: 1})


async def test_refusals_are_counted_by_route_and_never_by_path():
    served = Served(api_keys=KEYS, admission={"max_concurrent": 1, "max_queued": 0})
    held = await served.arrived(served.ask(headers=bearer("any")))
    for path in ("recommend", "recommend:batch", "rank", "nowhere/secret"):
        await served.http.post(f"/v1/{path}", json={}, headers=bearer("any"))
    await served.http.get("/v1/users/secret/history")
    served.service.gate.set()
    assert (await held).status_code == 200
    routes = ("/v1/recommend", "/v1/recommend:batch", "/v1/rank", "other")
    assert [served.noted.total(m.REFUSALS, route=route, status="503") for route in routes] == [1, 1, 1, 1]
    assert [served.noted.total(m.HTTP_REQUESTS, route=route, status="503") for route in routes] == [1, 1, 1, 1]
    assert served.noted.total(m.REFUSALS, route="other", status="401") == 1
    assert served.edge.statistics().refused == {503: 4, 401: 1}
    assert not any("secret" in str(labels) for _, labels in served.noted.sums)


async def test_an_answer_tells_the_proxy_how_long_a_request_may_take():
    served = Served(request_within_s=30)
    told = [(await served.http.get("/readyz")).headers["genrec-most"].split(", ")[3]]
    served.edge.reconfigure(GatewaySettings(request_within_s=7.5))
    told.append((await served.http.get("/v1/backends")).headers["genrec-most"].split(", ")[3])
    assert told == ["40000", "17500"], "10 s more than it takes a gateway that works to end it"


@pytest.mark.parametrize("path", ["/v1/recommend", "/v1/gateway", "/readyz", "/docs", "/v1/nowhere"])
async def test_what_the_proxy_refused_in_the_gateways_place_is_counted_with_its_own_refusals(path):
    served = Served(proxied=True)
    for said in ("2", "40"):
        await served.http.get(path, headers={"genrec-refused": said})
    assert served.noted.total(m.REFUSALS, route="proxy", status="503") == served.noted.total(m.REFUSALS) == 42
    assert served.edge.statistics().refused == {503: 42}
    assert served.noted.total(m.HTTP_REQUESTS) == 2, "no gateway answered the others"


@pytest.mark.parametrize(("proxied", "said"), [(False, "1000"), (True, "-5"), (True, "1e9"), (True, "\u0665".encode()), (True, "")])
async def test_a_number_of_refusals_that_no_proxy_of_ours_can_have_told_is_not_counted(proxied, said):
    served = Served(proxied=proxied)
    for path in ("/v1/recommend", "/readyz"):
        assert (await served.http.get(path, headers={"genrec-refused": said})).status_code in {200, 405}
    assert served.noted.total(m.REFUSALS) == 0
    assert served.edge.statistics().refused == {}


@pytest.mark.parametrize("key", ["any", "shop"], ids=["charged by its message", "charged for one request before its message is read"])
async def test_a_batch_beyond_one_gateways_share_is_taken_and_paid_off_afterwards(key):
    served = Served(gateways=4, rate_limits={"default": {"per_s": 0.1, "burst": 200}}, api_keys=KEYS)
    served.service.gate.set()
    batch = {"requests": [{"user_id": "u"}] * 60}
    answers = [await served.http.post("/v1/recommend:batch", json=batch, headers=bearer(key)) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]


@pytest.mark.virtual_time
async def test_gateways_share_a_limit():
    served = Served(gateways=4, rate_limits={"default": {"per_s": 4, "burst": 8}})
    served.service.gate.set()
    assert [(await served.ask()).status_code for _ in range(3)] == [200, 200, 429]


# Keys


async def test_without_keys_in_the_configuration_everybody_may_do_everything():
    served = Served()
    assert (await served.http.get("/v1/backends")).status_code == 200
    assert (await served.http.post("/v1/cache:invalidate", json={})).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"authorization": "Basic Z2VucmVj"}, bearer("unknown"), {"authorization": "Bearer"}], ids=str)
async def test_without_a_known_key_nobody_gets_in(headers, caplog):
    served = Served(api_keys=KEYS)
    with caplog.at_level(logging.DEBUG):
        answer = await served.http.get("/v1/backends", headers=headers)
    assert (answer.status_code, answer.headers["content-type"]) == (401, "application/problem+json")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert "genrec_unknown" not in caplog.text + answer.text


async def test_a_bound_key_fills_in_its_tenant():
    served = Served(api_keys=KEYS)
    served.service.gate.set()
    batch = {"requests": [{"user_id": "u"}, {"user_id": "u", "tenant": "shop"}]}
    await served.ask(headers=bearer("shop"))
    await served.http.post("/v1/recommend:batch", json=batch, headers=bearer("shop"))
    await served.http.post("/v1/events", json={"events": [{"user_id": "u", "item_id": "1"}]}, headers=bearer("shop"))
    await served.http.get("/v1/users/u/history", headers=bearer("shop"))
    await served.http.delete("/v1/users/u/history", headers=bearer("shop"))
    assert {request.tenant for request in served.service.asked} | set(served.data.tenants) == {"shop"}
    assert len(served.service.asked) + len(served.data.tenants) == 6


async def test_a_bound_key_acts_for_no_other_tenant():
    served = Served(api_keys=KEYS)
    event = {"user_id": "u", "item_id": "1"}
    asked = [
        ("POST", "/v1/recommend", {"user_id": "u", "tenant": "other"}),
        ("POST", "/v1/recommend:batch", {"requests": [{"user_id": "u"}, {"user_id": "u", "tenant": "default"}]}),
        ("POST", "/v1/events", {**event, "tenant": "other"}),
        ("POST", "/v1/events", {"events": [event, {**event, "tenant": "other"}]}),
        ("GET", "/v1/users/u/history?tenant=other", None),
        ("DELETE", "/v1/users/u/history?tenant=other", None),
    ]
    answers = [await served.http.request(method, path, json=body, headers=bearer("shop")) for method, path, body in asked]
    assert {answer.status_code for answer in answers} == {403}
    assert (served.service.asked, served.data.tenants) == ([], [])


EVENT = {"user_id": "u", "item_id": "1"}
CALLS = {
    "read": [
        ("POST", "/v1/recommend", {"user_id": "u"}),
        ("POST", "/v1/recommend", {"user_id": "u", "k": "5"}),  # by FastAPI, which converts it
        ("POST", "/v1/recommend:batch", {"requests": [{"user_id": "u"}]}),
        ("POST", "/v1/rank", {"user_id": "u", "candidates": ["1"]}),
        ("GET", "/v1/users/u/history", None),
        ("GET", "/v1/items", None),
        ("GET", "/v1/items/1", None),
        ("GET", "/v1/examples", None),
        ("GET", "/v1/options", None),
    ],
    "events": [("POST", "/v1/events", EVENT), ("POST", "/v1/events", {"events": [EVENT]})],
    "erase": [("DELETE", "/v1/users/u/history", None)],
    "operate": [
        ("GET", "/v1/gateway", None),
        ("GET", "/v1/backends", None),
        ("POST", "/v1/backends/encoder/torch:disable", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/cache", None),
        ("POST", "/v1/cache:invalidate", {}),
    ],
}
"""Every protected route, by the right that it takes."""
ROUTES = [(right, *call) for right, calls in CALLS.items() for call in calls]


@pytest.mark.parametrize("has", CALLS)
@pytest.mark.parametrize(("needs", "method", "path", "body"), ROUTES, ids=[f"{method} {path}" for _, method, path, _ in ROUTES])
async def test_a_key_does_what_it_has_the_right_to_and_is_told_which_one_is_missing(has, needs, method, path, body):
    served = Served(api_keys=[{"name": "own", "sha256": HASHED["any"], "rights": [has]}])
    served.service.gate.set()
    answer = await served.http.request(method, path, json=body, headers=bearer("any"))
    assert answer.status_code in ({200, 201, 404} if has == needs else {403})
    if has != needs:
        problem = answer.json()
        assert (answer.headers["content-type"], problem["title"]) == ("application/problem+json", "Forbidden")
        assert f"'own' has not the right '{needs}' (it has {has})" in problem["detail"]
        assert (served.service.asked, served.data.tenants) == ([], [])


@pytest.mark.parametrize("keys", [KEYS, []], ids=["beside keys", "without any"])
@pytest.mark.parametrize(("needs", "method", "path", "body"), ROUTES, ids=[f"{method} {path}" for _, method, path, _ in ROUTES])
async def test_a_caller_without_a_key_that_is_let_in_reads_and_stores_events_and_no_more(keys, needs, method, path, body):
    served = Served(api_keys=keys, allow_anonymous=True)
    served.service.gate.set()
    answer = await served.http.request(method, path, json=body)
    if needs in ("read", "events"):
        assert answer.status_code in {200, 201, 404}
        assert {request.tenant for request in served.service.asked} | set(served.data.tenants) <= {"default"}
    else:
        assert (answer.status_code, served.data.tenants) == (403, [])
        assert answer.json()["detail"] == f"a caller without a key has not the right '{needs}' (it has read, events); use a key that has it"
        assert answer.headers["www-authenticate"].startswith("Bearer"), "the page says where a key is to be had"


async def test_beside_callers_without_a_key_each_key_is_what_it_was_and_a_wrong_one_is_refused():
    served = Served(api_keys=KEYS, allow_anonymous=True)
    served.service.gate.set()
    erase, switched = ("DELETE", "/v1/users/u/history"), ("GET", "/v1/backends")
    for name, statuses in {"shop": [200, 403], "any": [200, 403], "boss": [200, 200]}.items():
        answers = [await served.http.request(*call, headers=bearer(name)) for call in (erase, switched)]
        assert [answer.status_code for answer in answers] == statuses
        assert "www-authenticate" not in answers[1].headers, "the page offers no key to a caller that has one"
    for headers in ({"authorization": "Basic Z2VucmVj"}, bearer("unknown"), {"authorization": "Bearer"}):
        answer = await served.ask(headers=headers)
        assert (answer.status_code, answer.headers["www-authenticate"][:6]) == (401, "Bearer")
        assert ("leave the header out" in answer.json()["detail"]) == ("Basic" in headers["authorization"])
    assert (await served.ask(headers={"authorization": ""})).status_code == 200


async def test_a_caller_without_a_key_acts_for_no_other_tenant_and_is_no_more_urgent_than_a_key():
    served = Served(api_keys=KEYS, allow_anonymous=True, admission={**ONE_PLACE, "max_queued": 1})
    for answer in (await served.ask(tenant="shop"), await served.http.get("/v1/users/u/history?tenant=shop")):
        assert (answer.status_code, "without a key may not act for tenant 'shop'" in answer.json()["detail"]) == (403, True)
    [running, waiting] = await served.asking("a", "b")
    assert (await served.ask(headers={"priority": "u=0"})).status_code == 503, "it takes no other's place"
    served.service.gate.set()
    assert [(await answer).status_code for answer in (running, waiting)] == [200, 200]


def test_the_table_of_rights_has_every_protected_route():
    there = [(method.upper(), re.sub(r"\{\w+\}", "[^/]+", path)) for path, methods in documented_paths().items() for method in methods]
    assert len(there) > 15
    assert [one for one in there if not any(one[0] == method and re.fullmatch(one[1], path) for _, method, path, _ in ROUTES)] == []


def documented_paths():
    return {path: methods for path, methods in Served().api.fastapi.openapi()["paths"].items() if path not in OPEN}


async def test_a_key_without_named_rights_reads_writes_and_erases_for_its_tenant_and_operates_nothing():
    served = Served(api_keys=KEYS)
    served.service.gate.set()
    for _, method, path, body in [route for route in ROUTES if route[0] == "operate"]:
        for key in ("shop", "any"):
            assert (await served.http.request(method, path, json=body, headers=bearer(key))).status_code == 403, (method, path, key)
    assert (await served.http.get("/v1/backends", headers=bearer("boss"))).status_code == 200
    for key, tenant in (("shop", ""), ("boss", "?tenant=other")):
        assert (await served.http.delete(f"/v1/users/u/history{tenant}", headers=bearer(key))).status_code == 200
        assert (await served.http.post("/v1/events", json=EVENT, headers=bearer(key))).status_code == 201
        assert (await served.ask(headers=bearer(key))).status_code == 200


async def test_an_expired_key_is_told_so_and_its_successor_of_the_same_name_serves_before_and_after():
    for expires, status in (("2999-01-31", 200), ("2020-01-31", 401)):
        served = Served(api_keys=[{**KEYS[0], "expires": expires}, {**KEYS[0], "sha256": HASHED["any"]}])
        served.service.gate.set()
        told = await served.ask(headers=bearer("shop"))
        assert (told.status_code, (await served.ask(headers=bearer("any"))).status_code) == (status, 200)
    assert told.json()["detail"] == "this API key has expired (2020-01-31 23:59 UTC); use its successor"
    assert 'error="invalid_token"' in told.headers["www-authenticate"]
    assert {request.tenant for request in served.service.asked} == {"shop"}


def test_a_gateway_warns_of_a_key_that_expires_tomorrow_as_it_starts_and_takes_new_settings(caplog):
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat()
    settings = GatewaySettings.model_validate({"api_keys": [{**KEYS[0], "expires": tomorrow}, *KEYS[1:]]})
    edge = Edge(settings)
    assert [text.split(" at ")[0] for text in caplog.messages] == [f"the API key {KEYS[0]['name']!r} expires"]
    edge.reconfigure(settings)
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(
    "spelled", [b"Bearer \tgenrec_shop", b"Bearer genrec_shop\t", b"Bearer\tgenrec_shop", b"Bearer \x0bgenrec_shop"], ids=str
)
def test_a_key_has_one_spelling_by_which_the_proxy_counts_its_requests(spelled):
    """Each other one would be a caller of its own there."""
    settings = GatewaySettings.model_validate({"api_keys": KEYS})
    assert identify({b"authorization": b"bearer   genrec_shop "}, settings, time.time) is settings.api_keys[0]
    with pytest.raises(HTTPException, match="401"):
        identify({b"authorization": spelled}, settings, time.time)


def test_a_key_serves_until_the_moment_that_it_expires_at():
    settings = GatewaySettings.model_validate({"api_keys": [{**KEYS[0], "expires": "2027-01-31T18:00:00+01:00"}]})
    moment = datetime(2027, 1, 31, 17, tzinfo=UTC).timestamp()
    assert identify({b"authorization": b"Bearer genrec_shop"}, settings, lambda: moment - 0.001) is settings.api_keys[0]
    with pytest.raises(HTTPException, match="has expired"):
        identify({b"authorization": b"Bearer genrec_shop"}, settings, lambda: moment)


# Settings that change


async def test_new_settings_hold_for_the_next_request_without_a_restart():
    served = Served(admission=ONE_PLACE)
    [running, waiting] = await served.asking("a", "b")
    served.edge.reconfigure(
        GatewaySettings.model_validate({"admission": {"max_concurrent": 2, "max_queued": 0}, "max_k": 20, "api_keys": KEYS})
    )
    await settled()
    assert served.users == ["a", "b"]
    assert (await served.ask()).status_code == 401
    assert (await served.ask(headers=bearer("any"))).status_code == 503
    served.service.gate.set()
    assert [(await answer).status_code for answer in (running, waiting)] == [200, 200]
    assert (await served.ask(headers=bearer("any"), k=21)).status_code == 422


async def test_who_waits_is_held_to_the_new_waiting_time():
    served = Served(admission=ONE_PLACE)
    [running, waiting] = await served.asking("a", "b")
    served.edge.reconfigure(GatewaySettings.model_validate({"admission": {**ONE_PLACE, "max_wait_ms": 10}}))
    assert (await waiting).status_code == 503
    served.service.gate.set()
    assert (await running).status_code == 200


async def test_an_answered_request_leaves_nothing_for_the_garbage_collector():
    """A cycle of objects for each request, with its body, is there until the collector looks, and each of its looks stops all requests."""
    served = Served()
    served.service.gate.set()
    body = json.dumps({"user_id": "u"}).encode()

    async def answered():
        async def receive():
            return {"type": scope["type"] + ".request", "body": body}  # what a server gives refers to the scope

        async def send(message):
            sent.append(message["type"])

        sent = []
        headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        scope = {"type": "http", "method": "POST", "path": "/v1/recommend", "headers": headers}
        await served.api(scope, receive, send)
        assert sent[-1] == "http.response.body"

    await answered()
    gc.collect()
    gc.disable()
    try:
        await answered()
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        left = [type(one).__name__ for one in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert not {"Caller", "Connection", "Ticket", "TakenPlace"} & set(left), left
