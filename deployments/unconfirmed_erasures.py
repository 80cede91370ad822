"""Erasures that a cache did not confirm, until it does.

not confirmed -> add -> every 2 s one of them is tried, and the others once that cache answers
confirmed -> what was read of the cache meanwhile is dropped here and, by the replica that was asked, in every gateway
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from time import monotonic

from cluster.background import Background
from cluster.cache.tiered import TieredCache
from cluster.engines.forgetting import Scope
from cluster.errors import BackendError
from cluster.values import Recommendation
from deployments.admin_api import AdminApi

INSIST_EVERY_S, AT_ONCE = 2.0, 16
"""How often a silent cache is asked again, and for how many erasures at a time one that answers."""
USERS, WAITING = 1000, 10_000
"""Beyond USERS of a tenant, all of the tenant's are erased, and beyond WAITING users and tenants all: that costs time, never an erasure."""
USERS_TOLD, TOLD = 10, 100
"""As these, of what all gateways are told to drop at a time."""
logger = logging.getLogger("ray.serve")


@dataclass(frozen=True, slots=True, eq=False)
class _Unconfirmed:
    """`silent`: the caches that did not confirm it; `until`: when all that they held has expired, on the monotonic clock; `asked`: by a
    caller of this replica, not by the switchboard.
    """

    silent: frozenset[str]
    until: float
    asked: bool


class UnconfirmedErasures:
    """Erasures of what the cache keeps for `kept_s` seconds at most; there are none without a cache. `drop_here(tenant, user_id)` drops the
    answers that this replica keeps of a user, of a tenant's users or of all; `admin` has every gateway do so. To be made outside of
    requests.
    """

    def __init__(
        self,
        cache: TieredCache[Recommendation] | None,
        admin: AdminApi,
        *,
        kept_s: float,
        drop_here: Callable[[str | None, str | None], None],
    ) -> None:
        self._cache, self._admin, self._kept_s, self._drop_here = cache, admin, kept_s, drop_here
        self._waiting: dict[Scope, _Unconfirmed] = {}
        self._untold: dict[Scope, float] = {}  # confirmed, and not dropped everywhere yet -> until when that matters
        self._background = Background()
        self._insisting: asyncio.Task[None] | None = None

    def add(self, scope: Scope, silent: Collection[str], *, asked: bool) -> None:
        """Insist on an erasure that these caches did not confirm, in place of an earlier one of the same scope."""
        before = self._waiting.pop(scope, None)
        asked = asked or (before is not None and before.asked)
        self._waiting[scope] = _Unconfirmed(frozenset(silent), monotonic() + self._kept_s, asked)
        if len(self._waiting) > WAITING:
            self._join()
        if self._insisting is None or self._insisting.done():
            self._insisting = self._background.start(self._insist())

    async def close(self) -> None:
        await self._background.close()

    def _join(self) -> None:
        joined = dict[Scope, _Unconfirmed]()
        for scope, wider in _wider(self._waiting, USERS, WAITING).items():
            one, other = self._waiting[scope], joined.get(wider)
            if other is not None:
                one = _Unconfirmed(one.silent | other.silent, max(one.until, other.until), one.asked or other.asked)
            joined[wider] = one
        self._waiting = joined

    async def _insist(self) -> None:
        while self._waiting or self._untold:
            await asyncio.sleep(INSIST_EVERY_S)
            try:
                self._give_up()
                await self._ask_again()
                await self._tell()
            except BackendError as error:
                logger.warning("gateways are told later to drop what they read from a cache that was away: %s", error)
            except Exception:
                logger.exception("what a cache did not confirm could not be erased, and is tried again")

    def _give_up(self) -> None:
        now, before = monotonic(), len(self._waiting)
        self._waiting = {scope: one for scope, one in self._waiting.items() if one.until > now}
        self._untold = {scope: until for scope, until in self._untold.items() if until > now}
        if len(self._waiting) < before:
            logger.warning("a cache was away for longer than it keeps anything of users; what was to be erased is out of date there by now")

    async def _ask_again(self) -> None:
        """Ask for one erasure, and for the others as far as that shows that caches answer; for those of one user first: they cost least."""
        due, silent, at_once = sorted(self._waiting, key=lambda scope: scope[1] is None), set[str](), 1
        while due:
            part, due, at_once = due[:at_once], due[at_once:], AT_ONCE
            silent.update(*await asyncio.gather(*map(self._silent_at, part)))
            if silent:
                due = [scope for scope in due if (one := self._waiting.get(scope)) is not None and not one.silent <= silent]

    async def _silent_at(self, scope: Scope) -> Collection[str]:
        """Ask for an erasure again; returns the caches that have yet to confirm it. One of more than one user is repeated only where a
        cache answers by now that did not: the others have carried it out, and fill anew.
        """
        assert self._cache is not None
        shared, one = self._cache.shared, self._waiting.get(scope)
        assert shared is not None
        if one is None:
            return ()
        if scope[1] is None and not await shared.worth_repeating(one.silent):
            return one.silent
        silent = (await self._cache.invalidate(*scope)).unconfirmed
        if self._waiting.get(scope) is one:  # it was not asked for anew meanwhile
            del self._waiting[scope]
            if silent:
                self._waiting[scope] = replace(one, silent=frozenset(silent))  # behind the others: it may be its own fault
            else:
                self._drop_here(*scope)
                if one.asked:
                    self._untold[scope] = one.until
        return silent

    async def _tell(self) -> None:
        """Have the answers dropped that gateways read from a silent cache. Raises BackendError where the switchboard is away: then all of
        this is to be told again.
        """
        told = {*_wider(self._untold, USERS_TOLD, TOLD).values()}
        answers = await asyncio.gather(*(self._admin.drop_answers(*scope) for scope in told), return_exceptions=True)
        if errors := [one for one in answers if isinstance(one, BaseException)]:
            raise errors[0]
        self._untold.clear()


def _wider(scopes: Collection[Scope], users: int, most: int) -> dict[Scope, Scope]:
    """Each scope -> itself, or its tenant where that has more than `users` of them; or all there is where these are more than `most`."""
    of = Counter(tenant for tenant, _ in scopes)
    wider: dict[Scope, Scope] = {(tenant, user): (tenant, user if of[tenant] <= users else None) for tenant, user in scopes}
    return wider if len({*wider.values()}) <= most else dict.fromkeys(wider, (None, None))
