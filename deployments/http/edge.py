"""The checks before the routes.

    size ──► key ──► rate ──► room ──► body ──► turn ──► place ──► routes ──► tenant and cost, which the body names
    413      401     429      503      408      413      503                  403, 429, 503
                                       413, 503 503

A refusal costs microseconds. A request takes a place once its body is there, so that slow clients hold up no other; a process holds a
limited number of bytes of bodies. Large bodies that are slow to read take turns before they take a place, for a share of the time. An
admitted request has its Caller in `request.state.caller`, with the time of its arrival: waiting counts against its deadline. When the
client leaves, the request's place in the queue is freed and its work is cancelled.
"""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.config import ApiKeySettings, GatewaySettings
from cluster.metrics import ADMISSION_WAIT, REFUSALS, SILENT, Meter
from cluster.traffic import api_keys
from cluster.traffic.admission import Admission, Standing, Ticket
from cluster.traffic.rate_limits import Grant, RateLimiter
from deployments.http import api_pages, problems
from deployments.http.batches import Batches
from deployments.http.callers import ANONYMOUS, INTERACTIVE, Caller
from deployments.http.connection import SMALL, BodyBudget, Connection, Turns
from deployments.http.playground import PATHS

Answer = Callable[[Scope, Connection], Awaitable[None]]
IsSlow = Callable[[Scope, bytes], bool]
RouteOf = Callable[[Scope], str]
OPEN = frozenset({"/healthz", "/readyz", "/openapi.json"}) | PATHS | api_pages.PATHS
"""Paths that need no key and no place. Every other path is protected, whether there is a route or not."""
OPERATION = ("/v1/backends", "/v1/cache", "/v1/gateway", "/v1/models")
"""Where operators call. They need no place: their calls may be what ends an overload."""
OR_NONE = "; or leave the header out: a caller without a key may read and store events"
OTHER = "other"
"""The route, as metrics have it, of what has none."""
BATCHES = "/v1/recommend:batch"
BATCH = 6
"""Urgency of a batch without a Priority header."""
_HEADERS = frozenset({b"authorization", b"content-length", b"priority"})
_URGENCY = re.compile(rb"(?:^|,)[ \t]*u=([0-7])[ \t]*(?:[,;]|$)")


@dataclass(frozen=True, slots=True)
class EdgeStatistics:
    """`places`: requests that may run at a time now; `entries`: entries of batches that run or wait; `refused`: HTTP status -> requests
    since the start.
    """

    running: int
    waiting: int
    places: int
    entries: int
    refused: dict[int, int]


class Edge:
    """The protection of one gateway replica. `gateways`: gives the number of live gateways, which share the tenants' rate limits. `now`:
    gives the time in seconds since 1970, by which keys expire.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        gateways: Callable[[], int] = lambda: 1,
        clock: Callable[[], float] = time.monotonic,
        meter: Meter = SILENT,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.settings, self._meter = settings, meter
        self._gateways, self._clock, self._now = gateways, clock, now
        self._admission = Admission(settings.admission, _target_s(settings))
        self.batches = Batches(settings.admission, lambda: self._admission.places, lambda: self._turned_away(BATCHES, 503))
        self._rates = RateLimiter(settings.rate_limits)
        self._bodies, self._turns_to_read = BodyBudget(settings.max_held_bytes), Turns(settings.slow_bytes_per_s)
        self._undecided: dict[Ticket, asyncio.Future[None]] = {}  # the tickets that wait, and what wakes each
        self._refused: Counter[int] = Counter()
        self._reading: set[Connection] = set()

    def reconfigure(self, settings: GatewaySettings) -> None:
        """Take new settings. Running requests go on; waiting ones wait no longer than the new settings allow."""
        self.settings, self.batches.settings = settings, settings.admission
        self._rates.reconfigure(settings.rate_limits)
        self._bodies.most, self._turns_to_read.per_s = settings.max_held_bytes, settings.slow_bytes_per_s
        now = self._clock()
        self._tell(self._admission.reconfigure(settings.admission, _target_s(settings), now))
        if self._undecided:
            self._expire_at(now + settings.admission.max_wait_ms / 1e3)

    def statistics(self) -> EdgeStatistics:
        held = self._admission
        return EdgeStatistics(held.running, held.waiting, held.places, self.batches.held, dict(self._refused))

    async def serve(self, answer: Answer, scope: Scope, connection: Connection, is_slow: IsSlow, route_of: RouteOf) -> None:
        """Answer one HTTP request: with a refusal, or by `answer` once it has a place. `is_slow`: whether its body is slow to read; may
        raise the HTTPException that refuses it. `route_of`: the route under which a refusal is counted.
        """
        connection.headers = self._capacity_header
        try:
            with connection:
                headers = {name: value for name, value in scope["headers"] if name in _HEADERS}
                caller = self._caller(headers)
                connection.headers = lambda: (*self._capacity_header(), *caller.headers())
                operates, urgent = _operates(caller, scope), max(urgency(headers, scope["path"]), caller.most_urgent)
                if not operates and self._admission.full(self._clock(), urgent, caller.tenant):
                    raise self._overloaded(caller)
                await connection.read(self.settings, self._bodies)
                caller.arrived = self._clock()
                if len(connection.body) > SMALL and is_slow(scope, connection.body):
                    await self._turn_to_read(connection)
                if operates:
                    await self._admitted(answer, scope, connection, caller)
                else:
                    await self._with_a_place(answer, scope, connection, caller, urgent)
                if caller.refused:
                    self._turned_away(route_of(scope), caller.refused)
        except HTTPException as refusal:
            self._turned_away(route_of(scope), refusal.status_code)
            await problems.send(refusal, scope["path"], connection.send)
        finally:
            self._reading.discard(connection)
            self._bodies.held -= connection.held

    async def check_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application that answers 204 where the caller's key is known. This costs the tenant no request, and takes no place."""
        try:
            identify(dict(scope["headers"]), self.settings, self._now)
        except HTTPException as refusal:
            self._turned_away(OTHER, refusal.status_code)
            await problems.send(refusal, scope["path"], send)
        else:
            await Response(status_code=HTTPStatus.NO_CONTENT)(scope, receive, send)

    def connection(self, receive: Receive, send: Send) -> Connection:
        """A connection on this edge's clock."""
        return Connection(receive, send, self._clock)

    def _caller(self, headers: dict[bytes, bytes]) -> Caller:
        """The caller; the request is taken of its rate. Raises the HTTPException that refuses the request."""
        self._check_length(headers)
        caller = Caller(identify(headers, self.settings, self._now), self._take)
        if caller.tenant is not None:
            caller.pay(caller.tenant, 1)
        return caller

    async def _turn_to_read(self, connection: Connection) -> None:
        """Wait for the body's turn to be read. Raises HTTPException (503) where it would come too late."""
        size, within_s = len(connection.body), self.settings.admission.max_wait_ms / 1e3
        wait_s = self._turns_to_read.take(size, self._clock(), within_s)
        if not wait_s:
            return
        try:
            await asyncio.sleep(wait_s)
        except asyncio.CancelledError:  # the client left
            self._turns_to_read.give_back(size)
            raise

    async def _with_a_place(self, answer: Answer, scope: Scope, connection: Connection, caller: Caller, urgent: int) -> None:
        """Answer once the request has a place. Raises HTTPException (503) where it gets none in time."""
        ticket = self._arrive(caller, urgent)
        caller.leave_place = lambda: self._tell(self._admission.leave(ticket, self._clock(), _first_byte_s(scope, ticket, connection)))
        caller.computed = lambda size: self._computed(caller, connection, size)
        caller.keep = lambda size: self._keep(caller, connection, size)
        try:
            if ticket.standing is Standing.WAITING and await self._wait(ticket) is Standing.REFUSED:
                raise self._overloaded(caller)
            self._meter.observe(ADMISSION_WAIT, ticket.started - ticket.arrived)
            await self._admitted(answer, scope, connection, caller)
        finally:
            caller.leave_place()

    def _computed(self, caller: Caller, connection: Connection, size: int) -> None:
        """Leave the place: an answer that only waits for its reader needs none, unless such answers take up too much memory."""
        if self._bodies.keep(size):
            connection.held += size
            self._reading.add(connection)
            caller.leave_place()

    def _keep(self, caller: Caller, connection: Connection, size: int) -> None:
        """Hold the bytes of an answer until it is read. Raises HTTPException (503) where such answers take up too much memory."""
        if not self._bodies.keep(size):
            caller.refused = 503
            held = f"{self._bodies.most // 2} bytes there are for them"
            raise problems.overloaded(f"answers of batches and others that wait take up the {held}; ask again later, or for less", wait_s=1)
        connection.held += size

    async def _admitted(self, answer: Answer, scope: Scope, connection: Connection, caller: Caller) -> None:
        scope["state"] = {**scope.get("state", {}), "caller": caller}
        await answer(scope, connection)

    def _turned_away(self, route: str, status: int) -> None:
        self._refused[status] += 1
        self._meter.add(REFUSALS, route=route, status=str(status))

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:20]) > self.settings.max_body_bytes:
            raise problems.BodyTooLarge(self.settings.max_body_bytes)

    def _take(self, tenant: str, cost: int, paid: int) -> Grant | None:
        return self._rates.take(tenant, cost, self._clock(), self._gateways(), paid)

    def _arrive(self, caller: Caller, urgency: int) -> Ticket:
        ticket, displaced = self._admission.arrive(self._clock(), urgency, caller.tenant)
        if displaced is not None:
            self._tell([displaced])
        if ticket.standing is Standing.REFUSED:
            raise self._overloaded(caller)
        caller.belong = lambda tenant: self._admission.belong(ticket, tenant)
        return ticket

    async def _wait(self, ticket: Ticket) -> Standing:
        """Wait until the ticket is decided on; returns its standing then."""
        decided = self._undecided[ticket] = asyncio.get_running_loop().create_future()
        timer = self._expire_at(ticket.until)
        try:
            await decided
        finally:
            timer.cancel()
            del self._undecided[ticket]
        return ticket.standing

    def _expire_at(self, when: float) -> asyncio.TimerHandle:
        """At `when`, refuse the tickets that have waited long enough by `when`, not by the clock: a timer may fire a moment early."""
        delay_s = max(0.0, when - self._clock())
        return asyncio.get_running_loop().call_later(delay_s, lambda: self._tell(self._admission.expire(when)))

    def _tell(self, tickets: Iterable[Ticket]) -> None:
        """Wake the requests that were decided on."""
        for ticket in tickets:
            decided = self._undecided.get(ticket)
            if decided is not None and not decided.done():
                decided.set_result(None)

    def _overloaded(self, caller: Caller) -> HTTPException:
        held, shares = self._admission, self.settings.admission.max_concurrent_share < 1
        its_share = shares and caller.tenant is not None and held.running < held.places
        taken = f"tenant {caller.tenant!r} has its share of the places" if its_share else f"all {held.places} places are taken"
        detail = f"{taken} and {held.waiting} requests wait; ask again later"
        return problems.overloaded(detail, held.wait_s(self._clock()))

    def _capacity_header(self) -> tuple[tuple[bytes, bytes]]:
        """How many requests this gateway takes, beyond which `haproxy.sh` refuses others. Requests that hold no place count too: batches
        that were taken on, and answers that are being read.
        """
        return ((b"genrec-most", b"%d" % (self._admission.most(self._clock()) + self.batches.taken_on + len(self._reading))),)


def identify(headers: Mapping[bytes, bytes], settings: GatewaySettings, now: Callable[[], float]) -> ApiKeySettings | None:
    """The caller's key, unless it has expired by `now`; None where every caller may do everything. Raises HTTPException (401)."""
    if settings.unguarded:
        return None
    said = headers.get(b"authorization", b"")
    if settings.allow_anonymous and not said:
        return ANONYMOUS
    scheme, _, presented = said.partition(b" ")
    if scheme.lower() != b"bearer":
        raise problems.unauthorized(f"give your API key: `Authorization: Bearer genrec_...`{OR_NONE if settings.allow_anonymous else ''}")
    key = api_keys.find(presented.strip(), settings.api_keys)
    if key is None:
        raise problems.unauthorized("this API key is not known here; ask the operator of this service for one", error="invalid_token")
    if key.expires is not None and key.expires.timestamp() <= now():
        raise problems.unauthorized(f"this API key has expired ({key.expires:%Y-%m-%d %H:%M %Z}); use its successor", error="invalid_token")
    return key


def _target_s(settings: GatewaySettings) -> float:
    target_ms = settings.admission.target_ms
    return settings.deadline_s / 5 if target_ms is None else target_ms / 1e3


def urgency(headers: Mapping[bytes, bytes], path: str) -> int:
    """The urgency of RFC 9218's `Priority: u=1`, 0 to 7; a malformed header counts as none."""
    said = _URGENCY.search(headers.get(b"priority", b""))
    return int(said[1]) if said else BATCH if path.endswith(":batch") else INTERACTIVE


def _operates(caller: Caller, scope: Scope) -> bool:
    path: str = scope["path"]
    return caller.may("operate") and path.removeprefix(scope.get("root_path", "")).startswith(OPERATION)


def _first_byte_s(scope: Scope, ticket: Ticket, connection: Connection) -> float | None:
    """Seconds until the answer began; None for a refusal, which says nothing of how long answers take, and for routes other than
    /v1/recommend, which take much more or less time.
    """
    if connection.first_byte_at is None or connection.status != HTTPStatus.OK or not scope["path"].endswith("/v1/recommend"):
        return None
    return connection.first_byte_at - ticket.started
