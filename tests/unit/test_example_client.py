"""examples/client.py against a real socket that answers as scripted: refusals, silence, connections that are cut."""

import asyncio
import json
import socketserver
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from tests.examples import example
from tests.ports import free_port

client = example("client")
ANSWER = {
    "user_id": "ada",
    "items": [{"item_id": "7", "title": "Seven", "attributes": {}, "score": 0.5, "stage": "encode", "explanation": None}],
    "stages": [{"stage": "encode", "backend": "torch", "duration_ms": 1.0, "fallback_from": []}],
    "degraded": False,
    "model_version": "tiny/1",
    "unknown_items": [],
    "cache": None,
}
STORED = {"stored": 1, "duplicates": 0, "unknown_items": [], "events": []}
CUT, CUT_IN_THE_BODY, SILENT = object(), object(), object()


def said(status, body, **headers):
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"HTTP/1.1 {status} X",
        f"content-length: {len(raw)}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + raw


def refused(status, **headers):
    return said(status, {"title": "No", "status": status, "detail": "not now", "instance": "/", "errors": []}, **headers)


@dataclass
class Heard:
    method: str
    path: str
    headers: dict
    body: bytes
    at: float = field(default_factory=time.monotonic)


class Scripted(socketserver.ThreadingTCPServer):
    """Plays one line of the script for each request, the last one for all that follow."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, script):
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.heard, self.over = list(script), [], threading.Event()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(socketserver.StreamRequestHandler):
    def handle(self):
        while first := self.rfile.readline():
            method, path, _ = first.decode().split()
            headers = {}
            while line := self.rfile.readline().strip().decode():
                name, _, value = line.partition(": ")
                headers[name.lower()] = value
            self.server.heard.append(Heard(method, path, headers, self.rfile.read(int(headers.get("content-length", 0)))))
            if not self.play(self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]):
                return

    def play(self, line):
        """Whether the connection stays open."""
        if line is CUT:
            return False
        if line is SILENT:
            self.server.over.wait()
            return False
        if line is CUT_IN_THE_BODY:
            self.wfile.write(said(200, ANSWER)[:-10])
            return False
        self.wfile.write(line)
        return True


@contextmanager
def served(*script):
    with Scripted(script) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


def quick(**options):
    return client.Retries(**{"timeout": 120.0, "wait_initial": 0.001, "wait_max": 0.002, **options})


def ask_sync(url, call, *, stream=False, **options):
    with client.Client(url, **{"retries": quick(), "try_s": 60.0, **options}) as genrec:
        return list(genrec.stream(call)) if stream else genrec.ask(call)


def ask_async(url, call, *, stream=False, **options):
    async def ask():
        async with client.AsyncClient(url, **{"retries": quick(), "try_s": 60.0, **options}) as genrec:
            return [part async for part in genrec.stream(call)] if stream else await genrec.ask(call)

    return asyncio.run(ask())


@pytest.fixture(params=[ask_sync, ask_async], ids=["sync", "async"])
def ask(request):
    return request.param


def test_a_call_says_what_is_known_of_the_user_and_its_answer_is_the_json_that_came(ask):
    seen = [{"item_id": "50", "timestamp": 1}]
    with served(said(200, ANSWER)) as server:
        assert ask(server.url, client.recommend("ada", seen, k=3), api_key="genrec_1") == ANSWER
    [heard] = server.heard
    assert (heard.method, heard.path, heard.headers["authorization"]) == ("POST", "/v1/recommend", "Bearer genrec_1")
    assert json.loads(heard.body) == {"user_id": "ada", "behaviours": seen, "k": 3}


@pytest.mark.parametrize("broken", [CUT, CUT_IN_THE_BODY, refused(503), refused(429)], ids=["cut", "cut in the body", "503", "429"])
def test_what_may_pass_is_asked_again(ask, broken):
    with served(broken, broken, said(200, ANSWER)) as server:
        assert ask(server.url, client.recommend("ada"))["model_version"] == "tiny/1"
    assert len(server.heard) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 500])
def test_what_would_be_the_same_next_time_is_not(ask, status):
    with served(refused(status)) as server, pytest.raises(client.Refused) as raised:
        ask(server.url, client.recommend("ada"))
    assert (raised.value.status, len(server.heard)) == (status, 1)


def test_a_refusal_carries_the_field_the_value_and_the_cure(ask):
    wrong = {"field": "k", "problem": "5000 is more than the 1000 this service takes; ask for fewer items", "value": "5000"}
    problem = {"title": "Invalid request", "status": 422, "detail": "k: ...", "instance": "/v1/recommend", "errors": [wrong]}
    with served(said(422, problem)) as server, pytest.raises(client.Refused, match="422 Invalid request") as raised:
        ask(server.url, client.recommend("ada"))
    [told] = raised.value.wrong
    assert told == wrong


@pytest.mark.parametrize("body", [b"<html>bad gateway</html>", b'"text"', b"[1]", b'{"title": 1}', b""])
def test_an_error_page_of_a_proxy_is_a_refusal_too(ask, body):
    with served(said(502, body)) as server, pytest.raises(client.Refused) as raised:
        ask(server.url, client.recommend("ada"))
    assert (raised.value.status, raised.value.wrong) == (502, [])


def test_it_waits_for_as_long_as_it_is_told_to(ask):
    with served(refused(503, retry_after=1), said(200, ANSWER)) as server:
        ask(server.url, client.recommend("ada"))
    first, second = server.heard
    assert second.at - first.at >= 1.0


def test_a_wait_past_the_deadline_is_not_begun(ask):
    """One that waits all the same runs into the test's own limit."""
    with served(refused(503, retry_after=36_000)) as server, pytest.raises(client.Refused):
        ask(server.url, client.recommend("ada"))
    assert len(server.heard) == 1


def test_a_silent_service_is_given_up_after_its_tries(ask):
    """A client that waits for ever runs into the test's own limit. A request that is given up may not have been heard."""
    with served(SILENT) as server, pytest.raises(httpx.TimeoutException):
        ask(server.url, client.recommend("ada"), try_s=0.1)
    assert len(server.heard) <= 4


def test_no_try_follows_one_that_ended_past_the_deadline(ask):
    with served(refused(503)) as server, pytest.raises(client.Refused):
        ask(server.url, client.recommend("ada"), retries=quick(timeout=1e-9))
    assert len(server.heard) == 1


def test_a_server_that_is_not_there_is_told_once_the_tries_are_over(ask):
    with pytest.raises(httpx.ConnectError):
        ask(f"http://127.0.0.1:{free_port()}", client.recommend("ada"))


def test_events_carry_the_same_key_each_time_they_are_sent_and_another_for_each_call(ask):
    events = [{"user_id": "ada", "item_id": "50"}]
    with served(CUT, refused(503), said(201, STORED)) as server:
        assert ask(server.url, client.send_events(events))["stored"] == 1
        ask(server.url, client.send_events(events))
    first, *again, other = [heard.headers["idempotency-key"] for heard in server.heard]
    assert again == [first, first]
    assert other != first


@pytest.mark.parametrize(("user_id", "part"), [("a/b c?", "a%2Fb%20c%3F"), ("..", "%2E%2E"), (".", "%2E")])
def test_any_user_id_stays_one_part_of_the_path(ask, user_id, part):
    with served(said(200, {"user_id": user_id, "tenant": "default", "events": 0, "cached_answers": 0, "everywhere": True})) as server:
        ask(server.url, client.erase(user_id))
    assert server.heard[0].path == f"/v1/users/{part}/history"


@pytest.mark.parametrize(("call", "method"), [(client.history, "GET"), (client.erase, "DELETE")], ids=["history", "erase"])
def test_what_is_stored_of_a_user_is_read_and_erased_for_the_tenant_that_is_named(ask, call, method):
    with served(said(200, {"user_id": "..", "tenant": "shop"})) as server:
        ask(server.url, call("..", tenant="shop"))
    assert (server.heard[0].method, server.heard[0].path) == (method, "/v1/users/%2E%2E/history?tenant=shop")


def lines(*events):
    return b"".join(json.dumps({"type": kind, "data": data}).encode() + b"\n" for kind, data in events)


def test_a_stream_is_asked_again_until_it_begins_and_ends_with_the_answer(ask):
    events = lines(("stage", ANSWER["stages"][0]), ("item", ANSWER["items"][0]), ("answer", ANSWER))
    with served(refused(503), CUT, said(200, events)) as server:
        parts = ask(server.url, client.recommend("ada"), stream=True)
    assert [kind for kind, _ in parts] == ["stage", "item", "answer"]
    assert parts[-1][1] == ANSWER
    assert [heard.headers["accept"] for heard in server.heard] == ["application/x-ndjson"] * 3


def test_an_error_within_a_stream_is_raised(ask):
    problem = {"title": "Not available now", "status": 503, "detail": "gone", "instance": "/v1/recommend", "errors": []}
    with (
        served(said(200, lines(("stage", ANSWER["stages"][0]), ("error", problem)))) as server,
        pytest.raises(client.Refused, match="gone"),
    ):
        ask(server.url, client.recommend("ada"), stream=True)
    assert len(server.heard) == 1


def test_many_callers_of_a_broken_service_retry_no_more_than_the_budget_has():
    with served(refused(503)) as server, client.Client(server.url, retries=quick(share=0.1, reserve=5)) as genrec:
        for _ in range(20):
            with pytest.raises(client.Refused):
                genrec.ask(client.recommend("ada"))
    assert 20 + 4 <= len(server.heard) <= 20 + 5 + 2
