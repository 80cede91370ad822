"""Streaming over HTTP: both formats, over a service whose parts the test gives."""

import asyncio
import json
import threading
from contextlib import aclosing

import httpx
import pytest
from msgspec.structs import replace
from starlette.requests import ClientDisconnect

from cluster import metrics as m
from cluster.config import GatewaySettings
from cluster.dataset import Catalogue
from cluster.errors import BackendUnavailable, InvalidRequest
from cluster.titled_items import TitledItems
from cluster.values import Explanation, Item, Recommendation, ScoredItem, SkippedBackend, StageReport
from deployments.http.answer_json import FEW
from deployments.http.api import create_api
from deployments.http.pieces import PIECE
from deployments.http.streaming import MOST_PARAMETERS, MOST_RANGES, NDJSON, SSE, wanted
from tests.noted import Noted
from tests.unit.test_messages import NotedReads

STAGE = StageReport("generate", "vllm", 12.5, (SkippedBackend("mine", "is\nbroken", failed=True),))
ITEM = ScoredItem(Item("50", "Äpfel &\u2028Birnen", {"year": "1977"}), -1.25, "generate")
ANSWER = Recommendation("ada", (ITEM,), (STAGE,), "tiny/1", degraded=True, unknown_items=("x",))
ASK = {"user_id": "ada"}


class Service:
    """Streams `parts`, of which an exception is raised; remembers whether the stream was closed."""

    def __init__(self, *parts):
        self.parts, self.closed = parts, False

    async def recommend(self, request):
        return ANSWER

    async def stream(self, request):
        try:
            for part in self.parts:
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            self.closed = True


async def post(service, accept: str | None = None, **more) -> httpx.Response:
    transport = httpx.ASGITransport(create_api(service, None, GatewaySettings()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        return await client.post("/v1/recommend", json={**ASK, **more}, headers={"accept": accept} if accept else {})


def events_of(response: httpx.Response) -> list[tuple[str, dict]]:
    """What a client reads, by each format's own rules."""
    if response.headers["content-type"].startswith(NDJSON):
        return [(line["type"], line["data"]) for line in map(json.loads, response.content.decode().rstrip("\n").split("\n"))]
    blocks = [block.split("\n") for block in response.content.decode().removesuffix("\n\n").split("\n\n")]
    assert all(len(block) == 2 for block in blocks)
    return [(event.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for event, data in blocks]


@pytest.mark.parametrize("accept", [SSE, NDJSON])
class TestBothFormats:
    async def test_every_part_is_an_event_and_the_last_is_the_plain_answer(self, accept):
        service = Service(STAGE, ITEM, ANSWER)
        response = await post(service, accept)
        assert response.status_code == 200
        assert response.headers["content-type"].partition(";")[0] == accept
        assert response.headers["cache-control"] == "no-store"
        (_, stage), (_, item), (_, answer) = events = events_of(response)
        assert [name for name, _ in events] == ["stage", "item", "answer"]
        assert (stage["backend"], stage["fallback_from"][0]["reason"]) == ("vllm", "is\nbroken")
        assert (item["item_id"], item["title"], item["score"]) == ("50", "Äpfel &\u2028Birnen", -1.25)
        assert answer == (await post(service)).json()

    async def test_a_client_that_splits_lines_as_python_does_reads_whole_events(self, accept):
        title = "".join(chr(code) for code in range(0x2100) if len(f"-{chr(code)}-".splitlines()) > 1)
        assert {"\x0b", "\x1c", "\x85", "\u2028", "\u2029"} < set(title)
        item = replace(ITEM, item=Item("50", title, {}))
        named = TitledItems(Catalogue((item.item,)), [1, 1], [-1.25, -1.5], "encode")
        broken = replace(STAGE, fallback_from=(SkippedBackend("mine", title, failed=True),))
        response = await post(Service(broken, item, named, BackendUnavailable(title)), accept)
        assert list(response.iter_lines()) == response.text.removesuffix("\n").split("\n")
        (_, stage), (_, first), (_, second), (_, third), (_, error) = events_of(response)
        titles = [one["title"] for one in (first, second, third)]
        assert [stage["fallback_from"][0]["reason"], *titles, error["detail"]] == [title] * 5

    async def test_an_error_before_the_first_event_is_a_problem_with_its_status(self, accept):
        response = await post(Service(InvalidRequest("behaviours[0].timestamp", "is in the future")), accept)
        assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")
        assert response.json()["errors"][0]["field"] == "behaviours[0].timestamp"

    async def test_a_request_that_cannot_be_read_is_a_problem_too(self, accept):
        response = await post(Service(), accept, colour="blue")
        assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")

    async def test_an_error_midway_is_the_last_event_and_says_nothing_secret(self, accept, caplog):
        service = Service(STAGE, ITEM, RuntimeError("secret detail"))
        response = await post(service, accept)
        assert response.status_code == 200
        (name, problem) = events_of(response)[-1]
        assert [event for event, _ in events_of(response)] == ["stage", "item", "error"]
        assert (name, problem["status"], problem["instance"]) == ("error", 500, "/v1/recommend")
        assert "secret" not in response.text
        assert "secret detail" in caplog.text, "the log has it"
        assert service.closed

    async def test_an_error_of_a_known_kind_keeps_its_words(self, accept):
        _, (_, problem) = events_of(await post(Service(STAGE, BackendUnavailable("no replica could be reached")), accept))
        assert (problem["status"], problem["detail"]) == (503, "no replica could be reached")


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("broken"), "500"), (BackendUnavailable("no replica"), "503"), (InvalidRequest("k", "is odd"), "422")],
)
async def test_a_stream_that_ends_in_an_error_counts_by_the_status_that_a_plain_answer_would_have_had(error, status):
    noted = Noted()
    transport = httpx.ASGITransport(create_api(Service(STAGE, error), None, GatewaySettings(), meter=noted))
    async with httpx.AsyncClient(transport=transport, base_url="http://genrec") as client:
        response = await client.post("/v1/recommend", json=ASK, headers={"accept": SSE})
    assert (response.status_code, events_of(response)[-1][0]) == (200, "error")
    assert noted.total(m.HTTP_REQUESTS, route="/v1/recommend", status=status) == noted.total(m.HTTP_REQUESTS) == 1


class Waiting(Service):
    """Has the next part once it is asked for."""

    def __init__(self, *parts):
        super().__init__(*parts)
        self.wanted = asyncio.Semaphore(1)

    async def stream(self, request):
        async with aclosing(super().stream(request)) as parts:
            async for part in parts:
                await self.wanted.acquire()
                yield part


async def streamed(service, send) -> None:
    """One raw ASGI request for a stream."""
    scope = {"type": "http", "asgi": {"spec_version": "2.4"}, "http_version": "1.1", "method": "POST", "path": "/v1/recommend"}
    scope |= {"raw_path": b"/v1/recommend", "query_string": b"", "root_path": "", "scheme": "http"}
    scope["headers"] = [(b"accept", SSE.encode()), (b"content-type", b"application/json")]

    async def receive():
        return {"type": "http.request", "body": json.dumps(ASK).encode(), "more_body": False}

    await create_api(service, None, GatewaySettings())(scope, receive, send)


async def test_events_are_sent_as_they_come_and_a_caller_who_leaves_ends_the_stream():
    sent, service = [], Waiting(STAGE, *[ITEM] * 1000, ANSWER)

    async def send(message):
        sent.append(message)
        if len(sent) == 4:
            raise OSError("the caller has gone")
        service.wanted.release()

    with pytest.raises(ClientDisconnect):
        await streamed(service, send)
    assert [message["type"] for message in sent] == ["http.response.start", *["http.response.body"] * 3]
    assert sent[1]["body"].startswith(b"event: stage\n")
    assert service.closed


async def test_events_that_are_there_at_once_are_sent_together():
    """A message for each of a thousand items costs many times what it holds."""
    sent, service = [], Service(STAGE, *[ITEM] * 1000, ANSWER)

    async def send(message):
        sent.append(message)

    await streamed(service, send)
    parts = [message["body"] for message in sent[1:]]
    assert {len(part) for part in parts[:-2]} == {PIECE}, "as its reader takes it"
    assert b"".join(parts).count(b"event: ") == 1002
    assert (parts[-1], service.closed) == (b"", True)


@pytest.mark.parametrize("accept", [SSE, NDJSON])
async def test_items_that_were_found_together_are_the_same_events_and_no_object_is_made_of_each(accept, monkeypatch):
    """An object and a message for each of a thousand items takes the gateway twice as long."""
    items = TitledItems(Catalogue([ITEM.item, Item("51", '"Quoted"', {})]), [2, 1, 2], [-1.25, float("nan"), 1e16], "encode")
    one_by_one = await post(Service(STAGE, *items, ANSWER), accept)
    assert len(events_of(one_by_one)) == 5
    as_tuple = await post(Service(STAGE, tuple(items), ANSWER), accept)
    monkeypatch.setattr(TitledItems, "__getitem__", None)
    together = await post(Service(STAGE, items, ANSWER), accept)
    assert events_of(together) == events_of(one_by_one) == events_of(as_tuple)


@pytest.mark.parametrize("accept", [SSE, NDJSON])
@pytest.mark.parametrize(("count", "here"), [(FEW, True), (FEW + 1, False)])
async def test_many_explained_items_and_an_answer_of_many_are_written_in_a_thread_and_few_are_not(accept, count, here):
    threads = set()
    items = tuple([ScoredItem(Item("7", "Seven", NotedReads(threads)), 0.5, "blend", Explanation(retrieval=0.25))] * count)
    for parts, told in (((items, ANSWER), count + 1), ((STAGE, replace(ANSWER, items=items)), 2)):
        threads.clear()
        events = events_of(await post(Service(*parts), accept))
        assert len(events) == told
        assert (threads == {threading.get_ident()}) is here
    assert [one["attributes"] for one in events[-1][1]["items"]] == [{"year": "1995"}] * count


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", None),
        ("*/*", None),
        ("application/json", None),
        ("text/html, image/png", None),
        ("text/event-stream", SSE),
        ("TEXT/Event-Stream; charset=utf-8", SSE),
        ("application/x-ndjson", NDJSON),
        ("*/*, text/event-stream", SSE),
        ("application/json, text/event-stream", None),
        ("application/json;q=0.5, text/event-stream;q=0.9", SSE),
        ("application/x-ndjson;q=0.8, text/event-stream;q=0.9", SSE),
        ("text/event-stream;q=0, */*", None),
        ("text/event-stream;q=often", None),
        ("text/html," * (MOST_RANGES - 1) + SSE, SSE),
        ("text/html," * MOST_RANGES + SSE, None),
        (SSE + ";a=b" * (MOST_PARAMETERS - 1) + ";q=0", None),
        (SSE + ";a=b" * MOST_PARAMETERS + ";q=0", SSE),
    ],
)
def test_the_accept_header_decides(accept, expected):
    assert wanted(accept) == expected


def test_both_formats_are_documented():
    documented = create_api(None, None, GatewaySettings()).fastapi.openapi()["paths"]["/v1/recommend"]["post"]["responses"]["200"]
    content = documented["content"]
    assert "Only `answer` is final" in documented["description"]
    assert set(content) == {"application/json", SSE, NDJSON}
    assert content["application/json"]["schema"]["$ref"].endswith("RecommendOut")
    assert content[SSE]["example"].startswith("event: item\n")
