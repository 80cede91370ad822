"""Callers that take their time, at Serve's own proxy: they hold no place of the gateway, and those that send no body are answered."""

import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from functools import partial
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
BODY = b'{"user_id": "u", "behaviours": []}'


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
    begun = f"POST {where.path}/v1/recommend HTTP/1.1\r\nhost: {where.netloc}\r\ncontent-type: application/json\r\n".encode()
    with ExitStack() as open_ones:

        def made(headers: bytes, rest: bytes = b"") -> socket.socket:
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
