"""Broken bytes at the doors: ZeroMQ frames, kept answers, bodies of events. Nothing ends a process, and nothing holds more than it may."""

import asyncio
import json
import math

import httpx
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.cache.codec import CountingCodec
from cluster.cache.entry import Entry
from cluster.config import GatewaySettings
from cluster.values import CacheReport, Item, Recommendation, ScoredItem, StageReport
from deployments.http.api import create_api
from deployments.zeromq.zmtp import MOST_FRAMES, SMALL_BYTES, Broken, ByteBudget, Peer
from integrations.redis.entries import from_bytes, to_bytes
from pipelines.answer_codec import ANSWER_CODEC
from tests.fakes.data import Data
from tests.mutations import JSON, mutated
from tests.repetitions import fuzzed
from tests.unit.test_zeromq import GREETING, MORE, Deaf, frame, ready

MOST_BYTES, BUDGET = 2_000, 1_500
PING = b"\x04\x09\x04PING\0\0ab"
BODY = json.dumps({"user_id": "ada", "k": 5}).encode()
SESSION = (
    GREETING + ready(b"DEALER") + PING,
    frame(b"1", MORE) + frame(b"POST /v1/recommend", MORE) + frame(b"{}", MORE) + frame(BODY),
    frame(b"", MORE) + frame(b"2", MORE) + frame(bytes(1_000), MORE) + frame(bytes(900)) + PING,
)


class CountedBudget(ByteBudget):
    """It remembers the most that was held."""

    largest = 0

    def take(self, count, heard):
        fits = super().take(count, heard)
        self.largest = max(self.largest, self.held)
        return fits


@fuzzed()
@given(stream=mutated(b"".join(SESSION), b"".join(SESSION) * 3), pieces=st.integers(1, 7), keeps=st.booleans())
async def test_a_broken_zeromq_session_is_messages_or_its_end_and_never_holds_more_than_the_budget(stream, pieces, keeps):
    reader, budget, held = asyncio.StreamReader(), CountedBudget(BUDGET), []
    peer = Peer(reader, Deaf(), budget, MOST_BYTES)

    async def sends():
        step = len(stream) // pieces + 1
        for start in range(0, len(stream), step):
            reader.feed_data(stream[start : start + step])
            await asyncio.sleep(0)
        reader.feed_eof()

    async def hears():
        await peer.greet()
        while True:
            heard = await peer.message()
            assert 1 <= len(heard.frames) <= MOST_FRAMES
            small = sum(len(part) for part in heard.frames if len(part) <= SMALL_BYTES)
            assert sum(map(len, heard.frames)) <= heard.held + small
            assert heard.whole or heard.size > SMALL_BYTES
            held.append(heard.held) if keeps else budget.give(heard.held, heard.caller)

    sending = asyncio.create_task(sends())
    with pytest.raises((Broken, EOFError)):
        await hears()
    await sending
    assert (budget.held, budget.largest <= BUDGET) == (sum(held), True)


async def test_a_client_that_sends_heartbeats_for_days_between_its_messages_is_not_cut_off():
    reader = asyncio.StreamReader()
    reader.feed_data(GREETING + ready(b"DEALER") + PING * MOST_BYTES + frame(b"1", MORE) + frame(b"statistics"))
    reader.feed_eof()
    peer = Peer(reader, Deaf(), ByteBudget(BUDGET), MOST_BYTES)
    await peer.greet()
    assert (await peer.message()).frames == [b"1", b"statistics"]


ANSWER = ANSWER_CODEC.encode(
    Recommendation(
        "ada",
        (ScoredItem(Item("50", "Star Wars", {"year": "1977"}), 0.5, "encode"),),
        (StageReport("encode", "torch", 1.0), StageReport("cache", "l1", 0.1, fallback_from="l2: late")),
        "tiny/1",
        degraded=False,
        unknown_items=("x",),
        cache=CacheReport("l1", 3.0),
    )
)


@fuzzed()
@given(payload=mutated(ANSWER) | JSON.map(lambda value: json.dumps(value).encode()))
@example(b'{"new":' + b"[" * 100_000)
@example(ANSWER[:-1] + b',"new":' + b"[" * 100_000)
def test_a_broken_kept_answer_is_an_answer_or_a_value_error(payload):
    try:
        answer = ANSWER_CODEC.decode(payload)
    except ValueError:
        codec = CountingCodec(ANSWER_CODEC)
        assert codec.decoded(Entry(payload, 1, 0.0, 0.0)) is None
        assert codec.failures == 1
    else:
        assert ANSWER_CODEC.decode(ANSWER_CODEC.encode(answer)) == answer or any(math.isnan(item.score) for item in answer.items)


@fuzzed()
@given(raw=mutated(to_bytes(Entry(ANSWER, len(ANSWER), 1e9, 2e9, 3.0, 60.0), 7)) | st.binary(max_size=80))
def test_a_broken_entry_of_redis_is_an_entry_or_none(raw):
    entry = from_bytes(raw)
    if entry is not None:
        assert entry.freshness(1.5e9) in ("fresh", "stale", "expired")
        assert raw.endswith(entry.payload)


API = create_api(None, Data(), GatewaySettings(max_body_bytes=20_000, max_events=3))
EVENT = {
    "user_id": "ada",
    "item_id": "50",
    "action": "rating",
    "value": 4.5,
    "timestamp": 881250949,
    "tenant": "shop",
    "idempotency_key": "a1",
}
FIELDS = st.sampled_from([*EVENT, "events", "other"])
BODIES = (
    mutated(json.dumps(EVENT).encode(), json.dumps({"events": [EVENT, EVENT]}).encode())
    | st.dictionaries(FIELDS, JSON | st.just([EVENT]), max_size=5).map(lambda odd: json.dumps(EVENT | odd).encode())
    | JSON.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=100)
)


@fuzzed()
@given(body=BODIES, key=st.none() | st.text(st.characters(max_codepoint=255, exclude_characters="\r\n\0"), max_size=20))
@example(b'{"events":' + b"[" * 19_000, None)
@example(json.dumps(EVENT | {"timestamp": 10**400}).encode(), None)
@example(b'{"user_id": "\\ud800", "item_id": "1"}', None)
async def test_a_broken_body_of_events_is_stored_or_refused(body, key):
    headers = {b"content-type": b"application/json"} | ({} if key is None else {b"idempotency-key": key.encode("latin-1")})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(API), base_url="http://genrec") as client:
        for path, good in (("/v1/events", (200, 201)), ("/v1/cache:invalidate", (200,))):
            response = await client.post(path, content=body, headers=headers)
            assert response.status_code in (*good, 413, 422), (path, body, response.text)
            assert response.json()
