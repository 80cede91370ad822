"""Carry out the erasures that the switchboard orders, in a process that keeps something of users: a stage's replica, or a gateway."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from time import monotonic

from cluster.fleet.erasures import Erasure, News, Place

PATIENCE_S = 0.5
EVERYBODY = Erasure(0, None, None)
logger = logging.getLogger("ray.serve")


class ErasureFollower:
    """`forget(tenant, user, again)` erases a user, all of the tenant's users where `user` is None, and all users where `tenant` is None
    too; it is idempotent. Where it raises, the erasures are tried again with the next news. `drop_answers(tenant, user)` drops the answers
    that the process keeps of them, if any, and nothing else. `place`: how far the process has come.
    `serving`: to be set before the first request.

    Each erasure is carried out `again` after `again_after_s`, the longest that a request may take: a request that was under way the first
    time knew the user's history, and may have kept something since; also in a process that has started meanwhile. Answers are dropped
    once: the cache keeps none that began to be computed before.
    """

    def __init__(
        self,
        forget: Callable[[str | None, str | None, bool], Awaitable[object]],
        *,
        drop_answers: Callable[[str | None, str | None], object],
        again_after_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._forget, self._drop_answers, self._again_after_s, self._clock = forget, drop_answers, again_after_s, clock
        self.place, self.serving = Place(), False
        self._again: deque[tuple[float, Erasure]] = deque()
        self._work: asyncio.Task[None] | None = None

    async def follow(self, news: News, since: Place) -> None:
        """Carry out the news for a follower at `since`; `News(since)` where there are none. Erasures that take longer than half a second
        go on in the background, so that the process goes on reporting: a silent process counts as gone.
        """
        if self._work is None or (self._work.done() and self.place == since):  # else these news may be old
            self._work = asyncio.create_task(self._carry_out(news))
        await asyncio.wait({self._work}, timeout=PATIENCE_S)

    async def finish(self) -> Place:
        """Carry out at once all erasures that wait. To be called when no request is under way any more, and no news follow. Returns how far
        the process has come. Raises what `forget` raises.
        """
        if self._work is not None:
            await asyncio.wait({self._work})
        while self._again:
            await self._forget(self._again[0][1].tenant, self._again[0][1].user, True)
            self._again.popleft()
        return self.place

    async def _carry_out(self, news: News) -> None:
        try:
            for erasure in (EVERYBODY,) if news.lost_track else news.erasures:
                if erasure.answers_only:
                    self._drop_answers(erasure.tenant, erasure.user)
                else:
                    await self._forget(erasure.tenant, erasure.user, False)
                await asyncio.sleep(0)  # requests go on
            while self._again and self._again[0][0] <= self._clock():
                await self._forget(self._again[0][1].tenant, self._again[0][1].user, True)
                self._again.popleft()
        except Exception:
            logger.exception("an erasure could not be carried out, and is tried again")
            return
        lost = (EVERYBODY,) if news.lost_track and (self.serving or self.place != Place()) else ()  # at the start, no request is under way
        due = self._clock() + self._again_after_s
        self._again += [(due, erasure) for erasure in (*lost, *news.erasures) if not erasure.answers_only]
        self.place = news.place
