"""The checks before the routes.

    size ──► key ──► rate ──► room ──► body ──► turn ──► place ──► routes ──► tenant and cost, which the body names
    413      401     429      503      408      413      503                  403, 429, 503
                                       413, 503 503

A refusal costs microseconds. A request takes a place once its body is there, so that slow clients hold up no other; a process holds a
limited number of bytes of bodies. Large bodies that are slow to read take turns before they take a place, for a share of the time. An
admitted request has its Caller in `request.state.caller`, with the time at which its body was there: waiting from then on counts against
its deadline. When the client leaves, the request's place in the queue is freed and its work is cancelled.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from secrets import token_hex
from time import monotonic, time
from typing import Protocol

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.background import LANE
from cluster.config import ApiKeySettings, GatewaySettings
from cluster.metrics import ADMISSION_WAIT, BY_PROXY, REFUSALS, SILENT, Meter
from cluster.traffic import api_keys
from cluster.traffic.rate_limits import Grant, RateLimiter
from deployments.http import for_haproxy, problems
from deployments.http.batches import Batches
from deployments.http.callers import ANONYMOUS, INTERACTIVE, KEYLESS, NO_LIMIT, Caller
from deployments.http.connection import SMALL, BodyBudget, Connection
from deployments.http.ids import HISTORY_PATH
from deployments.http.open_paths import PROBED, OpenPaths
from deployments.http.origins import foreign_host
from deployments.http.places import Places
from deployments.http.reading_queue import ReadingQueue

OPERATION = ("/v1/backends", "/v1/cache", "/v1/gateway", "/v1/models")
"""Where operators call. They need no place: their calls may be what ends an overload."""
OR_NONE = "; or leave the header out: a caller without a key may ask and store events"
OTHER = "other"
"""The metrics' label of requests without a route."""
STORED = ("/v1/events", HISTORY_PATH)
"""The routes that store events, give them back and erase users."""
BATCH_PATH = "/v1/recommend:batch"
MOST_ARRIVING = 256
"""Requests of one caller with bodies on their way: a quarter of the connections that HAProxy has to a gateway."""
BATCH_URGENCY = 6
"""Urgency of a batch without a Priority header."""
logger = logging.getLogger("ray.serve")
_HEADERS = frozenset({b"authorization", b"content-length", b"host", b"priority", b"transfer-encoding", for_haproxy.REFUSED})
_URGENCY = re.compile(rb"(?:^|,)[ \t]*u=([0-7])[ \t]*(?:[,;]|$)")


class Routes(Protocol):
    """What answers the requests that the edge lets through."""

    async def answer(self, scope: Scope, connection: Connection) -> None: ...

    def slow_bytes(self, scope: Scope, body: bytes) -> int:
        """How many of the body's bytes take a turn to be read; 0: it is read at once. Raises the HTTPException that refuses it."""
        ...

    def route_of(self, scope: Scope) -> str:
        """The route under which a refusal is counted."""
        ...


@dataclass(frozen=True, slots=True)
class EdgeStatistics:
    """`gateway`: a name drawn at the start; `places`: requests that may run at a time now; `entries`: entries of batches that run or wait;
    `refused`: HTTP status -> requests since the start, those of HAProxy that this gateway was told of among them. `stored`: route of
    STORED -> requests answered since the start; `failed`: those of them that ended in a 5xx that is no refusal.
    """

    gateway: str
    running: int
    waiting: int
    places: int
    entries: int
    refused: dict[int, int]
    stored: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)


class Edge:
    """The protection of one gateway replica. `gateways`: gives the number of live gateways, which share the tenants' rate limits. `local`:
    this machine alone reaches the service. `proxied`: requests come by the HAProxy of `haproxy.sh`, see `for_haproxy`.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        gateways: Callable[[], int] = lambda: 1,
        meter: Meter = SILENT,
        *,
        local: bool = False,
        proxied: bool = False,
    ) -> None:
        self.settings, self._gateways, self._meter, self._local, self._proxied = settings, gateways, meter, local, proxied
        self._bodies, self._reading_queue = BodyBudget(settings.max_held_bytes), ReadingQueue(settings.slow_bytes_per_s)
        self._places = Places(settings.admission, _target_s(settings), self._bodies)
        self.batches = Batches(settings.admission, lambda: self._places.admission.places, lambda: self._turned_away(BATCH_PATH, 503))
        self._rates, self._rates_ahead = RateLimiter(settings.rate_limits), RateLimiter(settings.rate_limits)
        self._refused: Counter[int] = Counter()
        self._stored, self._failed = Counter[str](), Counter[str]()
        self._id = token_hex(8)
        self._arriving: Counter[str | None] = Counter()  # lane -> requests with bodies on their way
        self._open = OpenPaths()
        _warn_of_keys(settings)

    def reconfigure(self, settings: GatewaySettings) -> None:
        """Take new settings. Running requests go on; waiting ones wait no longer than the new settings allow."""
        self.settings, self.batches.settings = settings, settings.admission
        _warn_of_keys(settings)
        self._rates.reconfigure(settings.rate_limits)
        self._rates_ahead.reconfigure(settings.rate_limits)
        self._bodies.most, self._reading_queue.per_s = settings.max_held_bytes, settings.slow_bytes_per_s
        self._places.reconfigure(settings.admission, _target_s(settings))

    def statistics(self) -> EdgeStatistics:
        admission = self._places.admission
        counted = dict(self._refused), dict(self._stored), dict(+self._failed)
        return EdgeStatistics(self._id, admission.running, admission.waiting, admission.places, self.batches.held, *counted)

    def free_places(self) -> int:
        """How many places no request has; one may wait beside them, where its tenant has its share."""
        return max(0, self._places.admission.places - self._places.admission.running)

    def may_compute_ahead(self, tenant: str) -> bool:
        """Count an answer that is to be computed ahead; False beyond the tenant's rate, which they have once more for themselves."""
        grant = self._rates_ahead.take(tenant, 1, monotonic(), self._gateways())
        return grant is None or grant.given

    def spare_places(self) -> int:
        """As `free_places`, for work that a request leaves behind as it ends: 1 at least where no other runs; and where places are free,
        those count that there may yet be.
        """
        admission = self._places.admission
        return max(self.free_places() and admission.places_yet() - admission.running, int(admission.running <= 1))

    async def serve(self, routes: Routes, scope: Scope, connection: Connection) -> None:
        """Answer one HTTP request: with a refusal, or by its route once it has a place."""
        connection.headers = self._capacity_header
        try:
            with connection:
                headers = {name: value for name, value in scope["headers"] if name in _HEADERS}
                self._count_refused_by_proxy(headers)
                caller = self._caller(headers)
                scope["state"] = {**scope.get("state", {}), "caller": caller}
                connection.lane = caller.lane
                LANE.set(caller.lane)
                connection.headers = lambda: (*self._capacity_header(), *caller.headers())
                operates = _operates(caller, scope)
                urgent = max(urgency(headers, scope["path"]), caller.most_urgent)  # RFC 9218: 0 is the most urgent
                if not operates:
                    self._places.check(urgent, caller)
                await self._read(connection, caller.lane, large=_is_large(headers))
                caller.arrived = monotonic()
                if len(connection.body) > SMALL and (slow := routes.slow_bytes(scope, connection.body)):
                    await self._reading_queue.wait(caller.lane, slow, self.settings.admission.max_wait_ms / 1e3)
                if operates:
                    await routes.answer(scope, connection)
                else:
                    await self._with_a_place(routes, scope, connection, caller, urgent)
                if caller.refused:
                    self._turned_away(routes.route_of(scope), caller.refused)
        except HTTPException as refusal:
            await self._refuse(refusal, scope, connection, routes)
        finally:
            self._places.reading.discard(connection)
            self._bodies.give_back(connection)

    async def serve_open(self, routes: Routes, path: str, scope: Scope, connection: Connection) -> None:
        """Answer a request of an open path, without a key: as `serve`, but for places."""
        counted = path not in PROBED

        def told() -> tuple[tuple[bytes, bytes], ...]:
            if counted:
                self._open.begun(path, connection.status)
            refused = counted and connection.status == HTTPStatus.SERVICE_UNAVAILABLE
            return (*self._capacity_header(), for_haproxy.NO_PAGES) if refused else self._capacity_header()

        connection.headers = told
        self._open.running += counted
        try:
            with connection:
                headers = dict(scope["headers"])
                self._count_refused_by_proxy(headers)
                _require_no_body(headers)
                if counted:
                    self._open.take()
                await connection.read(self.settings, self._bodies)
                await routes.answer(scope, connection)
                if counted:
                    self._open.answered(path, connection.status)
        except HTTPException as refusal:
            await self._refuse(refusal, scope, connection, routes)
        finally:
            self._open.running -= counted
            self._bodies.give_back(connection)

    async def check_key(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI application that answers 204 where the caller's key is known, with KEYLESS where others have keys and this one has none.
        This costs the tenant no request, and takes no place; the door that asks counts what it refuses.
        """
        try:
            key = identify(dict(scope["headers"]), self.settings, time)
        except HTTPException as refusal:
            await problems.send(refusal, scope["path"], send)
        else:
            told = {KEYLESS: "1"} if key is ANONYMOUS else None
            await Response(status_code=HTTPStatus.NO_CONTENT, headers=told)(scope, receive, send)

    def _caller(self, headers: dict[bytes, bytes]) -> Caller:
        """The caller whose key the headers hold; where the key names a tenant, the request counts against that tenant's rate.

        Raises HTTPException: 401 or 403 for the key or the host, 413 for the length, 429 for the rate.
        """
        self._check_length(headers)
        caller = Caller(identify(headers, self.settings, time), self._take)
        if not caller.has_key:
            self._check_host(headers)
        if caller.tenant is not None:
            caller.pay(caller.tenant, 1)
        return caller

    def _check_host(self, headers: dict[bytes, bytes]) -> None:
        """Raises HTTPException (403) where the caller, which has no key, may be a page with a name that was made to lead to this service.
        One on a public address may have names that it has not been told.
        """
        if self.settings.unguarded or self._local or self.settings.hosts:
            problem = foreign_host(headers.get(b"host", b"").decode("latin-1"), tuple(self.settings.hosts))
            if problem:
                raise problems.forbidden(problem)

    async def _read(self, connection: Connection, lane: str | None, *, large: bool) -> None:
        """Read the body. Raises HTTPException (503) where it is large, and MOST_ARRIVING of the lane's are on their way."""
        if large and self._arriving[lane] >= MOST_ARRIVING:
            raise problems.overloaded(f"{MOST_ARRIVING} bodies of this caller are on their way; send fewer at a time", wait_s=1)
        self._arriving[lane] += 1
        try:
            await connection.read(self.settings, self._bodies)
        finally:
            self._arriving[lane] -= 1
            if not self._arriving[lane]:
                del self._arriving[lane]

    async def _refuse(self, refusal: HTTPException, scope: Scope, connection: Connection, routes: Routes) -> None:
        if not isinstance(refusal, problems.TooLate):
            self._turned_away(routes.route_of(scope), refusal.status_code)
        unread = not connection.whole and _is_large(dict(scope["headers"]))
        await problems.send(refusal, scope["path"], connection.send, unread=unread)

    async def _with_a_place(self, routes: Routes, scope: Scope, connection: Connection, caller: Caller, urgent: int) -> None:
        """Answer once the request has a place. Raises HTTPException (503) where it gets none in time."""
        adapts = path_of(scope) == "/v1/recommend"  # other routes take much more or less time
        caller.place = place = self._places.arrive(urgent, caller, connection, adapts=adapts)
        try:
            self._meter.observe(ADMISSION_WAIT, await place.wait())
            await routes.answer(scope, connection)
        finally:
            place.end()
            caller.place = NO_LIMIT  # it refers to the connection, and that to the caller: a cycle

    def _count_refused_by_proxy(self, headers: Mapping[bytes, bytes]) -> None:
        """Count the requests that HAProxy refused before this one."""
        if self._proxied and (refused := for_haproxy.refused(headers)):
            self._turned_away(BY_PROXY, 503, refused)

    def answered(self, route: str, status: int) -> None:
        """Count an answer, be it a refusal, which was counted as such before."""
        if route in STORED:
            self._stored[route] += 1
            self._failed[route] += status >= HTTPStatus.INTERNAL_SERVER_ERROR

    def _turned_away(self, route: str, status: int, requests: int = 1) -> None:
        self._refused[status] += requests
        self._failed[route] -= requests if status == HTTPStatus.SERVICE_UNAVAILABLE and route in STORED else 0
        self._meter.add(REFUSALS, requests, route=route, status=str(status))

    def _check_length(self, headers: dict[bytes, bytes]) -> None:
        length = _announced(headers)
        if length is not None and length > self.settings.max_body_bytes:
            raise problems.BodyTooLarge(self.settings.max_body_bytes)

    def _take(self, tenant: str, cost: int, paid: int) -> Grant | None:
        return self._rates.take(tenant, cost, monotonic(), self._gateways(), paid)

    def _capacity_header(self) -> tuple[tuple[bytes, bytes]]:
        """What this gateway takes, as HAProxy is told. Requests that hold no place count too: bodies on their way, batches that were taken
        on, answers that are being read, events that are being stored, and open paths.
        """
        requests = self._places.most() + self._arriving.total() + self.batches.taken_on + self._open.held()
        part, within_s = self._places.admission.part(), self.settings.request_within_s
        return (for_haproxy.most(requests, self.settings.max_body_bytes, part, within_s),)


def _warn_of_keys(settings: GatewaySettings) -> None:
    for warning in api_keys.expire_soon(settings.api_keys):
        logger.warning("%s", warning)


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
    key = api_keys.find(presented.strip(b" "), settings.api_keys)  # in one spelling, by which `haproxy.sh` counts a key's requests
    if key is None:
        raise problems.unauthorized("this API key is not known here; ask the operator of this service for one", error="invalid_token")
    if key.expires is not None and key.expires.timestamp() <= now():
        raise problems.unauthorized(f"this API key has expired ({key.expires:%Y-%m-%d %H:%M %Z}); use its successor", error="invalid_token")
    return key


def _require_no_body(headers: Mapping[bytes, bytes]) -> None:
    """Raises HTTPException (413) where a body is announced."""
    if _announced(headers) != 0 or b"transfer-encoding" in headers:
        raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "this path takes no body; leave it out")


def _is_large(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a body may be more than a proxy has taken in whole before it hands the request on."""
    length = _announced(headers)
    return b"transfer-encoding" in headers or length is None or length > SMALL // 2


def _announced(headers: Mapping[bytes, bytes]) -> int | None:
    """Bytes of the body as the headers have them; None where that is no number."""
    length = headers.get(b"content-length", b"0")
    return int(length[:20]) if length.isdigit() else None


def _target_s(settings: GatewaySettings) -> float:
    target_ms = settings.admission.target_ms
    return settings.deadline_s / 5 if target_ms is None else target_ms / 1e3


def urgency(headers: Mapping[bytes, bytes], path: str) -> int:
    """The urgency of RFC 9218's `Priority: u=1`, 0 to 7; a malformed header counts as none."""
    said = _URGENCY.search(headers.get(b"priority", b""))
    return int(said[1]) if said else BATCH_URGENCY if path.endswith(":batch") else INTERACTIVE


def path_of(scope: Scope) -> str:
    """The path below the application's own, as `/v1/recommend`."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _operates(caller: Caller, scope: Scope) -> bool:
    return caller.may("operate") and path_of(scope).startswith(OPERATION)
