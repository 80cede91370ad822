"""A front door besides HTTP: the same messages as a ZeroMQ ROUTER socket takes them, answered by the gateways.

    connection ──► bytes ──► frames ──► key ──► queue, callers in turn ──► a gateway's edge and routes ──► connection
                   503       422        401     503 at once where it is full   401, 403, 413, 422, 429, 503

A client may have any number of requests under way; answers come as they are ready and carry the request's id. A message that the door does
not understand is answered with a problem. When a client has left, its waiting requests are dropped, and those that run are computed for
nothing.
"""

import asyncio
import itertools
import json
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from time import monotonic

from starlette.exceptions import HTTPException

from cluster.config import ZeroMQSettings
from cluster.errors import BackendFailed, ConfigError, InvalidRequest
from cluster.metrics import BY_DOOR, HTTP_REQUESTS, REFUSALS, SILENT, Meter
from cluster.traffic.latency import LatencyRecorder
from cluster.traffic.turns import Turns
from deployments.http import problems
from deployments.http.edge import OTHER, urgency
from deployments.http.exchange import HttpRequest, HttpResponse
from deployments.zeromq.frames import STATISTICS, Envelope, opened, understood
from deployments.zeromq.known_keys import Exchange, KnownKeys
from deployments.zeromq.listening import listen
from deployments.zeromq.zmtp import Broken, ByteBudget, Heard, Peer

DRAIN_S, LINGER_S = 15.0, 1.0
ENVELOPE_BYTES = 2**16
"""How many bytes a message may have beyond the largest body; a client that sends more loses its connection."""
MOST_CONNECTIONS = 1024
"""Beyond MOST_CONNECTIONS, a new connection takes the place of an idle one: a ZeroMQ client connects anew when it has a request."""
READ_ONLY = ("/v1/recommend", "/v1/recommend:batch", "/v1/rank")
"""What is asked of another gateway where one dies, and counted by its route where none answers."""
logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True)
class DoorStatistics:
    """`in_flight`: requests under way, this one included; `held_bytes`: of requests that are read, wait or are under way, except frames of
    256 bytes or less, and of answers that are unread; `served`: answered by a gateway, by HTTP status; `refused`: by the door itself;
    `failed`: by none, as a gateway died, raised or took too long. Latencies include the wait.
    """

    queued: int
    in_flight: int
    held_bytes: int
    served: dict[int, int]
    refused: dict[int, int]
    failed: dict[int, int]
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    throughput_per_s: float | None


@dataclass(eq=False, slots=True)
class Client:
    """A connection. `heard`: when it came, or sent its last request with a known key; `pending`: its unanswered requests."""

    peer: Peer
    listener: asyncio.Task[None]
    heard: float
    pending: int = 0

    @property
    def idle(self) -> bool:
        """Whether the connection may be cut without losing a request; its client may still be reading an answer. Until a known key has
        come, a message on its way does not count.
        """
        return not self.pending and (self.peer.silent or not self.peer.known)

    def worth(self) -> tuple[bool, bool, float]:
        """How late the connection is cut among those that are idle."""
        return self.peer.known, self.peer.unread > 0, self.heard


@dataclass(slots=True, order=True)
class Waiting:
    """A request that waits. `held`: its bytes of the budget, given back when it is answered, as held by `caller`. `timer`: ends its wait;
    None where it has not waited.
    """

    urgency: int
    number: int
    arrived: float = field(compare=False)
    client: Client = field(compare=False)
    envelope: Envelope = field(compare=False)
    asked: HttpRequest = field(compare=False)
    caller: bytes = field(compare=False)
    held: int = field(compare=False)
    timer: asyncio.TimerHandle | None = field(default=None, compare=False)


class FrontDoor:
    """`exchange(request, within_s)` has a gateway answer a request, or raises BackendError; `check_key` likewise, and answers 204 where the
    request's key is known. Between `open` and `close` the door answers by itself; `meter` is told what it refuses, and what no
    gateway answered.
    """

    def __init__(
        self, settings: ZeroMQSettings, exchange: Exchange, check_key: Exchange, *, max_body_bytes: int, meter: Meter = SILENT
    ) -> None:
        self._settings, self._exchange, self._meter = settings, exchange, meter
        self._keys = KnownKeys(check_key, settings.timeout_s)
        self._most_bytes = max_body_bytes + ENVELOPE_BYTES
        self._budget = ByteBudget(settings.max_bytes)
        self._queue: Turns[Waiting] = Turns()
        self._numbers = itertools.count()
        self._closing = False
        self._clients: set[Client] = set()
        self._running: set[asyncio.Task[None]] = set()
        self._served: Counter[int] = Counter()
        self._refused: Counter[int] = Counter()
        self._failed: Counter[int] = Counter()
        self._latency = LatencyRecorder(monotonic())

    async def open(self) -> None:
        """Begin to listen. Raises ConfigError where that is not possible at the address."""
        self._closing = False
        self._server = await listen(self._settings.address, self._serve)

    async def close(self, within_s: float = DRAIN_S) -> None:
        """Stop listening, and answer the requests that were taken, with 503 those that take longer than `within_s`, and those that come
        meanwhile.
        """
        self._server.close()
        self._closing = True
        deadline = monotonic() + within_s
        while self._running and (left_s := deadline - monotonic()) > 0:
            await asyncio.wait(self._running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        late, self._queue = self._queue, Turns()
        for task in self._running:
            task.cancel()
        while late:
            self._refuse_waiting(late.take(), _closed())
        await asyncio.gather(*self._running, return_exceptions=True)
        self._keys.close()
        for client in self._clients:
            client.listener.cancel()
        await asyncio.gather(*(client.listener for client in self._clients), return_exceptions=True)
        await asyncio.gather(*(client.peer.close(LINGER_S) for client in self._clients))

    def check_health(self) -> None:
        """Raises ConfigError where the door no longer listens."""
        if not self._server.is_serving():
            raise ConfigError(f"zeromq does not listen at {self._settings.address} any more; the replica is to be replaced")

    @property
    def connections(self) -> int:
        return len(self._clients)

    def statistics(self) -> DoorStatistics:
        figures = self._latency.summary(monotonic()).as_json()
        served, refused, failed = dict(self._served), dict(self._refused), dict(self._failed)
        return DoorStatistics(len(self._queue), len(self._running), self._budget.held, served, refused, failed, **figures)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection, until it ends."""
        peer = Peer(reader, writer, self._budget, self._most_bytes)
        if self._closing or (len(self._clients) >= MOST_CONNECTIONS and not self._cut_an_idle_one()):
            return await peer.close()
        task = asyncio.current_task()
        assert task is not None
        client = Client(peer, task, monotonic())
        self._clients.add(client)
        try:
            await peer.greet()
            while True:
                await self._hear(client, await peer.message())
        except asyncio.CancelledError:
            return None  # by `close`, which answers what was taken and ends the connection
        except (Broken, EOFError, OSError) as error:  # a TimeoutError is an OSError
            logger.debug("a ZeroMQ connection ends: %s", error)
        except Exception:
            logger.exception("a ZeroMQ connection ends by a fault of this door")
        self._clients.discard(client)
        return await peer.close()

    def _cut_an_idle_one(self) -> bool:
        """Cut the idle connection that has been silent for longest, first among those that never showed a known key, last among those that
        are reading an answer; False where none is idle.
        """
        idle = min((one for one in self._clients if one.idle), key=Client.worth, default=None)
        if idle:
            self._clients.discard(idle)
            idle.peer.cut()
        return idle is not None

    async def _hear(self, client: Client, heard: Heard) -> None:
        arrived, (envelope, rest) = monotonic(), opened(heard.frames)
        target = ""
        try:
            self._check_open()
            self._check_room(client.peer, heard)
            envelope.require_id()
            asked = understood(rest)
            target = asked.target
            caller = await self._keys.caller(asked.headers) or b"%d" % id(client)
            self._check_open()
            client.peer.caller, client.heard = caller, arrived  # the check of the key takes of the request's time
            self._receive(caller, client, envelope, asked, heard)
        except asyncio.CancelledError:
            self._refuse(client.peer, envelope, _closed())
            raise
        except Exception as error:  # noqa: BLE001 - every message is answered, and the next one heard
            self._budget.give(heard.held, heard.caller)
            self._refuse(client.peer, envelope, error, target)

    def _check_open(self) -> None:
        """Raises HTTPException (503) where the door closes."""
        if self._closing:
            raise _closed()

    def _check_room(self, peer: Peer, heard: Heard) -> None:
        """Raises HTTPException (503) where a request found no room. Where unread answers take up too much, another client's make
        room for it to ask again.
        """
        if heard.whole:
            return
        others = [one for one in self._unread() if one is not peer]
        if others and self._budget.takes_no_more_unread:
            others[0].cut()
        raise self._no_room()

    def _no_room(self) -> HTTPException:
        held = f"the requests at this door hold {self._budget.held} of {self._budget.most} bytes"
        return problems.overloaded(f"{held}, and those of one caller no more than are free", wait_s=1)

    def _receive(self, caller: bytes, client: Client, envelope: Envelope, asked: HttpRequest, heard: Heard) -> None:
        """Start the request, or put it into the queue. Raises HTTPException (503) where the queue is full, or the caller holds too much."""
        if caller != heard.caller and not self._budget.pass_on(heard, caller):
            raise self._no_room()
        headers = {name.encode(): value.encode() for name, value in asked.headers.items()}
        waiting = Waiting(urgency(headers, asked.target), next(self._numbers), client.heard, client, envelope, asked, caller, heard.held)
        if len(self._running) < self._settings.max_concurrent:
            self._start(waiting)
        else:
            self._make_room(caller)
            self._queue.put(caller, waiting)
            waiting.timer = asyncio.get_running_loop().call_later(self._left_s(waiting), self._expire, waiting)
        client.pending += 1

    def _make_room(self, caller: bytes) -> None:
        """One that waits gives way where its caller has most of all, and more than this one will have. Raises HTTPException (503)."""
        if len(self._queue) < self._settings.max_queue:
            return
        detail = f"{len(self._running)} requests are under way and {len(self._queue)} wait at this door; ask again later"
        full, last = problems.overloaded(detail, wait_s=1), self._queue.give_way(caller)
        if last is None:
            raise full
        self._refuse_waiting(last, full)

    def _expire(self, waiting: Waiting) -> None:
        self._queue.remove(waiting.caller, waiting)
        self._refuse_waiting(waiting, self._too_late())

    def _start(self, waiting: Waiting) -> None:
        if waiting.timer is not None:
            waiting.timer.cancel()
        task = asyncio.create_task(self._answer(waiting))
        self._running.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        while self._queue and len(self._running) < self._settings.max_concurrent:
            waiting = self._queue.take()
            if waiting.client.peer.gone:
                self._let_go(waiting)
            else:
                self._start(waiting)

    async def _answer(self, waiting: Waiting) -> None:
        try:
            answered = await self._asked(waiting)
        except asyncio.CancelledError:
            self._refuse_waiting(waiting, _closed())
        except Exception as error:  # noqa: BLE001 - the client gets every error as an answer
            self._refuse_waiting(waiting, error)
        else:
            self._served[answered.status] += 1
            now = monotonic()
            self._latency.record((now - waiting.arrived) * 1e3, now)
            self._let_go(waiting)
            self._send(waiting.client.peer, waiting.envelope, answered)

    async def _asked(self, waiting: Waiting) -> HttpResponse:
        left_s = self._left_s(waiting)
        if left_s <= 0:
            raise self._too_late()
        if waiting.asked.method == STATISTICS:
            return await self._told(waiting.asked.headers, left_s)
        return await self._exchange(waiting.asked, left_s)

    def _left_s(self, waiting: Waiting) -> float:
        return waiting.arrived + self._settings.timeout_s - monotonic()

    def _too_late(self) -> HTTPException:
        return problems.overloaded(f"the request has waited at this door for {self._settings.timeout_s:g} s", wait_s=1)

    async def _told(self, headers: Mapping[str, str], left_s: float) -> HttpResponse:
        """The door's statistics, for callers that a gateway lets see its own: the gateway knows the current keys."""
        gateways = await self._exchange(HttpRequest("GET", "/v1/gateway", headers), left_s)
        body = json.dumps(asdict(self.statistics())).encode()
        return gateways if gateways.status != 200 else HttpResponse(200, {"content-type": "application/json"}, body)

    def _refuse_waiting(self, waiting: Waiting, error: Exception) -> None:
        self._let_go(waiting)
        self._refuse(waiting.client.peer, waiting.envelope, error, waiting.asked.target)

    def _let_go(self, waiting: Waiting) -> None:
        """Give back what a request that has ended, or is dropped, has held."""
        if waiting.timer is not None:
            waiting.timer.cancel()
        self._budget.give(waiting.held, waiting.caller)
        waiting.client.pending -= 1

    def _refuse(self, peer: Peer, envelope: Envelope, error: Exception, target: str = "") -> None:
        """Answer with a problem. An error that is no refusal of the door's counts as a failed answer, unless a gateway raised it, which has
        counted it.
        """
        problem = problems.problem_of("zeromq", error)
        if isinstance(error, HTTPException | InvalidRequest):
            self._refused[problem.status] += 1
            self._meter.add(REFUSALS, route=BY_DOOR, status=str(problem.status))
        else:
            self._failed[problem.status] += 1
            if not isinstance(error, BackendFailed):
                path = target.partition("?")[0]
                self._meter.add(HTTP_REQUESTS, route=path if path in READ_ONLY else OTHER, status=str(problem.status))
        headers = {name.lower(): value for name, value in problems.headers_of(error).items()}
        said = {"content-type": problems.MEDIA_TYPE, **headers}
        self._send(peer, envelope, HttpResponse(problem.status, said, problem.model_dump_json().encode()))

    def _send(self, peer: Peer, envelope: Envelope, answered: HttpResponse) -> None:
        """Send an answer. Where unread ones take up too much, the connections end that have read nothing for longest, all but one."""
        peer.send(envelope.frames(answered))
        if self._budget.takes_no_more_unread:
            for one in self._unread()[:-1]:
                if self._budget.takes_no_more_unread:
                    one.cut()

    def _unread(self) -> list[Peer]:
        """The clients with unread answers, counted anew, first the one that has read nothing for longest."""
        return sorted((one.peer for one in self._clients if one.peer.count_unread()), key=lambda one: one.unread_since)


def _closed() -> HTTPException:
    return problems.overloaded("this door is being closed; ask again", wait_s=1)
