"""Callers that take their time or send what is broken, at Serve's own proxy: they hold no place of the gateway, and are answered."""

import gzip
import json
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
from resource import RLIMIT_NOFILE, getrlimit, setrlimit
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from cluster.bundle import Bundle
from tests.clusters import Application, SharedCluster, fixed
from tests.integration.conftest import PATIENT, behaviours
from tests.waiting import eventually, json_of, until_right

pytestmark = pytest.mark.cluster
CALLERS = 20
Opened = Callable[..., socket.socket]
IDLE = 1000
BODY = b'{"user_id": "u", "behaviours": []}'
WHOLE = b"content-length: %d\r\n\r\n" % len(BODY) + BODY


@pytest.fixture(scope="module")
def served(compiled_hstu: Bundle, default: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Application]:
    """A gateway that waits for a body for three seconds."""
    model_dir = tmp_path_factory.mktemp("slow") / "tiny"
    shutil.copytree(compiled_hstu.path.parent, model_dir)
    document = fixed({"encoder": 1, "generator": 0})
    args = document["applications"][0]["args"]
    args["encoder"]["order"] = ["onnxruntime"]
    args["gateway"].update({**PATIENT, "body_within_s": 3.0})
    with default.application(document, {"model_dir": str(model_dir)}) as application:
        yield application


@pytest.fixture
def opened(served: Application) -> Iterator[Opened]:
    """Opens a connection with the first lines of a request of these headers, and what follows them."""
    where = urlsplit(served.url)
    with ExitStack() as open_ones:

        def made(headers: bytes, rest: bytes = b"", path: str = "/v1/recommend") -> socket.socket:
            begun = f"POST {where.path}{path} HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n".encode()
            one = open_ones.enter_context(closing(socket.create_connection((where.hostname, where.port), timeout=300)))
            with suppress(ConnectionError):  # an answer that comes before all is sent
                one.sendall(begun + headers + rest)
            return one

        yield made


def answered(application: Application) -> int:
    """The status of a request that is sent with its body at once; 408 or 504 where a busy machine takes longer, and it is sent again."""
    request = {"user_id": "honest", "k": 5, "cache": "bypass", "behaviours": behaviours(1, 2, 3)}
    send = partial(httpx.post, f"{application.url}/v1/recommend", json=request, timeout=120)
    return until_right(lambda: send().status_code, lambda status: status not in (408, 504))


def rests(application: Application) -> bool:
    told = json_of(f"{application.url}/v1/gateway")
    return (told["running"], told["waiting"]) == (0, 0)


def test_headers_that_do_not_end_hold_no_place(served: Application, opened: Opened) -> None:
    for _ in range(CALLERS):
        opened(b"x-slow: a")
    assert answered(served) == 200
    eventually(lambda: rests(served))


@pytest.mark.parametrize(
    ("headers", "sent", "status"),
    [
        (b"content-length: 1000\r\n\r\n", BODY[:10], b"408"),
        (b"transfer-encoding: chunked\r\n\r\n", b"a\r\n" + BODY[:10] + b"\r\n", b"408"),
        (b"content-length: 2000000\r\n\r\n", BODY[:10], b"413"),
    ],
    ids=["too short", "without an end", "too long"],
)
def test_bodies_that_do_not_end_hold_no_place_and_are_answered(
    served: Application, opened: Opened, headers: bytes, sent: bytes, status: bytes
) -> None:
    slow = [opened(headers, sent) for _ in range(CALLERS)]
    assert answered(served) == 200
    assert [one.recv(12, socket.MSG_WAITALL) for one in slow] == [b"HTTP/1.1 " + status] * CALLERS
    eventually(lambda: rests(served))


def test_clients_that_leave_midway_hold_no_place(served: Application, opened: Opened) -> None:
    for _ in range(CALLERS):
        opened(b"content-length: %d\r\n\r\n" % len(BODY), BODY[:10]).close()
        opened(b"content-length: %d\r\n\r\n" % len(BODY), BODY).close()
    assert answered(served) == 200
    eventually(lambda: rests(served))


def test_a_thousand_idle_connections_shut_no_caller_out(served: Application) -> None:
    where, (soft, hard) = urlsplit(served.url), getrlimit(RLIMIT_NOFILE)
    with ExitStack() as idle:
        setrlimit(RLIMIT_NOFILE, (hard, hard))
        idle.callback(setrlimit, RLIMIT_NOFILE, (soft, hard))
        for _ in range(IDLE):
            idle.enter_context(closing(socket.create_connection((where.hostname, where.port), timeout=300)))
        assert answered(served) == 200


def test_callers_that_do_not_read_their_answers_hold_no_place(served: Application, opened: Opened) -> None:
    """A batch's answer is larger than the buffers of a connection, and a stream comes piece by piece. 408 or 504: as in `answered`."""
    one = {"user_id": "u", "behaviours": behaviours(1, 2, 3), "k": 100, "explain": True}
    batch = json.dumps({"requests": [one] * 256}).encode()

    def begun(*sent: Any) -> bytes:
        return until_right(lambda: opened(*sent).recv(12, socket.MSG_WAITALL)[-3:], lambda status: status not in (b"408", b"504"))

    told = {begun(b"content-length: %d\r\n\r\n" % len(batch), batch, "/v1/recommend:batch") for _ in range(3)}
    told |= {begun(b"accept: text/event-stream\r\n" + WHOLE) for _ in range(CALLERS)}
    assert told == {b"200"}
    assert answered(served) == 200
    eventually(lambda: rests(served))


def test_requests_that_are_sent_one_after_another_before_an_answer_are_answered_in_order(served: Application, opened: Opened) -> None:
    """408 or 504: as in `answered`."""
    where = urlsplit(served.url)
    again = b"POST %s/v1/recommend HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: 2\r\n\r\n[]" % where.path.encode()

    def statuses() -> list[bytes]:
        with opened(WHOLE + again).makefile("rb") as answers:
            return re.findall(rb"HTTP/1\.1 (\d+) ", answers.read())

    assert until_right(statuses, lambda told: not {b"408", b"504"} & set(told)) == [b"200", b"422"]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        (b"", b"[" * 100_000),
        (b"", b'{"behaviours": ' + b'{"item_id":' * 50_000),
        (b"", b'{"user_id": "u", "blocked": [' + b"1," * 499_999 + b"1]}"),
        (b"content-encoding: gzip\r\n", gzip.compress(b'{"user_id": "' + b"u" * 10_000_000 + b'"}')),
    ],
    ids=["deep lists", "deep objects", "half a million numbers", "gzip"],
)
def test_broken_bodies_are_refused_and_hold_no_place(served: Application, opened: Opened, headers: bytes, body: bytes) -> None:
    broken = [opened(headers + b"content-length: %d\r\n\r\n" % len(body), body) for _ in range(CALLERS)]
    assert answered(served) == 200
    assert {one.recv(12, socket.MSG_WAITALL) for one in broken} <= {b"HTTP/1.1 %d" % status for status in (400, 408, 413, 422)}
    eventually(lambda: rests(served))
