"""The proxy to a server of the Open Inference Protocol v2, when the server is away, slow, or says something else."""

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Request, Response
from msgspec.structs import replace
from starlette.responses import StreamingResponse

from cluster.errors import BackendFailed, BackendUnavailable, DeadlineExceeded
from cluster.values import EncodeRequest
from tests.bundles import make_bundle, random_sequence
from tests.examples import make_importable
from tests.fakes.clock import Clock

make_importable()

from genrec_kserve import KServeEncoder, client, wire  # noqa: E402
from genrec_kserve import encoder as encoders  # noqa: E402

from tests.v2_server import running_app  # noqa: E402

INPUTS = [("items", "INT64", 2), ("times", "INT32", 2), ("next_times", "INT32", 2), ("lengths", "INT64", 1)]
DESCRIBED = {
    "inputs": [{"name": name, "datatype": datatype, "shape": [-1] * dims} for name, datatype, dims in INPUTS],
    "outputs": [{"name": "state", "datatype": "FP32", "shape": [-1, 16]}],
}


class Server:
    """Whose states are all alike, and that misbehaves as it is told. `asked` counts its probes."""

    def __init__(self):
        self.ready, self.metadata, self.answer, self.asked = 200, DESCRIBED, self.states, 0
        self.app = FastAPI()
        self.app.get("/v2/health/ready")(self.is_ready)
        self.app.get("/v2/models/{model}/ready")(lambda model: Response())
        self.app.get("/v2/models/{model}")(lambda model: self.metadata)
        self.app.post("/v2/models/{model}/infer")(self.infer)

    def is_ready(self):
        self.asked += 1
        return Response(status_code=self.ready)

    async def infer(self, model: str, request: Request):
        _, inputs = wire.tensors(await request.body(), request.headers, "inputs")
        return self.answer(len(inputs["items"]))

    def states(self, users, dim=16, fill=0.25, name="state"):
        body, headers = wire.message({}, "outputs", {name: np.full((users, dim), fill, np.float32)}, binary=False)
        return Response(body, headers=headers)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("kserve") / "tiny")


@pytest.fixture(scope="module")
def running():
    server = Server()
    with running_app(server.app) as url:
        server.url = url
        yield server


@pytest.fixture
def server(running):
    running.ready, running.metadata, running.answer, running.asked = 200, DESCRIBED, running.states, 0
    return running


@pytest.fixture
def encoder(server, bundle):
    yield from loaded_encoder(server, bundle)


def loaded_encoder(server, bundle, timeout_s: float = 60.0) -> Iterator[KServeEncoder]:
    loaded = KServeEncoder(server.url, timeout_s=timeout_s, connect_timeout_s=60.0)
    loaded.load(bundle)
    yield loaded
    loaded.close()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What the client and the encoder go by."""
    clock = Clock()
    for module in (client, encoders):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock))
    return clock


def asked(**rest):
    return EncodeRequest(random_sequence(5), 3, **rest)


def test_asks_the_server_once_in_a_while_and_not_at_every_probe(server, bundle, clock):
    encoder = KServeEncoder(server.url, probe_every_s=0.2, connect_timeout_s=60.0)
    assert all(encoder.get_availability(bundle).ok for _ in range(5))
    assert server.asked == 1
    server.ready = 503
    clock.advance(0.25)
    assert encoder.get_availability(bundle).reason == f"the server is not ready: {server.url}/v2/health/ready answered 503"


def fail_a_call(server, encoder):
    server.answer = lambda users: Response(status_code=500)
    with pytest.raises(BackendFailed):
        encoder.infer(asked())


def test_a_call_that_fails_while_a_probe_looks_at_what_was_said_breaks_no_probe(server, encoder, bundle, monkeypatch):
    failing = threading.Event()

    def now():
        if not failing.is_set():
            failing.set()
            fail_a_call(server, encoder)
        return time.monotonic()

    monkeypatch.setattr(encoders, "time", SimpleNamespace(monotonic=now))
    assert encoder.get_availability(bundle).ok
    assert failing.is_set()


def test_a_probe_that_was_under_way_when_a_call_failed_is_not_repeated(server, bundle, monkeypatch):
    with contextmanager(loaded_encoder)(server, bundle) as encoder:
        fail_a_call(server, encoder)
        described = encoders.mismatch
        monkeypatch.setattr(encoders, "mismatch", lambda *given: (fail_a_call(server, encoder), described(*given))[1])
        assert encoder.get_availability(bundle).ok, "what the server said before the call"
        server.ready = 503
        assert not encoder.get_availability(bundle).ok


@pytest.mark.parametrize(
    ("side", "change", "reason"),
    [
        ("inputs", {"name": "tokens"}, "the served model has no input 'items'; serve tiny/1's graph onnx/encode.fp32.onnx"),
        ("inputs", {"datatype": "INT32"}, r"input 'items' is INT32 \[-1, -1\]; INT64 of 2 dimensions is expected"),
        ("outputs", {"shape": [-1, 64]}, "states have 64 numbers, those of tiny/1 16: it is another model"),
    ],
)
def test_a_served_model_of_other_tensors_is_not_asked(side, change, reason, server, bundle):
    first, *rest = DESCRIBED[side]
    server.metadata = {**DESCRIBED, side: [{**first, **change}, *rest]}
    assert re.search(reason, KServeEncoder(server.url).get_availability(bundle).reason)
    with pytest.raises(BackendUnavailable, match=reason):
        KServeEncoder(server.url).load(bundle)


def test_a_server_that_does_not_describe_its_tensors_is_asked(server, bundle):
    server.metadata = {"name": "tiny-1"}
    assert KServeEncoder(server.url).get_availability(bundle).ok


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda states, users: Response("out of memory", status_code=500), "answered 500: out of memory"),
        (lambda states, users: states(users, dim=8), r"gave state the shape \(1, 8\) for model tiny-1; \(1, 16\) is expected"),
        (lambda states, users: states(users + 1), r"the shape \(2, 16\)"),
        (lambda states, users: states(users, name="vector"), "the shape None"),
        (lambda states, users: states(users, fill=np.nan), "not finite"),
        (lambda states, users: Response("<html>", media_type="text/html"), "no answer of the protocol"),
        (lambda states, users: Response('{"outputs": [{"name": "state"}]}'), "no answer of the protocol .KeyError: 'datatype'"),
    ],
    ids=["500", "another width", "another batch", "another name", "NaN", "HTML", "no tensor"],
)
def test_a_wrong_answer_fails_the_call_and_the_next_is_answered(answer, reason, server, encoder):
    server.answer = lambda users: answer(server.states, users)
    with pytest.raises(BackendFailed, match=reason):
        encoder.infer(asked())
    server.answer = server.states
    assert len(encoder.infer(asked()).items) == 3


def slow(server, clock: Clock, seconds: float):
    """It answers in 20 pieces, and takes as long for each by the clock."""

    def trickles():
        for _ in range(20):
            clock.advance(seconds / 20)
            yield b" "

    server.answer = lambda users: StreamingResponse(trickles())


def test_a_server_that_is_slow_is_given_up_also_where_it_sends_a_little_at_a_time(server, encoder, clock):
    slow(server, clock, 600)
    with pytest.raises(BackendFailed, match=r"gave no answer within 60 s \(timeout_s\)"):
        encoder.infer(asked())


def test_a_server_that_says_nothing_is_given_up(server, bundle):
    over = threading.Event()

    def silent():
        over.wait()
        yield b""

    server.answer = lambda users: StreamingResponse(silent())
    try:
        with (
            contextmanager(loaded_encoder)(server, bundle, timeout_s=0.2) as encoder,
            pytest.raises(BackendFailed, match=r"gave no answer within 0\.2 s \(timeout_s\)"),
        ):
            encoder.infer(asked())
    finally:
        over.set()


def test_a_deadline_that_is_sooner_than_the_timeout_is_kept(server, encoder, clock):
    slow(server, clock, 600)
    with pytest.raises(DeadlineExceeded, match=r"had not answered at the deadline, 20\.000 s after it was asked"):
        encoder.infer(asked(deadline=clock.now + 20))
    with pytest.raises(DeadlineExceeded, match="was not asked"):
        encoder.infer(asked(deadline=clock.now - 1))


def test_a_batch_is_late_only_when_all_of_it_is(encoder):
    late = asked(deadline=time.monotonic() - 1)
    assert len(encoder.batch_infer([late, replace(late, deadline=None)])) == 2


def test_a_server_that_went_away_fails_the_call_and_the_next_probe_says_so(bundle):
    server = Server()
    with running_app(server.app) as url:
        encoder = KServeEncoder(url, timeout_s=60)
        encoder.load(bundle)
        assert len(encoder.infer(asked()).items) == 3
    with pytest.raises(BackendFailed, match=f"{url} cannot be asked: ConnectError"):
        encoder.infer(asked())
    assert f"{url} cannot be reached (ConnectError" in encoder.get_availability(bundle).reason
    encoder.close()


def test_tensors_travel_as_json_and_as_bytes():
    tensors = {"a": np.arange(6, dtype=np.int64).reshape(2, 3), "b": np.array([0.1, -1e30], np.float32), "c": np.empty((0, 4), np.int32)}
    for binary in (False, True):
        body, headers = wire.message({"id": "7"}, "inputs", tensors, binary=binary)
        head, found = wire.tensors(body, httpx.Headers(headers), "inputs")
        assert head["id"] == "7"
        for name, array in tensors.items():
            assert (found[name].dtype, found[name].tolist()) == (array.dtype, array.tolist())
