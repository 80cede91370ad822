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
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import example

client = example("client")
QUICK = client.Retries(tries=4, deadline_s=120.0, try_s=60.0, base_s=0.001, longest_s=0.002)
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


def ask_sync(url, method, *args, **options):
    with client.Client(url, **{"retries": QUICK, **options}) as genrec:
        answer = getattr(genrec, method)(*args)
        return list(answer) if method == "stream" else answer


def ask_async(url, method, *args, **options):
    async def ask():
        async with client.AsyncClient(url, **{"retries": QUICK, **options}) as genrec:
            answer = getattr(genrec, method)(*args)
            return [part async for part in answer] if method == "stream" else await answer

    return asyncio.run(ask())


@pytest.fixture(params=[ask_sync, ask_async], ids=["sync", "async"])
def ask(request):
    return request.param


def test_an_answer_is_typed_and_fields_it_does_not_know_are_passed_over(ask):
    with served(said(200, {**ANSWER, "a_later_versions_field": 1})) as server:
        answer = ask(server.url, "recommend", "ada", [client.Behaviour("50", 1)], api_key="genrec_1")
    assert (answer.items[0].title, answer.items[0].score, answer.stages[0].backend) == ("Seven", 0.5, "torch")
    [heard] = server.heard
    assert (heard.method, heard.path, heard.headers["authorization"]) == ("POST", "/v1/recommend", "Bearer genrec_1")
    assert json.loads(heard.body) == {
        "user_id": "ada",
        "behaviours": [{"item_id": "50", "timestamp": 1, "action": "view", "value": None}],
    }


@pytest.mark.parametrize("broken", [CUT, CUT_IN_THE_BODY, refused(503), refused(429)], ids=["cut", "cut in the body", "503", "429"])
def test_what_may_pass_is_asked_again(ask, broken):
    with served(broken, broken, said(200, ANSWER)) as server:
        assert ask(server.url, "recommend", "ada").model_version == "tiny/1"
    assert len(server.heard) == 3


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 500])
def test_what_would_be_the_same_next_time_is_not(ask, status):
    with served(refused(status)) as server, pytest.raises(client.Refused) as raised:
        ask(server.url, "recommend", "ada")
    assert (raised.value.status, len(server.heard)) == (status, 1)


def test_a_refusal_carries_the_field_the_value_and_the_cure(ask):
    wrong = {"field": "k", "problem": "5000 is more than the 1000 this service takes; ask for fewer items", "value": "5000"}
    problem = {"title": "Invalid request", "status": 422, "detail": "k: ...", "instance": "/v1/recommend", "errors": [wrong]}
    with served(said(422, problem)) as server, pytest.raises(client.Refused, match="422 Invalid request") as raised:
        ask(server.url, "recommend", "ada")
    assert (raised.value.field, raised.value.value) == ("k", "5000")
    assert raised.value.cure.endswith("ask for fewer items")


@pytest.mark.parametrize("body", [b"<html>bad gateway</html>", b'"text"', b"[1]", b'{"title": 1}', b""])
def test_an_error_page_of_a_proxy_is_a_refusal_too(ask, body):
    with served(said(502, body)) as server, pytest.raises(client.Refused) as raised:
        ask(server.url, "recommend", "ada")
    assert (raised.value.status, raised.value.wrong) == (502, ())


def test_it_waits_for_as_long_as_it_is_told_to(ask):
    with served(refused(503, retry_after=1), said(200, ANSWER)) as server:
        ask(server.url, "recommend", "ada")
    first, second = server.heard
    assert second.at - first.at >= 1.0


def test_a_wait_past_the_deadline_is_not_begun(ask):
    """One that waits all the same runs into the test's own limit."""
    with served(refused(503, retry_after=36_000)) as server, pytest.raises(client.Refused):
        ask(server.url, "recommend", "ada")
    assert len(server.heard) == 1


def test_a_silent_service_costs_no_more_than_the_deadline(ask):
    """Each try takes its 0.1 s at least, so that there is time for 20."""
    patient = client.Retries(tries=1000, deadline_s=2.0, try_s=0.1, base_s=0.001)
    with served(SILENT) as server, pytest.raises(httpx.TimeoutException):
        ask(server.url, "recommend", "ada", retries=patient)
    assert 2 <= len(server.heard) <= 21


def test_nobody_there_is_told_once_the_tries_are_over(ask):
    with served(CUT) as server:
        url = server.url
    with pytest.raises(httpx.ConnectError):
        ask(url, "recommend", "ada")


def test_events_carry_the_same_key_each_time_they_are_sent_and_another_for_each_call(ask):
    events = [client.Event("ada", "50")]
    with served(CUT, refused(503), said(201, STORED)) as server:
        assert ask(server.url, "send_events", events).stored == 1
        ask(server.url, "send_events", events)
    first, *again, other = [heard.headers["idempotency-key"] for heard in server.heard]
    assert again == [first, first]
    assert other != first


def test_user_ids_with_slashes_and_spaces_stay_one_part_of_the_path(ask):
    with served(said(200, {"user_id": "a/b c?", "tenant": "default", "events": 0, "cached_answers": 0, "everywhere": True})) as server:
        ask(server.url, "erase", "a/b c?")
    assert server.heard[0].path == "/v1/users/a%2Fb%20c%3F/history"


def lines(*events):
    return b"".join(json.dumps({"type": kind, "data": data}).encode() + b"\n" for kind, data in events)


def test_a_stream_is_asked_again_until_it_begins_and_ends_with_the_answer(ask):
    events = lines(("stage", ANSWER["stages"][0]), ("item", ANSWER["items"][0]), ("answer", ANSWER))
    with served(refused(503), CUT, said(200, events)) as server:
        parts = ask(server.url, "stream", "ada")
    assert [type(part).__name__ for part in parts] == ["Stage", "Item", "Answer"]
    assert [heard.headers["accept"] for heard in server.heard] == ["application/x-ndjson"] * 3


def test_an_error_within_a_stream_is_raised(ask):
    problem = {"title": "Not available now", "status": 503, "detail": "gone", "instance": "/v1/recommend", "errors": []}
    with (
        served(said(200, lines(("stage", ANSWER["stages"][0]), ("error", problem)))) as server,
        pytest.raises(client.Refused, match="gone"),
    ):
        ask(server.url, "stream", "ada")
    assert len(server.heard) == 1


def test_many_callers_of_a_broken_service_retry_no_more_than_the_budget_has():
    budget = client.RetryBudget(share=0.1, reserve=5)
    with served(refused(503)) as server, client.Client(server.url, retries=QUICK, budget=budget) as genrec:
        for _ in range(20):
            with pytest.raises(client.Refused):
                genrec.recommend("ada")
    assert 20 + 5 <= len(server.heard) <= 20 + 5 + 2


@given(
    tried=st.integers(1, 5),
    left_s=st.floats(0, 20),
    draw=st.floats(0, 1),
    status=st.sampled_from([None, 400, 404, 422, 429, 500, 503]),
    retry_after_s=st.floats(0, 20),
)
def test_the_policy(tried, left_s, draw, status, retry_after_s):
    asked = []
    failure = client.Failure(status, retry_after_s)
    policy = client.Retries()
    pause = client.pause_s(policy, failure, tried=tried, left_s=left_s, granted=lambda: not asked.append(1), draw=draw)
    if pause is None:
        jitter = draw * min(policy.longest_s, policy.base_s * 2**tried)
        assert status not in (None, 429, 503) or tried >= policy.tries or retry_after_s + jitter >= left_s
        assert not asked  # a retry that is not sent costs nothing
    else:
        assert retry_after_s <= pause < left_s
        assert pause - retry_after_s <= policy.longest_s
        assert (status in (None, 429, 503), len(asked)) == (True, 1)
