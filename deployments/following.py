"""Forget whom the switchboard says: for whatever process keeps something of users, such as a stage's replica or a gateway.

exchange: how far it has come -> what to forget ; forget it ; exchange: how far it has come
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Any

from ray.serve.handle import DeploymentHandle

from cluster.erasures import Erasure, News, Place
from cluster.errors import BackendError
from deployments.remote import ask
from deployments.switchboard import REPORT_INTERVAL_S

EXCHANGE_DEADLINE_S = 2.0
EVERYBODY = Erasure(0, None, None)
logger = logging.getLogger("ray.serve")


class Follower:
    """`name` is this process's own. `on_erasure(tenant, user)` is to forget a user, or all of the tenant's where `user` is None, or
    everybody where `tenant` is None too; `on_lost_track()` is to forget everything: at the first exchange, and after the switchboard was
    restarted. Both may be told what is forgotten already. Where one raises, all is tried again with the next exchange.

    Each erasure is carried out again after `again_after_s`, the longest that a request may take: one that was under way the first time knew
    the user's history, and what it kept since has to go too.
    """

    def __init__(
        self,
        switchboard: DeploymentHandle[Any],
        name: str,
        on_erasure: Callable[[str | None, str | None], Awaitable[object]],
        on_lost_track: Callable[[], Awaitable[object]],
        *,
        again_after_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._switchboard, self._name, self._clock = switchboard, name, clock
        self._on_erasure, self._on_lost_track, self._again_after_s = on_erasure, on_lost_track, again_after_s
        self._place = Place()
        self._again: deque[tuple[float, Erasure]] = deque()
        self._work: asyncio.Task[None] | None = None

    async def follow_forever(self) -> None:
        """Exchange every half second, and at once where there is something new to tell."""
        while True:
            told = self._place
            await self.exchange()
            if self._place == told:
                await asyncio.sleep(REPORT_INTERVAL_S)

    async def exchange(self) -> None:
        """Tell how far it has come, and forget what it learns. Where the switchboard cannot be reached, nothing happens.

        It waits a moment for the work at most: whoever keeps silent for long counts as gone, and is not waited for.
        """
        told, news = self._place, await self._news()
        if self._work is None or (self._work.done() and self._place == told):  # else these news may be old
            self._work = asyncio.create_task(self._forget(news))
        await asyncio.wait({self._work}, timeout=REPORT_INTERVAL_S)

    async def _news(self) -> News:
        try:
            news: News = await ask(self._switchboard, "exchange", self._name, self._place, within_s=EXCHANGE_DEADLINE_S)
        except BackendError as error:
            logger.warning("it is not known whom to forget: %s", error)
            return News(self._place)
        return news

    async def _forget(self, news: News) -> None:
        try:
            if news.lost_track:
                await self._on_lost_track()
            for erasure in news.erasures:
                await self._on_erasure(erasure.tenant, erasure.user)
                await asyncio.sleep(0)  # requests go on
            while self._again and self._again[0][0] <= self._clock():
                await self._on_erasure(self._again[0][1].tenant, self._again[0][1].user)
                self._again.popleft()
        except Exception:
            logger.exception("what is to be forgotten could not be, and is tried again")
            return
        lost = (EVERYBODY,) if news.lost_track and self._place != Place() else ()  # at the start, no request is under way
        self._again += [(self._clock() + self._again_after_s, erasure) for erasure in (*lost, *news.erasures)]
        self._place = news.place
