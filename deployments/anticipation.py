"""Answers that are computed before they are asked for.

events of a user        -> expect     -> the user's usual answer, once the events have paused
another version serves  -> make_ready -> the usual answers of the users that ask most, beside other work
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from time import monotonic

from cluster.cache.tiered import TieredCache
from cluster.errors import GenrecError
from cluster.no_request import Background
from cluster.values import Recommendation
from deployments.version_router import VersionRouter
from pipelines.remembered import UsualRequests

READY_KEYS, READY_SHARE = 100, 0.2
"""After a change of versions, READY_KEYS of the hottest answers are computed anew, in READY_SHARE of the time: the rest is for callers."""
RECALLS_AT_ONCE = 16
"""Look-ups at a time, one per call for all its users, of the usual requests that gateways share; beyond them, those known here serve."""


class Anticipation:
    """`anticipates`: whether answers of a tenant's user are computed ahead, asked each time; `after_s`: for how long a user's events must
    have paused, as several often come at a time. To be made outside of requests.
    """

    def __init__(
        self,
        versions: VersionRouter,
        cache: TieredCache[Recommendation],
        usual: UsualRequests,
        *,
        anticipates: Callable[[str, str], bool],
        after_s: float,
    ) -> None:
        self._versions, self._cache, self._usual = versions, cache, usual
        self._anticipates, self._after_s = anticipates, after_s
        self._recalls, self._background = Background(RECALLS_AT_ONCE), Background()

    def expect(self, users: Collection[tuple[str, str]]) -> None:
        """Events of these users have come: anticipate those that have a known usual request, the latest that any gateway was asked."""
        wanted = {user for user in users if self._anticipates(*user)}
        if wanted and self._usual.shared is not None and self._recalls.has_room():
            self._recalls.start(self._recall(wanted))
        else:
            self._begin_known(wanted)

    def make_ready(self) -> None:
        """Another version serves: compute the usual answers of the users that ask most, before they ask, and beside other work."""
        hottest = [user for user in self._cache.hottest(READY_KEYS) if self._anticipates(*user)]
        self._background.replace("another version", self._prepare(hottest))

    async def close(self) -> None:
        await self._recalls.close()  # which begin others
        await self._background.close()

    async def _prepare(self, users: list[tuple[str, str]]) -> None:
        for user in users:
            began = monotonic()
            with suppress(GenrecError):  # a caller that asks for it is told why
                await self._versions.model_for(*user).answers.prepare(*user)
            await asyncio.sleep((monotonic() - began) * (1 / READY_SHARE - 1))

    async def _recall(self, users: set[tuple[str, str]]) -> None:
        await self._usual.recall(users)
        self._begin_known(users)

    def _begin_known(self, users: set[tuple[str, str]]) -> None:
        for user in users:
            if self._usual.of(*user) is not None:
                self._background.replace(user, self._anticipate(*user))

    async def _anticipate(self, tenant: str, user_id: str) -> None:
        await asyncio.sleep(self._after_s)
        await self._versions.model_for(tenant, user_id).answers.anticipate(tenant, user_id)
