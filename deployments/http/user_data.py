"""The HTTP interface to what is kept of users, without Ray: events, histories, caches. Routes over a `UserDataService`, which the
gateway provides.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Annotated, Protocol

from fastapi import APIRouter, Header, Path, Query, Request, Response

from cluster.config import GatewaySettings
from cluster.errors import DeadlineExceeded, InvalidRequest
from cluster.events.store import Event
from deployments.http import problems
from deployments.http.audit import Audit
from deployments.http.callers import CallerHere, OperatorHere
from deployments.http.event_messages import (
    CacheOut,
    ErasedOut,
    EventIn,
    EventOrEvents,
    EventsIn,
    EventsOut,
    HistoryOut,
    IdempotencyKey,
    InvalidatedOut,
    InvalidateIn,
)
from deployments.http.ids import HISTORY_PATH
from deployments.http.messages import Tenant, Timestamp
from deployments.http.pieces import InPieces
from deployments.http.reading import ReadingRoute

UserIdInPath = Annotated[str, Path(min_length=1, max_length=256)]
TenantInQuery = Annotated[Tenant | None, Query(description="default: the API key's tenant, or `default`")]
_PLACE_OF_KEY = re.compile(r"\\x1f\d+(?=['\"])")
"""In a key as Python writes it, where `_events_of` has made one of each event."""


class UserDataService(Protocol):
    """The gateway, as the routes call it. Every method raises BackendUnavailable where event store or switchboard do not answer."""

    async def append(self, events: Sequence[Event]) -> EventsOut: ...
    async def history(self, tenant: str, user_id: str, limit: int, until: int | None) -> bytes:
        """The JSON of HistoryOut. Raises DeadlineExceeded where other reads, which the event store answers, come first for too long."""
        ...

    async def digest(self, tenant: str, user_id: str) -> str: ...
    async def erase(self, tenant: str, user_id: str, turn: ExitStack) -> ErasedOut:
        """Closes the turn, or hands it on to what closes it once every process has followed, though the request is cancelled before."""
        ...

    async def caches(self) -> CacheOut: ...
    async def invalidate(self, tenant: str | None, user_id: str | None) -> InvalidatedOut: ...


def user_data_routes(data: UserDataService, limits: Callable[[], GatewaySettings], audit: Audit) -> APIRouter:
    """The routes. `limits` gives the present settings."""
    routes = APIRouter(route_class=ReadingRoute)

    @routes.post("/v1/events", status_code=201, tags=["events"], responses={200: {"model": EventsOut, "description": "Stored before"}})
    async def events(
        message: EventOrEvents,
        response: Response,
        caller: CallerHere,
        idempotency_key: Annotated[IdempotencyKey | None, Header()] = None,
    ) -> EventsOut:
        """Store what users did: one event, or several that are stored together or not at all. What is acknowledged is durable.

        With an `Idempotency-Key`, or a key in each event, a call may be repeated until it succeeds: every event is stored once.
        """
        tenants = caller.fill_in(message.events if isinstance(message, EventsIn) else [message])
        caller.charge(Counter(tenants.keys()), right="events")  # each of them for the call
        try:
            sent = _events_of(message, idempotency_key, limits().max_events)
            caller.store()
            stored = await data.append(sent)
        except InvalidRequest as error:
            raise _as_sent(error, message) from None
        response.status_code = 201 if stored.stored else 200
        return stored

    @routes.get(HISTORY_PATH, tags=["events"], response_model=HistoryOut)
    async def history(
        user_id: UserIdInPath,
        caller: CallerHere,
        tenant: TenantInQuery = None,
        limit: Annotated[int | None, Query(ge=1, description="how many events; default: as many as this service takes")] = None,
        until: Annotated[Timestamp | None, Query(description="the latest events of those not after it; default: the latest")] = None,
    ) -> Response:
        """What is stored of a user, oldest first. Where `total` is more than came, ask for the older ones by `until`, the `timestamp` of
        the first one: what came of that second comes again then, as the last of the older ones.
        """
        most = limits().max_behaviours
        if limit is not None and limit > most:
            raise InvalidRequest("limit", f"{limit} is more than the {most} this service takes; ask for fewer, and for older ones by until")
        named = caller.acts_for(tenant)
        try:
            found = await data.history(named, user_id, limit or most, until)
        except DeadlineExceeded as late:  # the call has no deadline: it had no turn at the store, which has not failed
            caller.refused = 503
            raise problems.overloaded(str(late), wait_s=2) from None
        return InPieces(found, caller.place.computed)

    @routes.delete(HISTORY_PATH, tags=["events"])
    async def erase(http: Request, user_id: UserIdInPath, caller: CallerHere, tenant: TenantInQuery = None) -> ErasedOut:
        """Erase a user: stored events, kept answers, and what the engines keep of them, in every replica."""
        named = caller.acts_for(tenant, right="erase")
        with caller.erase() as turn:
            async with audit.line(http, "user.erase", await audit.user(named, lambda: data.digest(named, user_id))) as line:
                erased = await data.erase(named, user_id, turn)
                line.more |= {"events": erased.events, "everywhere": erased.everywhere}
        return erased

    @routes.get("/v1/cache", tags=["operation"])
    async def cache(_: OperatorHere) -> CacheOut:
        """The caches of answers, and what the engines keep of users: hits, sizes, evictions."""
        return await data.caches()

    @routes.post("/v1/cache:invalidate", tags=["operation"])
    async def invalidate(http: Request, message: InvalidateIn, _: OperatorHere) -> InvalidatedOut:
        """Drop the cached answers of a user, of a tenant, or of all tenants, in every gateway and in the shared cache. Events, and what
        engines keep of users, stay.
        """
        if message.user_id is not None and message.tenant is None:
            raise InvalidRequest("tenant", "is missing: users of several tenants may have the same id; name the tenant of this user")
        tenant, user_id = message.tenant, message.user_id
        thing = tenant or "*" if user_id is None else await audit.user(tenant or "", lambda: data.digest(tenant or "", user_id))
        async with audit.line(http, "cache.invalidate", thing) as line:
            dropped = await data.invalidate(tenant, user_id)
            line.more |= {"dropped": dropped.dropped, "everywhere": dropped.everywhere}
        return dropped

    return routes


def _events_of(message: EventIn | EventsIn, key: str | None, most: int) -> list[Event]:
    """The events, each with a key of its own where there is one for all of them: no caller's key has a control character. Raises
    InvalidRequest.
    """
    if isinstance(message, EventIn):
        return [message.to_value(key)]
    if len(message.events) > most:
        raise InvalidRequest("events", f"has {len(message.events)} entries; send at most {most} a call")
    return [event.to_value(key and f"{key}\x1f{position}") for position, event in enumerate(message.events)]


def _as_sent(error: InvalidRequest, message: EventIn | EventsIn) -> InvalidRequest:
    """What the store refuses, in the names of the call: the store knows a list, behaviours, and keys with their places."""
    field, problem = error.field.replace("].behaviour.", "]."), _PLACE_OF_KEY.sub("", error.problem)
    return InvalidRequest(field.removeprefix("events[0].") if isinstance(message, EventIn) else field, problem)
