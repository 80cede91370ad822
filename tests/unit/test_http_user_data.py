"""Events, histories, erasure and caches over HTTP, in this process: the real routes, SQLite and cache; only the switchboard is played."""

import asyncio
import sqlite3
import time
from contextlib import ExitStack, asynccontextmanager
from hashlib import sha256
from types import SimpleNamespace
from unittest.mock import AsyncMock
from urllib.parse import quote

import asyncpg
import httpx
import pytest
from msgspec.structs import replace

from cluster.cache.entry import Entry, Key
from cluster.cache.layout import Layout
from cluster.cache.memory import MemoryCache
from cluster.cache.shard import CacheShard
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.cache.shared_notes import SharedNotes
from cluster.cache.tier_values import TierSettings
from cluster.cache.tiered import TieredCache
from cluster.config import GatewaySettings, parse
from cluster.errors import BackendUnavailable
from cluster.events.guarded import GuardedHistories
from cluster.events.opened_later import StoreOpenedLater
from cluster.events.read_turns import ReadTurns
from cluster.events.store import Event, closing_store, open_event_store
from cluster.fleet.erasures import ErasureLog
from cluster.fleet.switchboard import StageStatus
from cluster.values import Behaviour, RecommendRequest
from deployments.anticipation import Anticipation
from deployments.fleet.erasure_follower import ErasureFollower
from deployments.http.api import create_api
from deployments.http.exchange import HttpRequest, exchange
from deployments.http.ids import HISTORY_PATH
from deployments.http.streaming import NDJSON
from deployments.user_data import UserData
from deployments.version_router import VersionRouter
from pipelines.answer_codec import ANSWER_CODEC
from pipelines.cached_recommender import CachedRecommender
from pipelines.recommend import Recommender
from pipelines.remembered import REQUEST_CODEC, UsualRequests, usual_key
from pipelines.stored_history import SWITCHED_OFF, StoredHistories
from tests.bundles import make_bundle
from tests.fakes.played_stages import Descending
from tests.ports import free_port
from tests.unit.test_cache_shared import BreakableShard
from tests.unit.test_moving_shards import Place, cache_of
from tests.waiting import passed, settled, until

LIMITS = GatewaySettings(max_events=3, max_behaviours=5)
PATIENT = SharedSettings(deadline_s=60, operator_s=300)


class Switchboard:
    """Remembers what every replica was told to forget, and of which users every gateway was told to drop the answers."""

    def __init__(self):
        self.forgotten, self.dropped, self.follow = [], [], True

    async def forget(self, tenant, user_id, turn):
        self.forgotten.append((tenant, user_id))
        return self.follow

    async def drop_answers(self, tenant, user_id):
        self.dropped.append((tenant, user_id))
        return self.follow

    async def statuses(self):
        return (StageStatus("encoder", 1, (), ()),)


def versions_of(bundle, answers):
    """One version that serves everybody."""
    model = SimpleNamespace(bundle=bundle, catalogue=bundle and bundle.catalogue, answers=answers)
    return VersionRouter(SimpleNamespace(models=(model,), get=lambda version: None), stages=None)


class InProcess:
    def __init__(self, answers):
        self.answers = answers

    async def recommend(self, request):
        return await self.answers.recommend(request)

    def stream(self, request):
        return self.answers.stream(request)


@asynccontextmanager
async def gateway(tmp_path, bundle, shared=None):
    """An API client, the switchboard and the encoder behind it. Those of one directory and shared cache have the same users."""
    board, encoder, events = Switchboard(), Descending(bundle), await open_event_store(f"sqlite:///{tmp_path}/events.db")
    cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
    usual = UsualRequests(shared and SharedNotes(shared, REQUEST_CODEC))
    answers = CachedRecommender(Recommender(bundle, encoder), StoredHistories(events, 100), cache, bundle.digest, usual)
    versions = versions_of(bundle, answers)
    anticipation = Anticipation(versions, usual, anticipates=lambda *_: True, after_s=0)
    data = UserData(
        parse({"model_dir": str(tmp_path)}), board, versions, cache=cache, events=events, usual=usual, anticipation=anticipation
    )
    transport = httpx.ASGITransport(create_api(InProcess(answers), data, LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        yield client, board, encoder
    await data.close()


@pytest.fixture
async def served(tmp_path):
    async with gateway(tmp_path, make_bundle(tmp_path / "models", items=50)) as made:
        yield made


@pytest.fixture
def client(served):
    return served[0]


def event(item_id="1", user_id="ada", **more):
    return {"user_id": user_id, "item_id": item_id, "timestamp": 1000, **more}


async def test_an_event_is_stored_and_stands_in_the_history_with_its_title(client):
    stored = await client.post("/v1/events", json=event("7", action="rating", value=4.5))
    history = (await client.get("/v1/users/ada/history")).json()
    assert (stored.status_code, stored.json()["stored"]) == (201, 1)
    assert history["events"] == [{"item_id": "7", "title": "Item 7", "timestamp": 1000, "action": "rating", "value": 4.5}]
    assert history["version"]


async def test_several_events_are_stored_in_their_order(client):
    await client.post("/v1/events", json={"events": [event("3"), event("1"), event("2")]})
    assert [one["item_id"] for one in (await client.get("/v1/users/ada/history")).json()["events"]] == ["3", "1", "2"]
    assert [one["item_id"] for one in (await client.get("/v1/users/ada/history?limit=1")).json()["events"]] == ["2"]


async def test_a_history_that_is_cut_says_how_long_it_is_and_is_paged_back_second_by_second(client):
    for number, at in enumerate((1000, 1001, 1002, 1002, 1002, 1003, 1003, 1004)):
        await client.post("/v1/events", json=event(f"{number}", timestamp=at))
    seen, until = [], ""
    while len(seen) < 8:
        page = (await client.get(f"/v1/users/ada/history?limit=4{until}")).json()
        assert page["total"] == 8
        again = sum(one["timestamp"] == seen[0]["timestamp"] for one in seen) if seen else 0
        assert page["events"][len(page["events"]) - again :] == seen[:again]
        seen = page["events"][: len(page["events"]) - again] + seen
        until = f"&until={seen[0]['timestamp']}"
    assert [one["item_id"] for one in seen] == [f"{number}" for number in range(8)]


async def test_a_longer_history_than_the_service_takes_is_refused_with_how_to_ask_for_it(client):
    refused = (await client.get("/v1/users/ada/history?limit=6")).json()["errors"]
    assert refused == [
        {"field": "limit", "problem": "6 is more than the 5 this service takes; ask for fewer, and for older ones by until", "value": ""}
    ]
    refused = (await client.get("/v1/users/ada/history?until=1700000000000")).json()["errors"]
    assert [one["field"] for one in refused] == ["until"]
    assert "whole seconds since 1970, not milliseconds" in refused[0]["problem"]


@pytest.mark.parametrize(
    "body", [event(), {"events": [event("1"), event("2")]}, {"user_id": "ada", "item_id": "1"}], ids=["one", "batch", "dated on arrival"]
)
async def test_a_call_repeated_with_its_key_stores_nothing_twice(client, body):
    first = await client.post("/v1/events", json=body, headers={"Idempotency-Key": "k"})
    again = await client.post("/v1/events", json=body, headers={"Idempotency-Key": "k"})
    count = len(first.json()["events"])
    assert (first.status_code, again.status_code) == (201, 200)
    assert (again.json()["stored"], again.json()["duplicates"]) == (0, count)
    assert len((await client.get("/v1/users/ada/history")).json()["events"]) == count


async def test_a_key_that_was_used_for_another_event_is_refused_by_name_and_nothing_is_stored(client):
    await client.post("/v1/events", json=event("1", idempotency_key="k"))
    refused = await client.post("/v1/events", json={"events": [event("2"), event("3", idempotency_key="k")]})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["field"] == "events[1].idempotency_key"
    assert len((await client.get("/v1/users/ada/history")).json()["events"]) == 1


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"user_id": "ada"}, "item_id"),
        ({"events": []}, "events"),
        ({"events": [event()] * 4}, "events"),
        (event(action="stare"), "action"),
        (event(timestamp=10**13), "timestamp"),
        (event(value="NaN"), "value"),
        (event(timestamp=4_000_000_000), "timestamp"),
        (event(zzz=1), "zzz"),
        ({"events": [event(), event(zzz=1)]}, "events[1].zzz"),
        (event(idempotency_key="a\nb"), "idempotency_key"),
    ],
)
async def test_a_wrong_event_is_refused_with_the_field(client, body, field):
    response = await client.post("/v1/events", json=body)
    assert response.status_code == 422
    assert [one["field"] for one in response.json()["errors"]] == [field], response.text


async def test_an_event_more_than_a_day_ahead_is_refused_and_one_of_a_clock_that_is_less_ahead_is_stored(client):
    now, day_s, hour_s = int(time.time()), 86_400, 3600
    refused = await client.post("/v1/events", json=event(timestamp=now + day_s + hour_s))
    (error,) = refused.json()["errors"]
    assert (refused.status_code, error["field"]) == (422, "timestamp")
    assert "more than a day ahead of this service's clock" in error["problem"]
    assert (await client.post("/v1/events", json=event(timestamp=now + day_s - hour_s))).status_code == 201
    assert [one["timestamp"] for one in (await client.get("/v1/users/ada/history")).json()["events"]] == [now + day_s - hour_s]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (event("a\0b"), "item_id"),
        (event(user_id="a\0b"), "user_id"),
        ({"events": [event(), event("a\0b")]}, "events[1].item_id"),
        ({"events": [event(), event(user_id="a\0b")]}, "events[1].user_id"),
    ],
)
async def test_what_the_store_refuses_is_named_as_it_was_sent(client, body, field):
    response = await client.post("/v1/events", json=body)
    assert (response.status_code, [one["field"] for one in response.json()["errors"]]) == (422, [field])


@pytest.mark.parametrize(
    ("first", "then", "field"),
    [
        (event("1"), event("2"), "idempotency_key"),
        ({"events": [event("1")] * 2}, {"events": [event("1"), event("2")]}, "events[1].idempotency_key"),
    ],
    ids=["one", "several"],
)
async def test_a_header_that_was_used_for_another_event_is_refused_as_it_was_sent(client, first, then, field):
    for body in (first, then):
        response = await client.post("/v1/events", json=body, headers={"Idempotency-Key": "order-17"})
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, field)
    assert response.json()["errors"][0]["problem"].startswith("'order-17' is known for another event")


async def test_an_unknown_item_is_stored_and_said(client):
    assert (await client.post("/v1/events", json=event("new"))).json()["unknown_items"] == ["new"]
    assert (await client.get("/v1/users/ada/history")).json()["events"][0]["title"] is None


async def test_a_user_alone_is_recommended_by_what_is_stored_of_them(client):
    await client.post("/v1/events", json=event("50"))
    answer = (await client.post("/v1/recommend", json={"user_id": "ada", "k": 3})).json()
    assert [item["item_id"] for item in answer["items"]] == ["49", "48", "47"]
    assert (answer["stages"][0]["stage"], answer["cache"]["tier"]) == ("history", "computed")
    assert (await client.post("/v1/recommend", json={"user_id": "ada", "k": 3})).json()["cache"]["tier"] == "l1"


async def test_users_of_the_same_id_in_two_tenants_are_two_users(client):
    await client.post("/v1/events", json=event("50", tenant="a"))
    await client.post("/v1/events", json=event("49", tenant="b"))
    answers = {t: (await client.post("/v1/recommend", json={"user_id": "ada", "tenant": t, "k": 1})).json() for t in "ab"}
    assert {tenant: answer["items"][0]["item_id"] for tenant, answer in answers.items()} == {"a": "49", "b": "50"}
    await client.delete("/v1/users/ada/history?tenant=a")
    assert len((await client.get("/v1/users/ada/history?tenant=b")).json()["events"]) == 1


async def test_an_erased_user_is_gone_from_the_store_the_cache_and_every_replica(served):
    client, board, _ = served
    await client.post("/v1/events", json={"events": [event("50"), event("49")]})
    await client.post("/v1/recommend", json={"user_id": "ada", "k": 3})
    erased = (await client.delete("/v1/users/ada/history")).json()
    assert erased == {"user_id": "ada", "tenant": "default", "events": 2, "cached_answers": 1, "everywhere": True}
    assert board.forgotten == [("default", "ada")]
    assert (await client.get("/v1/users/ada/history")).json()["events"] == []
    answer = (await client.post("/v1/recommend", json={"user_id": "ada", "k": 3})).json()
    assert (answer["cache"]["tier"], answer["stages"][1]["stage"]) == ("computed", "popularity")


async def test_an_erasure_says_so_while_a_replica_has_not_followed(served):
    client, board, _ = served
    board.follow = False
    assert (await client.delete("/v1/users/ada/history")).json()["everywhere"] is False


async def test_a_slash_in_a_users_id_is_part_of_it(client):
    await client.post("/v1/events", json=event(user_id="a/b c"))
    assert len((await client.get("/v1/users/a%2Fb%20c/history")).json()["events"]) == 1


@pytest.mark.parametrize("quoted", ["andr%E9", "andr%EF%BF%BD%E9", "%C3", "%ED%A0%80"])
@pytest.mark.parametrize("method", ["GET", "DELETE"])
async def test_a_path_that_is_not_utf_8_is_refused_and_no_other_user_is_erased(served, method, quoted):
    client, board, _ = served
    assert (await client.post("/v1/events", json=event(user_id="andr\ufffd"))).status_code == 201
    for door in (client.request(method, f"/v1/users/{quoted}/history"), through_exchange(client, method, f"/v1/users/{quoted}/history")):
        answer = await door
        assert (answer.status_code, answer.json()["detail"]) == (422, "path: is not UTF-8; quote the id as UTF-8")
    assert board.forgotten == []
    assert len((await client.get("/v1/users/andr%EF%BF%BD/history")).json()["events"]) == 1


async def through_exchange(client, method, path):
    answer = await exchange(client._transport.app, HttpRequest(method, path, {"host": "localhost"}))  # noqa: SLF001 - the client's application
    return httpx.Response(answer.status, content=answer.body)


@pytest.mark.parametrize("user_id", ["a\nb", "andr\ufffd", "\n", "history", "a/history", "ä:b", "%0A"])
async def test_whoever_can_be_stored_can_be_read_and_erased(client, user_id):
    await client.post("/v1/events", json={"user_id": user_id, "item_id": "7"})
    path = f"/v1/users/{quote(user_id, safe='')}/history"
    assert len((await client.get(path)).json()["events"]) == 1
    assert (await client.delete(path)).json()["events"] == 1


async def test_after_an_event_the_next_answer_is_there_already(served):
    client, _, encoder = served
    await client.post("/v1/recommend", json={"user_id": "ada", "k": 3})
    await client.post("/v1/events", json=event("50"))
    await asyncio_until(lambda: len(encoder.asked) == 1)
    answer = (await client.post("/v1/recommend", json={"user_id": "ada", "k": 3})).json()
    assert (answer["cache"]["tier"], answer["items"][0]["item_id"]) in {("l1", "49"), ("joined", "49")}
    assert len(encoder.asked) == 1


async def test_after_an_event_at_one_gateway_the_next_answer_of_another_is_there_already(tmp_path):
    bundle, shard = make_bundle(tmp_path / "models", items=50), CacheShard(MemoryCache("s3fifo", 2**20))
    shared = ShardedCache({"only": shard}, SharedSettings(deadline_s=60))
    async with gateway(tmp_path, bundle, shared) as (asked, _, encoder), gateway(tmp_path, bundle, shared) as (told, _, other_encoder):
        await asked.post("/v1/recommend", json={"user_id": "ada", "k": 3})
        await asyncio_until(lambda: shard.memory.peek(usual_key("default", "ada")))
        await told.post("/v1/events", json=event("50"))
        await asyncio_until(lambda: shard.memory.statistics().entries == 3)
        answer = (await asked.post("/v1/recommend", json={"user_id": "ada", "k": 3})).json()
        assert (answer["cache"]["tier"], answer["items"][0]["item_id"]) == ("l2", "49")
        assert (len(encoder.asked), len(other_encoder.asked)) == (0, 1)


async def test_after_an_event_the_latest_request_that_any_gateway_was_asked_is_anticipated(tmp_path):
    bundle, shard = make_bundle(tmp_path / "models", items=50), CacheShard(MemoryCache("s3fifo", 2**20))
    shared, key = ShardedCache({"only": shard}, SharedSettings(deadline_s=60)), usual_key("default", "ada")
    async with gateway(tmp_path, bundle, shared) as (one, _, encoder), gateway(tmp_path, bundle, shared) as (other, _, other_encoder):
        await one.post("/v1/recommend", json={"user_id": "ada", "k": 3})
        await asyncio_until(lambda: (told := shard.memory.peek(key)) and b'"k":3' in told.payload)
        await other.post("/v1/recommend", json={"user_id": "ada", "k": 5})
        await asyncio_until(lambda: b'"k":5' in shard.memory.peek(key).payload)
        held = shard.memory.statistics().entries
        await one.post("/v1/events", json=event("50"))
        await asyncio_until(lambda: shard.memory.statistics().entries == held + 1)
        answer = (await other.post("/v1/recommend", json={"user_id": "ada", "k": 5})).json()
        assert (answer["cache"]["tier"], answer["items"][0]["item_id"]) == ("l2", "49")
        assert (len(encoder.asked), len(other_encoder.asked)) == (1, 0)


async def test_the_caches_tell_their_hits_by_tenant(client):
    for _ in range(3):
        await client.post("/v1/recommend", json={"user_id": "ada", "k": 3, "behaviours": [], "tenant": "shop"})
    caches = (await client.get("/v1/cache")).json()
    (l1,) = caches["tiers"]
    assert (l1["tier"], l1["hits"], l1["entries"], l1["tenants"]["shop"]["hits"]) == ("l1", 2, 1, 2)
    assert caches["computed"] == 1


async def test_the_caches_tell_which_shards_of_the_shared_one_answer(tmp_path):
    sound, broken = CacheShard(MemoryCache("s3fifo", 2**20)), BreakableShard()
    broken.mood = "raises"
    shared = ShardedCache({"sound": sound, "broken": broken}, PATIENT)
    async with gateway(tmp_path, make_bundle(tmp_path / "models", items=50), shared) as (client, _, _):
        for _ in range(3):
            shards = {one["name"]: one for one in (await client.get("/v1/cache")).json()["shards"]}
    assert (shards["sound"]["breaker"], shards["sound"]["failures"]) == ("closed", 0)
    assert (shards["broken"]["breaker"], shards["broken"]["failures"], shards["broken"]["timeouts"]) == ("open", 3, 0)


@pytest.mark.parametrize(("body", "dropped"), [({}, 3), ({"tenant": "a"}, 2), ({"tenant": "a", "user_id": "ada"}, 1), ({"tenant": "c"}, 0)])
async def test_answers_are_dropped_by_user_by_tenant_or_all(served, body, dropped):
    client, board, _ = served
    for tenant, user in (("a", "ada"), ("a", "bob"), ("b", "ada")):
        await client.post("/v1/recommend", json={"user_id": user, "tenant": tenant, "behaviours": []})
    invalidated = await client.post("/v1/cache:invalidate", json=body)
    assert invalidated.json() == {"dropped": dropped, "everywhere": True}
    assert (board.dropped, board.forgotten) == ([(body.get("tenant"), body.get("user_id"))], []), "engines keep what they know of users"


async def test_a_user_that_no_store_can_hold_is_erased_from_what_is_kept(served):
    client, board, _ = served
    user = "a\0b"
    asked = {"user_id": user, "behaviours": [{"item_id": "1", "timestamp": 100}]}
    assert (await client.post("/v1/recommend", json=asked)).status_code == 200
    erased = await client.delete("/v1/users/a%00b/history")
    assert (erased.status_code, erased.json()["events"], erased.json()["cached_answers"]) == (200, 0, 1)
    assert board.forgotten == [("default", user)]


async def test_a_user_to_invalidate_needs_a_tenant(client):
    response = await client.post("/v1/cache:invalidate", json={"user_id": "ada"})
    assert response.status_code == 422
    assert response.json()["errors"][0]["field"] == "tenant"


@asynccontextmanager
async def switched_off(**settings):
    """An API client of a gateway without events, and the switchboard."""
    board, answers = Switchboard(), CachedRecommender(None, StoredHistories(None, 100), None, "")
    data = UserData(parse(settings), board, versions_of(None, answers), cache=None, events=None)
    transport = httpx.ASGITransport(create_api(InProcess(answers), data, LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        yield client, board
    await data.close()


async def test_where_events_are_switched_off_an_erasure_reaches_those_that_were_stored_before(tmp_path):
    url, ada = f"sqlite:///{tmp_path}/events.db", Behaviour("i", 100)
    async with closing_store(url) as store:
        await store.append([Event("ada", ada), Event("ada", ada), Event("bob", ada)])
    async with switched_off(model_dir=str(tmp_path), events={"enabled": False}) as (client, board):
        told = [(await client.delete("/v1/users/ada/history")).json() for _ in range(2)]
    assert [(one["events"], one["everywhere"]) for one in told] == [(2, True), (0, True)]
    assert board.forgotten == [("default", "ada")] * 2
    async with closing_store(url) as store:
        assert [user.user_id for user in await store.users("default", 10)] == ["bob"]


async def test_where_events_are_switched_off_and_none_were_stored_an_erasure_makes_no_store(tmp_path):
    async with switched_off(model_dir=str(tmp_path), events={"enabled": False}) as (client, board):
        erased = (await client.delete("/v1/users/ada/history")).json()
    assert (erased["events"], erased["everywhere"], board.forgotten) == (0, True, [("default", "ada")])
    assert not list(tmp_path.iterdir())


async def test_where_events_are_switched_off_and_their_store_is_away_no_erasure_is_told_as_done(tmp_path):
    away = f"postgresql://u@/genrec?host={tmp_path}"
    async with switched_off(model_dir=str(tmp_path), events={"enabled": False, "url": away}) as (client, board):
        refused = await client.delete("/v1/users/ada/history")
    assert (refused.status_code, board.forgotten) == (503, [("default", "ada")]), "what is computed of the user goes all the same"
    assert "start the server, or correct the URL's host and port" in refused.json()["detail"]


@pytest.mark.parametrize("left", [None, "events.db.key", "events.db.erased", "elsewhere"])
async def test_where_events_are_switched_off_and_their_file_is_away_alone_or_with_its_disk_no_erasure_is_told_as_done(tmp_path, left):
    ledger = f"?ledger={tmp_path}/elsewhere" if left == "elsewhere" else ""
    disk, url = tmp_path / "disk", f"sqlite:///{tmp_path}/disk/events.db{ledger}"
    disk.mkdir()
    async with closing_store(url) as store:
        await store.append([Event("ada", Behaviour("i", 100))])
    disk.rename(tmp_path / "away")
    if left is not None:
        disk.mkdir()
    if left in {"events.db.key", "events.db.erased"}:
        (disk / left).write_bytes((tmp_path / "away" / left).read_bytes())
    settings = {"model_dir": str(tmp_path), "events": {"enabled": False, "url": url}}
    async with switched_off(**settings) as (client, board):
        refused = await client.delete("/v1/users/ada/history")
        assert (refused.status_code, board.forgotten) == (503, [("default", "ada")]), "what is computed of the user goes all the same"
        assert ("mount its disk" if left is None else "bring the file back") in refused.json()["detail"]
        for file in disk.glob("*"):
            file.unlink()
        if left is not None:
            disk.rmdir()
        (tmp_path / "away").rename(disk)
        assert (await client.delete("/v1/users/ada/history")).json()["events"] == 1


@pytest.mark.virtual_time
async def test_a_cache_that_was_away_forgets_a_users_usual_request_when_it_is_back_however_much_longer_that_is_kept_than_answers(tmp_path):
    shard = BreakableShard()
    shared = ShardedCache({"only": shard}, SharedSettings(deadline_s=60))
    cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
    usual = UsualRequests(SharedNotes(shared, REQUEST_CODEC))
    answers = CachedRecommender(None, StoredHistories(None, 100), cache, "", usual)
    settings = parse({"model_dir": str(tmp_path), "cache": {"ttl_s": 1, "stale_s": 0}})
    data = UserData(settings, Switchboard(), versions_of(None, answers), cache=cache, events=None, usual=usual)
    usual.note(RecommendRequest("ada"))
    await usual.shared.flush()
    shard.mood = "raises"
    assert (await data.erase("default", "ada", ExitStack())).everywhere is False
    asked = shard.asked
    await until(lambda: shard.asked > asked + 5)
    shard.mood = "works"
    await until(lambda: not shard.memory.peek(usual_key("default", "ada")))
    await data.close()


@pytest.mark.virtual_time
@pytest.mark.parametrize("mood", ["works", "raises"])
async def test_a_gateway_that_told_a_usual_request_between_an_erasure_and_its_order_erases_it_again(tmp_path, mood):
    shard = BreakableShard()
    shared = ShardedCache({"only": shard}, SharedSettings(deadline_s=60))
    cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
    usual = UsualRequests(SharedNotes(shared, REQUEST_CODEC))
    answers = CachedRecommender(None, StoredHistories(None, 100), cache, "", usual)
    data = UserData(parse({"model_dir": str(tmp_path)}), Switchboard(), versions_of(None, answers), cache=cache, events=None, usual=usual)
    for user in ("ada", "bob"):
        usual.note(RecommendRequest(user))
    await shard.invalidate("default", "ada")  # by another gateway
    await usual.shared.flush()
    assert shard.memory.peek(usual_key("default", "ada")) is not None
    shard.mood, asked = mood, shard.asked
    await data.forget("default", "ada")
    await until(lambda: shard.asked > asked)
    shard.mood = "works"
    await until(lambda: not shard.memory.peek(usual_key("default", "ada")))
    erased = watched(shard, "invalidate")
    await data.forget("default", "ada")
    await data.forget("default", "cyd")
    await settled()
    assert erased == [], "it has told nothing of these users"
    assert shard.memory.peek(usual_key("default", "bob")) is not None
    await data.close()


@pytest.mark.parametrize("living", ["the gateway that kept it", "another gateway", "one that starts afterwards"])
async def test_what_began_to_be_computed_of_an_erased_user_after_that_is_erased_from_the_shared_cache_the_second_time(tmp_path, living):
    """The request, with its behaviours, had arrived before the erasure, and waited for its turn."""
    shard, bundle = CacheShard(MemoryCache()), make_bundle(tmp_path / "models", items=50)
    asked, fleet = RecommendRequest("ada", (Behaviour("7", 1000),)), []
    for _ in range(3):
        cache = TieredCache(MemoryCache("s3fifo", 2**20), ShardedCache({"only": shard}, PATIENT), TierSettings(), ANSWER_CODEC)
        answers = CachedRecommender(Recommender(bundle, Descending(bundle)), StoredHistories(None, 100), cache, bundle.digest)
        settings = parse({"model_dir": str(tmp_path)})
        fleet.append((UserData(settings, Switchboard(), versions_of(bundle, answers), cache=cache, events=None), answers, cache))
    (here, *_), (there, answers, cache), (started, *_) = fleet
    await here.erase("default", "ada", ExitStack())
    await there.forget("default", "ada")
    for user in ("ada", "bob"):
        await answers.recommend(replace(asked, user_id=user))
    await cache.flush()
    assert {key.group for key, _ in shard.memory.entries()} == {"ada", "bob"}
    erased = watched(shard, "invalidate")
    for data in (here, there):
        await data.forget("default", "cyd")
    await settled()
    assert erased == [], "the first time the shared cache is asked once, whatever the number of gateways"
    if living == "one that starts afterwards":
        log = ErasureLog()

        async def forget(users, again):
            for tenant, user in (*users, *again):
                await started.forget(tenant, user, again=(tenant, user) in again)

        follower = ErasureFollower(forget, drop_answers=started.drop_answers, again_after_s=0)
        log.add("default", "ada", now=1)
        for _ in range(2):
            await follower.follow(log.since(follower.place, under_way_since=0), follower.place)
    else:
        await (there if living == "the gateway that kept it" else here).forget("default", "ada", again=True)
    await until(lambda: {key.group for key, _ in shard.memory.entries()} == {"bob"})
    for data, *_ in fleet:
        await data.close()


@pytest.mark.virtual_time
async def test_a_gateway_that_ends_tells_the_others_the_usual_requests_that_it_was_about_to_tell(tmp_path):
    shard = BreakableShard()

    class Shared(ShardedCache):
        told = None

        async def close(self):
            self.told = shard.memory.peek(usual_key("default", "ada")) is not None
            await super().close()

    shared = Shared({"only": shard}, SharedSettings(deadline_s=60))
    cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
    usual = UsualRequests(SharedNotes(shared, REQUEST_CODEC))
    answers = CachedRecommender(None, StoredHistories(None, 100), cache, "", usual)
    data = UserData(parse({"model_dir": str(tmp_path)}), Switchboard(), versions_of(None, answers), cache=cache, events=None, usual=usual)
    usual.note(RecommendRequest("ada"))
    await data.close()
    assert shared.told


@pytest.mark.virtual_time
async def test_while_a_cache_is_away_a_tenants_answers_are_erased_once_from_the_others(tmp_path):
    here, away = BreakableShard(), BreakableShard()
    erased = watched(here, "invalidate")
    shared = ShardedCache({"here": here, "away": away}, SharedSettings(deadline_s=60))
    cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
    answers = CachedRecommender(None, StoredHistories(None, 100), cache, "")
    data = UserData(parse({"model_dir": str(tmp_path)}), Switchboard(), versions_of(None, answers), cache=cache, events=None)
    away.mood, tasks = "raises", len(asyncio.all_tasks())
    assert (await data.invalidate("default", None)).everywhere is False
    asked = away.asked
    await until(lambda: away.asked > asked + 5)
    assert len(erased) == 1
    away.mood = "works"
    await until(lambda: len(erased) == 2)
    await until(lambda: len(asyncio.all_tasks()) == tasks, "it insists no longer")
    assert len(erased) == 2, "all have confirmed it"
    await data.close()


@pytest.mark.virtual_time
@pytest.mark.parametrize("also_away", [False, True])
async def test_while_it_is_not_known_which_caches_there_are_a_tenants_answers_are_erased_once_from_each_that_answers(tmp_path, also_away):
    """Their list is Ray's head's, and the caches themselves answer without it. `also_away`: one of them, when it is asked first."""
    place = Place()
    shared = await cache_of(place, 2)
    erased = {name: watched(shard, "invalidate") for name, shard in place.shards.items()}
    cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
    answers = CachedRecommender(None, StoredHistories(None, 100), cache, "")
    data = UserData(parse({"model_dir": str(tmp_path)}), Switchboard(), versions_of(None, answers), cache=cache, events=None)
    place.refuses, tasks = True, len(asyncio.all_tasks())
    first, second = place.shards
    place.away = {second} if also_away else set()
    assert (await data.invalidate("default", None)).everywhere is False
    place.away = set()
    for _ in range(2):
        refused = place.refused
        await until(lambda refused=refused: place.refused > refused + 5)
        assert [len(erased[name]) for name in (first, second)] == ([2, 1] if also_away else [1, 1])
    place.refuses = False
    await until(lambda: len(asyncio.all_tasks()) == tasks, "it insists no longer")
    assert len(erased[second]) == 3, "it is asked twice, as entries may move meanwhile"
    await data.close()


@pytest.mark.virtual_time
async def test_while_a_cache_that_owns_no_keys_any_more_is_silent_a_tenants_answers_are_erased_once_from_the_others(tmp_path):
    """It is there, and may have entries left to give away, and answer again."""
    place = Place()
    shared = await cache_of(place, 2)
    stays, goes = sorted(place.shards)
    place.away = {goes}
    shared.follow(Layout(shared.seen.layout.number + 1, 1))
    await until(lambda: shared.seen.layout.owners == 1)
    erased = watched(place.shards[stays], "invalidate")
    cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
    answers = CachedRecommender(None, StoredHistories(None, 100), cache, "")
    data = UserData(parse({"model_dir": str(tmp_path)}), Switchboard(), versions_of(None, answers), cache=cache, events=None)
    assert (await data.invalidate("default", None)).everywhere is False
    once = len(erased)
    await passed(60)
    assert len(erased) == once
    place.away = set()
    await until(lambda: len(erased) > once)
    await data.close()
    await shared.close()


@pytest.mark.virtual_time
async def test_while_a_cache_is_away_an_erasure_that_is_sent_again_and_again_is_insisted_on_once(tmp_path):
    shard = BreakableShard()
    shared = ShardedCache({"only": shard}, SharedSettings(deadline_s=60))
    cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
    answers = CachedRecommender(None, StoredHistories(None, 100), cache, "")
    data = UserData(parse({"model_dir": str(tmp_path)}), Switchboard(), versions_of(None, answers), cache=cache, events=None)
    shard.mood, tasks = "raises", len(asyncio.all_tasks())
    for _ in range(20):
        for user in ("ada", "ben"):
            assert (await data.erase("default", user, ExitStack())).everywhere is False
    await until(lambda: len(asyncio.all_tasks()) == tasks + 1, "one insists for both users")
    erased, shard.mood = watched(shard, "invalidate"), "works"
    await until(lambda: len(asyncio.all_tasks()) == tasks, "both are erased")
    assert sorted(erased) == [("default", "ada"), ("default", "ben")]
    await data.close()


@pytest.mark.virtual_time
@pytest.mark.parametrize("mood", ["raises", "hangs"])
async def test_while_a_cache_is_away_erasures_of_many_users_are_tried_one_at_a_time_and_all_once_it_answers(tmp_path, mood):
    shard, board, users = BreakableShard(), Switchboard(), [f"user {number}" for number in range(500)]
    shared = ShardedCache({"only": shard}, SharedSettings(deadline_s=60))
    cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
    answers = CachedRecommender(None, StoredHistories(None, 100), cache, "")
    data = UserData(parse({"model_dir": str(tmp_path)}), board, versions_of(None, answers), cache=cache, events=None)
    kept = [Key("default", user, "an answer") for user in ("ada", *users)]
    for key in kept:
        shard.memory.put(key, Entry.lasting(b"", 1, now=time.time(), fresh_s=1e6))
    shard.mood, tasks = mood, len(asyncio.all_tasks())
    erasing = (data.erase("default", user, ExitStack()) for user in users)
    assert {erased.everywhere for erased in await asyncio.gather(*erasing)} == {False}
    assert len(asyncio.all_tasks()) - tasks <= 3
    asked = shard.asked
    await passed(20)
    assert 2 < shard.asked - asked <= 12
    shard.mood = "works"
    await until(lambda: board.dropped)
    assert board.dropped == [("default", None)], "one call for all of them"
    assert [key.group for key in kept if shard.memory.peek(key)] == ["ada"]
    await until(lambda: len(asyncio.all_tasks()) == tasks, "it insists no longer")
    await data.close()


@pytest.mark.virtual_time
async def test_an_erasure_that_fails_by_itself_keeps_no_other_from_a_cache_that_answers_nor_a_telling_that_fails(tmp_path, monkeypatch):
    shard, board = BreakableShard(), Switchboard()
    shared = ShardedCache({"only": shard}, SharedSettings(deadline_s=60))
    cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
    answers = CachedRecommender(None, StoredHistories(None, 100), cache, "")
    data = UserData(parse({"model_dir": str(tmp_path)}), board, versions_of(None, answers), cache=cache, events=None)
    shard.mood, invalidate, drop = "raises", shard.invalidate, board.drop_answers
    for tenant, user in [("a", "cursed"), ("a", None), ("b", "ada")]:
        await data.invalidate(tenant, user)

    async def works_but_for_one(namespace=None, group=None):
        if group == "cursed":
            raise OSError("this one alone")
        return await invalidate(namespace, group)

    async def told_but_of_one(tenant, user):
        if user == "ada":
            raise BackendUnavailable("the switchboard is away")
        await drop(tenant, user)

    monkeypatch.setattr(shard, "invalidate", works_but_for_one)
    monkeypatch.setattr(board, "drop_answers", told_but_of_one)
    shard.mood = "works"
    told, kept = len(board.dropped), Key("b", "ada", "an answer")
    shard.memory.put(kept, Entry.lasting(b"", 1, now=time.time(), fresh_s=1e6))
    await until(lambda: len(board.dropped) > told and shard.memory.peek(kept) is None)
    await passed(20)
    assert board.dropped[told:] == [("a", None)], "told once, though the telling of another fails"
    await data.close()


@pytest.mark.virtual_time
@pytest.mark.parametrize(("users", "erased"), [(5, [("a", None), ("b", "ada")]), (9, [(None, None)])], ids=["of a tenant", "of all"])
async def test_of_very_many_erasures_that_a_cache_has_missed_those_of_a_tenant_or_all_become_one(tmp_path, monkeypatch, users, erased):
    monkeypatch.setattr("deployments.unconfirmed_erasures.USERS", users)
    monkeypatch.setattr("deployments.unconfirmed_erasures.WAITING", 9)
    shard, board = BreakableShard(), Switchboard()
    shared = ShardedCache({"only": shard}, SharedSettings(deadline_s=60))
    cache = TieredCache(MemoryCache("s3fifo", 2**20), shared, TierSettings(), ANSWER_CODEC)
    answers = CachedRecommender(None, StoredHistories(None, 100), cache, "")
    data = UserData(parse({"model_dir": str(tmp_path)}), board, versions_of(None, answers), cache=cache, events=None)
    shard.mood = "raises"
    for tenant, user in [("b", "ada"), *(("a", f"user {number}") for number in range(9))]:
        await data.invalidate(tenant, user)
    told, calls = len(board.dropped), watched(shard, "invalidate")
    shard.mood = "works"
    await until(lambda: len(board.dropped) > told)
    assert sorted(calls) == sorted(board.dropped[told:]) == erased
    await data.close()


@pytest.mark.virtual_time
@pytest.mark.parametrize(("call", "turn"), [("invalidate", ()), ("erase", (ExitStack(),))], ids=["invalidate", "erase"])
async def test_answers_that_gateways_read_from_a_cache_that_had_not_erased_them_yet_go_once_it_has(tmp_path, call, turn):
    """The cache does not answer when they are to be erased, and the switchboard is away when the cache has erased them."""
    fleet, bundle, shard = [], make_bundle(tmp_path / "models", items=50), BreakableShard()

    class Telling(Switchboard):
        away = 0

        async def drop_answers(self, tenant, user_id):
            if self.away:
                self.away -= 1
                raise BackendUnavailable("no replica of switchboard could be reached")
            for data, *_ in fleet:
                data.drop_answers(tenant, user_id)
            return await super().drop_answers(tenant, user_id)

        async def forget(self, tenant, user_id, turn):
            for data, *_ in fleet:
                await data.forget(tenant, user_id)
            return await super().forget(tenant, user_id, turn)

    board, asked = Telling(), RecommendRequest("ada", (Behaviour("7", 1000),))
    for _ in range(2):
        cache = TieredCache(MemoryCache("s3fifo", 2**20), ShardedCache({"only": shard}, PATIENT), TierSettings(), ANSWER_CODEC)
        answers = CachedRecommender(Recommender(bundle, Descending(bundle)), StoredHistories(None, 100), cache, bundle.digest)
        data = UserData(parse({"model_dir": str(tmp_path)}), board, versions_of(bundle, answers), cache=cache, events=None)
        fleet.append((data, answers, cache))
    (here, *_), (_, answers, cache) = fleet
    await answers.recommend(asked)
    await cache.flush()
    shard.mood = "raises"
    assert (await getattr(here, call)("default", "ada", *turn)).everywhere is False
    shard.mood, board.away, told = "works", 2, len(board.dropped)
    assert (await answers.recommend(asked)).cache.tier == "l2"
    assert (await answers.recommend(asked)).cache.tier == "l1"
    await until(lambda: len(board.dropped) > told)
    assert (await answers.recommend(asked)).cache.tier == "computed"
    for data, *_ in fleet:
        await data.close()


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("call", ["invalidate", "erase"])
async def test_what_a_cancelled_call_has_begun_to_erase_reaches_every_process_before_the_gateway_ends(
    tmp_path, monkeypatch, caplog, call, silent
):
    board, turn, closed, asked, works = Switchboard(), ExitStack(), [], asyncio.Event(), asyncio.Event()

    class Slow(TieredCache):
        async def invalidate(self, tenant, user_id):
            asked.set()
            await works.wait()
            return await super().invalidate(tenant, user_id)

    bundle, cache = make_bundle(tmp_path / "models", items=50), Slow(MemoryCache("s3fifo", 2**20), None, TierSettings(), ANSWER_CODEC)
    answers = CachedRecommender(Recommender(bundle, Descending(bundle)), StoredHistories(None, 100), cache, bundle.digest)
    data = UserData(parse({"model_dir": str(tmp_path)}), board, versions_of(bundle, answers), cache=cache, events=None)
    turn.callback(lambda: closed.append(list(board.forgotten)))
    called = asyncio.create_task(data.erase("default", "ada", turn) if call == "erase" else data.invalidate("default", "ada"))
    await asked.wait()
    called.cancel()
    with pytest.raises(asyncio.CancelledError):
        await called
    if call == "erase":
        turn.close()  # as the route does
    assert (board.forgotten, board.dropped, closed) == ([], [], [])
    if silent:

        async def unanswered(*_):
            raise BackendUnavailable("the switchboard does not answer")

        monkeypatch.setattr(board, "forget", unanswered)
        monkeypatch.setattr(board, "drop_answers", unanswered)
    closing = asyncio.create_task(data.close())
    await settled()
    works.set()
    await closing
    assert ("asked to have erased or dropped is not so everywhere: the switchboard does not answer" in caplog.text) == silent
    if silent:
        return
    assert (board.forgotten if call == "erase" else board.dropped) == [("default", "ada")]
    assert closed == ([[("default", "ada")]] if call == "erase" else []), "the turn lasts until the switchboard has been asked"


async def test_an_erasure_that_no_process_hears_of_is_logged_also_where_its_client_left_while_the_store_erased(
    tmp_path, monkeypatch, caplog
):
    bundle, board, asked = make_bundle(tmp_path / "models", items=50), Switchboard(), asyncio.Event()

    async def erasing(*_):
        asked.set()
        await asyncio.Event().wait()

    async def unanswered(*_):
        raise BackendUnavailable("the switchboard does not answer")

    monkeypatch.setattr(board, "forget", unanswered)
    recommender = CachedRecommender(Recommender(bundle, Descending(bundle)), StoredHistories(None, 100), None, bundle.digest)
    versions = versions_of(bundle, recommender)
    data = UserData(parse({"model_dir": str(tmp_path)}), board, versions, cache=None, events=SimpleNamespace(erase=erasing))
    called = asyncio.create_task(data.erase("default", "ada", ExitStack()))
    await asked.wait()
    called.cancel()
    await asyncio.gather(called, return_exceptions=True)
    await settled()
    assert "asked to have erased or dropped is not so everywhere: the switchboard does not answer" in caplog.text


def watched(shard, name):
    """The calls of a method of the shard's, from now on."""
    calls, method = [], getattr(shard, name)

    async def noted(*arguments):
        calls.append(arguments)
        return await method(*arguments)

    setattr(shard, name, noted)
    return calls


async def test_without_an_event_store_events_are_refused_with_the_reason(tmp_path):
    bundle = make_bundle(tmp_path / "models", items=50)
    answers = CachedRecommender(Recommender(bundle, Descending(bundle)), StoredHistories(None, 100), None, bundle.digest)
    data = UserData(parse({"model_dir": str(tmp_path)}), Switchboard(), versions_of(bundle, answers), cache=None, events=None)
    transport = httpx.ASGITransport(create_api(InProcess(answers), data, LIMITS))
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        refused, caches = await client.post("/v1/events", json=event()), await client.get("/v1/cache")
        answer = await client.post("/v1/recommend", json={"user_id": "ada"})
    assert (refused.status_code, refused.json()["detail"]) == (503, SWITCHED_OFF)
    assert caches.json()["enabled"] is False
    assert (answer.status_code, answer.json()["cache"]) == (200, None)


@pytest.mark.virtual_time
@pytest.mark.parametrize("silent", [False, True])
async def test_a_history_that_has_no_turn_at_the_store_is_refused_for_overload_unless_the_store_answers_no_read_at_all(tmp_path, silent):
    ends, asked, turns = asyncio.Event(), [], ReadTurns()

    async def broken(*which):
        asked.append(which)
        await ends.wait()
        raise BackendUnavailable("the event store does not answer")

    async def answers():
        while not silent:
            await turns.read_for_answer("shop", lambda: passed(0.1), 60.0)

    store = SimpleNamespace(history=broken, close=AsyncMock())
    data = UserData(parse({"model_dir": str(tmp_path)}), Switchboard(), versions_of(None, None), cache=None, events=store, turns=turns)
    api = create_api(InProcess(None), data, LIMITS)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://genrec") as client:
        reading, answering = asyncio.create_task(client.get("/v1/users/ada/history")), asyncio.create_task(answers())
        await until(lambda: asked)
        late, edge = await client.get("/v1/users/eve/history"), api.edge.statistics()
        assert (late.status_code, late.headers["retry-after"], len(asked)) == (503, "2", 1)
        if silent:
            assert late.json()["detail"] == "the event store has answered no read for 5 s"
            assert (edge.refused, edge.failed) == ({}, {HISTORY_PATH: 1})
        else:
            assert "ask for fewer histories at a time" in late.json()["detail"]
            assert (edge.refused, edge.failed) == ({503: 1}, {}), "the store has not failed"
        answering.cancel()
        ends.set()
        assert (await reading).status_code == 503
    assert api.edge.statistics().failed == {HISTORY_PATH: 1 + silent}
    await data.close()


KEYS = {"shop": ["read", "events", "erase"], "boss": ["read", "events", "erase", "operate"]}
"""The rights of each key."""


def away(kind, tmp_path, monkeypatch):
    """The URL of a store that does not answer, and what callers are not to read of it."""
    if kind == "a file":
        (tmp_path / "file").touch()
        return f"sqlite:///{tmp_path}/file/events.db", [str(tmp_path), "events.db", "unable to open"]
    if kind == "a read-only file":
        sqlite3.connect(tmp_path / "events.db").close()
        monkeypatch.setattr("integrations.sqlite.store.connect_writer", lambda path: sqlite3.connect(f"file:{path}?mode=ro", uri=True))
        return f"sqlite:///{tmp_path}/events.db", [str(tmp_path), "events.db", "readonly"]
    if kind == "a wrong password":
        refuse = AsyncMock(side_effect=asyncpg.InvalidPasswordError('password authentication failed for user "recuser"'))
        monkeypatch.setattr("asyncpg.connect", refuse)
    port = free_port()
    return f"postgresql://recuser:hunter2@127.0.0.1:{port}/recdb", ["127.0.0.1", f"{port}", "recuser", "hunter2", "recdb", "Errno"]


@pytest.mark.parametrize("kind", ["no server", "a wrong password", "a file", "a read-only file"])
async def test_what_a_store_that_is_away_says_of_its_place_is_for_operators_alone(kind, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("cluster.events.opened_later.TOLD_EVERY_S", 1e9)
    url, hidden = away(kind, tmp_path, monkeypatch)
    bundle, events = make_bundle(tmp_path / "models", items=50), StoreOpenedLater(url)
    histories = StoredHistories(GuardedHistories(events, 300), 100)
    answers = CachedRecommender(Recommender(bundle, Descending(bundle)), histories, None, bundle.digest)
    data = UserData(parse({"model_dir": str(tmp_path)}), Switchboard(), versions_of(bundle, answers), cache=None, events=events)
    keys = [{"name": name, "sha256": sha256(f"genrec_{name}".encode()).hexdigest(), "rights": rights} for name, rights in KEYS.items()]
    api = create_api(InProcess(answers), data, GatewaySettings.model_validate({"api_keys": keys}))

    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://genrec") as client:

        async def told(key):
            client.headers["authorization"] = f"Bearer genrec_{key}"
            asked = {"user_id": "ada"}
            return [
                await client.post("/v1/events", json=event()),
                await client.get("/v1/users/ada/history"),
                await client.delete("/v1/users/ada/history"),
                await client.post("/v1/recommend", json=asked),
                await client.post("/v1/recommend", json=asked, headers={"accept": NDJSON}),
            ]

        to_shop, to_boss = await told("shop"), await told("boss")
        gateway = (await client.get("/v1/gateway")).json()
    await data.close()
    assert [one.status_code for one in to_shop] == [503, 503, 503, 200, 200]
    counted = {"/v1/events": 2, HISTORY_PATH: 4}
    assert (gateway["stored"], gateway["failed"]) == (counted, counted)
    assert [text for text in hidden for one in to_shop if text in one.text] == []
    assert all("does not answer" in one.text for one in to_shop)
    assert all("event store" in one.json()["detail"] and hidden[0] in one.text for one in to_boss[:3]), "the cure names the place"
    logged = [record.getMessage() for record in caplog.records if hidden[0] in record.getMessage()]
    assert len(logged) == 1, "not for each call"


async def asyncio_until(holds):
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 - what is waited for happens in the background
            await asyncio.sleep(0.01)
