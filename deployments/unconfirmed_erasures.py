"""Erasures that a cache did not confirm, until it does.

not confirmed -> add -> every 2 s one of them is tried in turn, and the others as soon as a cache confirms it
confirmed -> what was read of the cache meanwhile is dropped here and, by the replica that was asked, in every gateway
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from time import monotonic
from typing import TypeVar

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
T = TypeVar("T")
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
        def both(one: _Unconfirmed, other: _Unconfirmed) -> _Unconfirmed:
            return _Unconfirmed(one.silent | other.silent, max(one.until, other.until), one.asked or other.asked)

        self._waiting = _joined(self._waiting, USERS, WAITING, both)

    async def _insist(self) -> None:
        at_once, told = 1, monotonic()
        while self._waiting or self._untold:
            await asyncio.sleep(INSIST_EVERY_S if at_once == 1 else 0)
            try:
                self._give_up()
                at_once = AT_ONCE if await self._ask_again(at_once) and self._waiting else 1
                if at_once == 1 or monotonic() - told > INSIST_EVERY_S:
                    told = monotonic()
                    await self._tell()
            except BackendError as error:
                at_once = 1
                logger.warning("gateways are told later to drop what they read from a cache that was away: %s", error)
            except Exception:
                at_once = 1
                logger.exception("what a cache did not confirm could not be erased, and is tried again")

    def _give_up(self) -> None:
        now, before = monotonic(), len(self._waiting)
        self._waiting = {scope: one for scope, one in self._waiting.items() if one.until > now}
        self._untold = {scope: until for scope, until in self._untold.items() if until > now}
        if len(self._waiting) < before:
            logger.warning("a cache was away for longer than it keeps anything of users; what was to be erased is out of date there by now")

    async def _ask_again(self, at_once: int) -> bool:
        """Ask for the erasures that wait longest, so many together; returns whether a cache confirmed one that had not."""
        part = [*islice(self._waiting, at_once)]
        return any(await asyncio.gather(*map(self._is_nearer, part)))

    async def _is_nearer(self, scope: Scope) -> bool:
        """Ask for an erasure again, which then waits behind the others unless it is confirmed; returns whether one more cache confirmed it.
        One of more than one user is repeated only where a cache answers by now that did not: the others have carried it out, and fill anew.
        """
        assert self._cache is not None
        shared, one = self._cache.shared, self._waiting[scope]
        assert shared is not None
        silent: Collection[str] = one.silent
        if scope[1] is not None or await shared.worth_repeating(one.silent):
            silent = (await self._cache.invalidate(*scope)).unconfirmed
        if self._waiting.get(scope) is not one:  # it was asked for anew meanwhile
            return False
        del self._waiting[scope]
        if silent:
            self._waiting[scope] = replace(one, silent=frozenset(silent))
        else:
            self._drop_here(*scope)
            if one.asked:
                self._untold[scope] = one.until
        return not one.silent <= frozenset(silent)

    async def _tell(self) -> None:
        """Have the answers dropped that gateways read from a silent cache. Raises BackendError where the switchboard is away: what it was
        not told then is to be told again.
        """
        self._untold = _joined(self._untold, USERS_TOLD, TOLD, max)
        told = [*self._untold]
        answers = await asyncio.gather(*(self._admin.drop_answers(*scope) for scope in told), return_exceptions=True)
        errors = {scope: answer for scope, answer in zip(told, answers, strict=True) if isinstance(answer, BaseException)}
        self._untold = {scope: until for scope, until in self._untold.items() if scope in errors}
        for error in errors.values():
            raise error


def _joined(scopes: Mapping[Scope, T], users: int, most: int, both: Callable[[T, T], T]) -> dict[Scope, T]:
    """What is known of scopes, of which those of more than `users` users of a tenant are one, of the tenant; and of all there is where
    these are more than `most`.
    """
    of = Counter(tenant for tenant, _ in scopes)
    wider = [(tenant, user if of[tenant] <= users else None) for tenant, user in scopes]
    if len({*wider}) > most:
        wider = [(None, None)] * len(scopes)
    joined = dict[Scope, T]()
    for scope, one in zip(wider, scopes.values(), strict=True):
        joined[scope] = both(joined[scope], one) if scope in joined else one
    return joined
