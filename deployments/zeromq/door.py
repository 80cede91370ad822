"""A front door besides HTTP: the same messages over a ZeroMQ ROUTER socket, answered by the gateways.

    socket ──► frames ──► queue, most urgent first ──► a gateway's edge and routes ──► socket
               422        503 at once where it is full  401, 403, 413, 422, 429, 503

A client may have any number of requests under way; answers come as they are ready and carry the request's id. What the door does not
understand is answered with a problem as everything else is. ZeroMQ does not tell when a client has left: its requests are computed, and
the answers dropped.
"""

import asyncio
import heapq
import itertools
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any

import zmq
import zmq.asyncio
from ray import serve
from starlette.exceptions import HTTPException

from cluster.config import ZeroMQSettings, parse
from cluster.engines.latency import LatencyRecorder
from cluster.errors import BackendError, ConfigError
from deployments.calls.remote import ask
from deployments.http import problems
from deployments.http.edge import urgency
from deployments.http.exchange import HttpRequest, HttpResponse
from deployments.zeromq.frames import STATISTICS, Envelope, opened, understood

Exchange = Callable[[HttpRequest, float], Awaitable[HttpResponse]]
BIND_WITHIN_S, BIND_INTERVAL_S = 30.0, 0.2
"""A replica that is replaced lets go of the address only when it has answered what was under way."""
DRAIN_S, LINGER_MS = 15.0, 1000
ENVELOPE_BYTES = 2**16
"""What a frame may have beyond the largest body; libzmq cuts the connection of a client that sends more."""
SAFE = ("/v1/recommend", "/v1/recommend:batch", "/v1/rank")
logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class DoorStatistics:
    """`in_flight`: this request among them; `served`: answered by a gateway, by HTTP status; `refused`: by the door
    itself. Latencies include the wait.
    """

    queued: int
    in_flight: int
    served: dict[int, int]
    refused: dict[int, int]
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    throughput_per_s: float | None


@dataclass(frozen=True, slots=True, order=True)
class Waiting:
    urgency: int
    number: int
    arrived: float = field(compare=False)
    envelope: Envelope = field(compare=False)
    asked: HttpRequest = field(compare=False)


class FrontDoor:
    """`exchange` is asked with the seconds it may take, and raises BackendError. `open` the door, and `close` it; meanwhile it answers by
    itself.
    """

    def __init__(self, settings: ZeroMQSettings, exchange: Exchange, *, max_body_bytes: int) -> None:
        self._settings, self._exchange, self._max_body_bytes = settings, exchange, max_body_bytes
        self._queue: list[Waiting] = []
        self._numbers = itertools.count()
        self._running: set[asyncio.Task[None]] = set()
        self._served: Counter[int] = Counter()
        self._refused: Counter[int] = Counter()
        self._latency = LatencyRecorder(monotonic())

    async def open(self) -> None:
        """Raises ConfigError where the address cannot be had."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self._max_body_bytes + ENVELOPE_BYTES)
        try:
            await self._bind()
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._listener = asyncio.create_task(self._listen())

    async def close(self, within_s: float = DRAIN_S) -> None:
        """Take nothing more; answer what was taken, with 503 where the time is not enough."""
        self._listener.cancel()
        await asyncio.wait([self._listener])
        deadline = monotonic() + within_s
        while self._running and (left_s := deadline - monotonic()) > 0:
            await asyncio.wait(self._running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        late, self._queue = self._queue, []
        for task in self._running:
            task.cancel()
        for waiting in late:
            await self._refuse(waiting.envelope, _closed())
        await asyncio.gather(*self._running, return_exceptions=True)
        self._context.destroy(linger=LINGER_MS)

    def check_health(self) -> None:
        """Raises what ended the listening."""
        if self._listener.done():
            self._listener.result()

    def statistics(self) -> DoorStatistics:
        figures = self._latency.summary(monotonic()).as_json()
        return DoorStatistics(len(self._queue), len(self._running), dict(self._served), dict(self._refused), **figures)

    async def _bind(self) -> None:
        until = monotonic() + BIND_WITHIN_S
        while not self._bound(last_try=monotonic() > until):  # noqa: ASYNC110 - nothing signals that it is free
            await asyncio.sleep(BIND_INTERVAL_S)

    def _bound(self, *, last_try: bool) -> bool:
        try:
            self._socket.bind(self._settings.address)
        except zmq.ZMQError as error:
            if error.errno == zmq.EADDRINUSE and not last_try:
                return False
            cure = "give zeromq.address one of this node's, on a port that is free"
            raise ConfigError(f"zeromq cannot listen at {self._settings.address} ({error}); {cure}") from error
        return True

    async def _listen(self) -> None:
        while True:
            envelope, rest = opened(await self._socket.recv_multipart())
            try:
                self._receive(envelope, understood(rest))
            except Exception as error:  # noqa: BLE001 - every message is answered, and the next one heard
                await self._refuse(envelope, error)

    def _receive(self, envelope: Envelope, asked: HttpRequest) -> None:
        """Raises what refuses the request."""
        headers = {name.encode(): value.encode() for name, value in asked.headers.items()}
        waiting = Waiting(urgency(headers, asked.target), next(self._numbers), monotonic(), envelope, asked)
        if len(self._running) < self._settings.max_concurrent:
            self._start(waiting)
        elif len(self._queue) < self._settings.max_queue:
            heapq.heappush(self._queue, waiting)
        else:
            detail = f"{len(self._running)} requests are under way and {len(self._queue)} wait at this door; ask again later"
            raise problems.overloaded(detail, wait_s=1)

    def _start(self, waiting: Waiting) -> None:
        task = asyncio.create_task(self._answer(waiting))
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._queue and len(self._running) < self._settings.max_concurrent:
            self._start(heapq.heappop(self._queue))

    async def _answer(self, waiting: Waiting) -> None:
        try:
            answered = await self._asked(waiting)
        except asyncio.CancelledError:
            await self._refuse(waiting.envelope, _closed())
        except Exception as error:  # noqa: BLE001 - the client gets every error as an answer
            await self._refuse(waiting.envelope, error)
        else:
            self._served[answered.status] += 1
            now = monotonic()
            self._latency.record((now - waiting.arrived) * 1e3, now)
            await self._send(waiting.envelope, answered)

    async def _asked(self, waiting: Waiting) -> HttpResponse:
        left_s = waiting.arrived + self._settings.timeout_s - monotonic()
        if left_s <= 0:
            raise problems.overloaded(f"the request has waited at this door for {self._settings.timeout_s:g} s", wait_s=1)
        if waiting.asked.method == STATISTICS:
            return await self._told(waiting.asked.headers, left_s)
        return await self._exchange(waiting.asked, left_s)

    async def _told(self, headers: Mapping[str, str], left_s: float) -> HttpResponse:
        """The door's statistics, for callers that a gateway lets see its own: the gateway knows the current keys."""
        gateways = await self._exchange(HttpRequest("GET", "/v1/gateway", headers), left_s)
        body = json.dumps(asdict(self.statistics())).encode()
        return gateways if gateways.status != 200 else HttpResponse(200, {"content-type": "application/json"}, body)

    async def _refuse(self, envelope: Envelope, error: Exception) -> None:
        problem = problems.problem_of("zeromq", error)
        self._refused[problem.status] += 1
        retry = {"retry-after": "2"} if isinstance(error, BackendError) else {}
        headers = (error.headers or {}) if isinstance(error, HTTPException) else retry
        said = {"content-type": problems.MEDIA_TYPE, **{name.lower(): value for name, value in headers.items()}}
        await self._send(envelope, HttpResponse(problem.status, said, problem.model_dump_json().encode()))

    async def _send(self, envelope: Envelope, answered: HttpResponse) -> None:
        """A ROUTER drops what is for a client that has left, or reads nothing."""
        await self._socket.send_multipart(envelope.frames(answered))


def _closed() -> HTTPException:
    return problems.overloaded("this door is being closed; ask again", wait_s=1)


class ZeroMQDeployment:
    """The front door as a Serve deployment, which asks the gateways of its application."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._door: FrontDoor | None = None
        tree = parse(settings)
        if tree.zeromq is None:
            raise ConfigError("the deployment zeromq needs `zeromq` in the application's `args`")
        self._gateway = serve.get_deployment_handle("gateway", serve.get_replica_context().app_name)
        door = FrontDoor(tree.zeromq, self._exchange, max_body_bytes=tree.gateway.max_body_bytes)
        await door.open()
        self._door = door

    async def check_health(self) -> None:
        if self._door:
            self._door.check_health()

    def __del__(self) -> Awaitable[None] | None:
        """Serve calls it when it stops a replica, and awaits what it returns; afterwards the interpreter calls it once more."""
        door, self._door = self._door, None
        return door.close() if door else None

    async def _exchange(self, asked: HttpRequest, within_s: float) -> HttpResponse:
        """Asked again of another gateway only where one died over what only reads."""
        safe = asked.method == "GET" or asked.target in SAFE
        answered: HttpResponse = await ask(self._gateway, "exchange", asked, within_s=within_s, tries=3 if safe else 1)
        return answered
