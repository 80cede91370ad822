"""The caller of a request and its rights. The routes name the tenant and the cost, which are known only from the message."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from math import ceil
from typing import Annotated, Protocol

from fastapi import Depends, Request
from starlette.exceptions import HTTPException

from cluster.config import ApiKeySettings, GatewaySettings
from cluster.errors import InvalidRequest
from cluster.traffic.api_keys import Right
from cluster.traffic.rate_limits import Grant
from deployments.http import for_haproxy, problems
from deployments.http.origins import foreign_page

INTERACTIVE = 3
"""Urgency of a request without a Priority header: RFC 9218's default."""
Take = Callable[[str, int, int], Grant | None]
"""(tenant, cost, already paid) -> the answer of the tenant's token bucket; None where the tenant has no limit."""
ANONYMOUS = ApiKeySettings(name="none", sha256="0" * 64, tenant="default", rights=["read", "events"])
"""The rights of a caller without a key, where `allow_anonymous` lets it in."""
KEYLESS = "genrec-keyless"
"""Tells the ZeroMQ door that callers without a key are one caller, as others have keys."""


class OfTenant(Protocol):
    """A message that may leave its tenant out."""

    tenant: str | None


class Place:
    """A request's place among those that are worked on at a time. This one limits nothing: it is that of an operator's call."""

    def belong(self, tenant: str) -> bool:  # noqa: ARG002 - of this one, any
        """Take the place for `tenant`, once its name is known; returns False where that tenant has its share of the places."""
        return True

    def leave(self) -> None:
        """Give the place to another request, before this one has ended."""

    def computed(self, size: int, *, streamed: bool = False) -> None:
        """Give it to another where the answer, of so many bytes, only waits for its reader, unless such answers take up too much memory.
        `streamed`: the answer began before it was computed.
        """

    def keep(self, size: int) -> None:
        """Count the bytes of an answer that waits for others of its batch, and for its reader. Raises HTTPException (503) where such
        answers take up too much memory.
        """

    def store(self) -> None:
        """Give it to another request, as this one waits for the event store alone from here on. Raises HTTPException (503) where too many
        requests of the caller do.
        """

    def erase(self) -> ExitStack:
        """Count an erasure of the caller's until the stack is closed, which may be long after the request has ended. Raises HTTPException
        (503) where too many of the caller's are under way.
        """
        return ExitStack()

    def broke(self, status: int = 0) -> None:
        """Count an answer that has begun by the status of the problem in which it ends. 0: it ends unfinished, which is a failure (504)
        where its time is over, and none where the client has left.
        """


NO_LIMIT = Place()


class Caller:
    """The caller of one request. `key`: None where every caller may do everything. `arrived`: when the whole request was there, on this
    process's monotonic clock. `place`: that of the request, once it has one. `refused`: the status of a refusal by one of the
    routes, or 0. `unaudited`: whether its line of the audit log is lost.
    """

    def __init__(self, key: ApiKeySettings | None, take: Take) -> None:
        self.key, self._take = key, take
        self.arrived = 0.0
        self.place: Place = NO_LIMIT
        self._paid: dict[str, int] = {}
        self.grant: Grant | None = None
        self.refused, self.unaudited = 0, False

    @property
    def has_key(self) -> bool:
        return self.key is not None and self.key is not ANONYMOUS

    @property
    def tenant(self) -> str | None:
        """The only tenant that the caller may act for; None where it may act for any."""
        return None if self.key is None else self.key.tenant

    @property
    def lane(self) -> str | None:
        """The lane in which the caller's requests wait, as lanes take turns: named by its tenant or, where it may act for any, by its key,
        as no tenant is. None without keys.
        """
        return None if self.key is None else self.key.tenant or f"key {self.key.name}"

    @property
    def most_urgent(self) -> int:
        """The highest urgency that the caller may ask for, 0 to 7 (0 is the highest); without keys any."""
        return 0 if self.key is None else self.key.most_urgent

    def may(self, right: Right) -> bool:
        """Whether the caller's key has the right; always where every caller may do everything."""
        return self.key is None or right in self.key.rights

    def require(self, right: Right) -> None:
        """Raises HTTPException (403) unless the caller has the right."""
        if self.key is not None and not self.may(right):
            has = ", ".join(self.key.rights)
            raise self._forbidden(f"the key {self.key.name!r}", f"has not the right {right!r} (it has {has}); use a key that has it")

    def acts_for(self, tenant: str | None = None, cost: int = 1, right: Right = "read") -> str:
        """Charge `cost` to the tenant, by default the key's own, for a call that needs the right; returns the tenant. Raises HTTPException
        (403, 429, 503).
        """
        self.require(right)
        named = self._allowed(tenant)
        self.pay(named, cost)
        if not self.place.belong(named):
            self.refused = 503
            raise problems.overloaded(f"tenant {named!r} has its share of the requests under way", wait_s=1)
        return named

    def keep(self, size: int) -> None:
        """Hold an answer of so many bytes until all of its batch are there and read. Raises HTTPException (503) as `Place.keep`."""
        with self._noting_refusal():
            self.place.keep(size)

    def store(self) -> None:
        """Wait for the event store without a place from here on. Raises HTTPException (503) as `Place.store`."""
        with self._noting_refusal():
            self.place.store()

    def erase(self) -> ExitStack:
        """As `Place.erase`."""
        with self._noting_refusal():
            return self.place.erase()

    @contextmanager
    def _noting_refusal(self) -> Iterator[None]:
        try:
            yield
        except HTTPException as refusal:
            self.refused = refusal.status_code
            raise

    def charge(self, tenants: Counter[str], right: Right = "read") -> None:
        """Act for several tenants at once: tenant -> cost. Raises as `acts_for`; tenants charged before that stay charged."""
        for tenant, cost in tenants.items():
            self.acts_for(tenant, cost, right)

    def named(self, tenant: str | None) -> str:
        """The tenant meant by a message that may leave it out."""
        return tenant or (self.key and self.key.tenant) or "default"

    def fill_in(self, messages: Iterable[OfTenant]) -> Counter[str]:
        """Name the tenants of the messages that leave them out; returns how many are each tenant's."""
        of = Counter[str]()
        for message in messages:
            message.tenant = tenant = self.named(message.tenant)
            of[tenant] += 1
        return of

    def pay(self, tenant: str, cost: int) -> None:
        """Charge `cost` less what is paid already. Raises HTTPException (429), or InvalidRequest if `cost` exceeds the limit itself."""
        paid = self._paid.get(tenant, 0)
        grant = self._take(tenant, cost, paid) if cost > paid else None
        if grant is None:
            return
        self.grant = grant if grant.given else None  # a refusal carries its figures itself
        if cost > grant.most:
            raise InvalidRequest("requests", f"has {cost} entries, and tenant {tenant!r} may send {grant.most} at once; send fewer a call")
        if not grant.given:
            self.refused = 429
            raise problems.too_many(tenant, grant.wait_s, headers_of(grant))
        self._paid[tenant] = cost

    def headers(self) -> list[tuple[bytes, bytes]]:
        """Headers of the response: what is left of the tenant's rate, whether the audit log lacks this call and, for HAProxy, what is so of
        the key.
        """
        told = [(name.encode(), value.encode()) for name, value in headers_of(self.grant).items()] if self.grant else []
        if self.unaudited:
            told.append((b"Genrec-Audit", b"lost"))
        if self.key is not None:
            urgent, operates = self.key.most_urgent < INTERACTIVE, self.may("operate")
            told += for_haproxy.of_key(known=self.has_key, urgent=urgent, operates=operates)
        return told

    def _allowed(self, tenant: str | None) -> str:
        if self.tenant is not None and tenant not in (None, self.tenant):
            raise self._forbidden(f"the key of tenant {self.tenant!r}", f"may not act for tenant {tenant!r}; leave `tenant` out")
        return self.named(tenant)

    def _forbidden(self, key: str, problem: str) -> HTTPException:
        """The 403 of this caller. `key`: how the problem names the caller's key, where there is one."""
        self.refused = 403
        named = "a caller without a key" if self.key is ANONYMOUS else key
        return problems.forbidden(f"{named} {problem}", has_key=self.key is not ANONYMOUS)


def headers_of(grant: Grant) -> dict[str, str]:
    """Headers with what is left of a tenant's requests at this gateway, as in draft-ietf-httpapi-ratelimit-headers."""
    reset_s = ceil(grant.reset_s if grant.given else grant.wait_s)
    return {"RateLimit-Limit": str(grant.limit), "RateLimit-Remaining": str(grant.remaining), "RateLimit-Reset": str(reset_s)}


async def caller_of(http: Request) -> Caller:
    caller: Caller = http.state.caller  # set by the edge, which every request passes
    return caller


async def operator_of(http: Request) -> Caller:
    """The caller, if it may operate the system and no web page of another site can have made the call. Raises HTTPException (403)."""
    caller = await caller_of(http)
    caller.require("operate")
    limits: GatewaySettings = http.app.state.limits()
    if problem := foreign_page(http.headers, limits.hosts):
        caller.refused = 403
        raise problems.forbidden(problem)
    return caller


CallerHere = Annotated[Caller, Depends(caller_of)]
OperatorHere = Annotated[Caller, Depends(operator_of)]
