"""Answers that are computed before they are asked for.

events of a user        -> expect     -> the user's usual answer, once the events have paused
another version serves  -> make_ready -> the usual answers of the users that ask most, beside other work
"""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from time import monotonic

from cluster.errors import GenrecError
from cluster.no_request import Background
from deployments.version_router import VersionRouter
from pipelines.remembered import Recent, UsualRequests, usual_key

READY_USERS, READY_SHARE = 100, 0.2
"""After a change of versions, the answers of READY_USERS users are computed anew, in READY_SHARE of the time: the rest is for callers."""
RECALLS_AT_ONCE = 16
"""Look-ups at a time, one per call for all its users, of the usual requests that gateways share; beyond them, those known here serve."""


class Anticipation:
    """`anticipates`: whether answers of a tenant's user are computed ahead, asked each time; `after_s`: for how long a user's events must
    have paused, as several often come at a time. To be made outside of requests.
    """

    def __init__(
        self,
        versions: VersionRouter,
        usual: UsualRequests,
        *,
        anticipates: Callable[[str, str], bool],
        after_s: float,
    ) -> None:
        self._versions, self._usual = versions, usual
        self._anticipates, self._after_s = anticipates, after_s
        self._recalls, self._background = Background(RECALLS_AT_ONCE), Background()
        self._hottest = Recent[None]()

    def expect(self, users: Collection[tuple[str, str]]) -> None:
        """Events of these users have come: anticipate those that have a known usual request, the latest that any gateway was asked."""
        wanted = {user for user in users if self._anticipates(*user)}
        if wanted and self._usual.shared is not None and self._recalls.has_room():
            self._recalls.start(self._recall(wanted))
        else:
            self._begin_known(wanted)

    def make_ready(self) -> None:
        """Another version serves: compute the usual answers of the users that ask most, before they ask, and beside other work."""
        self._hottest.forget()
        for user in self._usual.hottest(READY_USERS):
            self._hottest.put(usual_key(*user), None)
        self._background.replace("another version", self._prepare())

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """Let no user wait for an answer that is to be forgotten: one user, all users of `tenant`, or of all tenants."""
        self._hottest.forget(tenant, user_id)

    async def close(self) -> None:
        await self._recalls.close()  # which begin others
        await self._background.close()

    async def _prepare(self) -> None:
        while self._hottest:
            began = monotonic()
            await self._prepare_one(*self._hottest.take()[0][:2])
            await asyncio.sleep((monotonic() - began) * (1 / READY_SHARE - 1))

    async def _prepare_one(self, tenant: str, user_id: str) -> None:
        if self._anticipates(tenant, user_id):
            with suppress(GenrecError):  # a caller that asks for it is told why
                await self._versions.model_for(tenant, user_id).answers.prepare(tenant, user_id)

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
