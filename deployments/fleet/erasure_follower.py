"""Carry out the erasures that the switchboard orders, in a process that keeps something of users: a stage's replica, or a gateway."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable
from itertools import takewhile
from time import monotonic

from cluster.engines.forgetting import Scope
from cluster.fleet.erasures import Erasure, News, Place

PATIENCE_S, REST_S = 0.5, 0.25
"""How long a heartbeat waits for its news to be carried out; and how long a process does something else before the next call of `forget`:
an engine that knows no users, as vLLM, drops what it has computed of all of them each time, and begins anew what it computes.
"""
EVERYBODY = Erasure(0, None, None)
logger = logging.getLogger("ray.serve")


class ErasureFollower:
    """`forget(users, again)` erases these users; it is idempotent. Where it raises, the erasures are tried again with the next news.
    `drop_answers(tenant, user)` drops the answers that the process keeps of them, if any, and nothing else. `place`: how far the process
    has come. `serving`: to be set before the first request.

    Erasures that came together are one call. Each is carried out `again` after `again_after_s`, the longest that a request may take: a
    request that was under way the first time knew the user's history, and may have kept something since; also in a process that has started
    meanwhile. Answers are dropped once: the cache keeps none that began to be computed before.
    """

    def __init__(
        self,
        forget: Callable[[Collection[Scope], Collection[Scope]], Awaitable[object]],
        *,
        drop_answers: Callable[[str | None, str | None], object],
        again_after_s: float,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._forget, self._drop_answers, self._again_after_s, self._clock = forget, drop_answers, again_after_s, clock
        self.place, self.serving = Place(), False
        self._again: deque[tuple[float, Scope]] = deque()
        self._rests_until = 0.0
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
        if self._again:
            await self._forget((), [users for _, users in self._again])
            self._again.clear()
        return self.place

    async def _carry_out(self, news: News) -> None:
        told = (EVERYBODY,) if news.lost_track else news.erasures
        if not (told or self._due()):
            self.place = news.place
            return
        await asyncio.sleep(self._rests_until - self._clock())
        due = self._due()
        try:
            for erasure in told:
                if erasure.answers_only:
                    self._drop_answers(erasure.tenant, erasure.user)
                    await asyncio.sleep(0)  # requests go on
            if (users := _users(told)) or due:
                await self._forget(users, due)
        except Exception:
            logger.exception("an erasure could not be carried out, and is tried again")
            return
        finally:
            self._rests_until = self._clock() + REST_S
        for _ in due:
            self._again.popleft()
        lost = (EVERYBODY,) if news.lost_track and (self.serving or self.place != Place()) else ()  # at the start, no request is under way
        then = self._clock() + self._again_after_s
        self._again += [(then, users) for users in _users((*lost, *news.erasures))]
        self.place = news.place

    def _due(self) -> list[Scope]:
        now = self._clock()
        return [users for _, users in takewhile(lambda one: one[0] <= now, self._again)]


def _users(erasures: Iterable[Erasure]) -> list[Scope]:
    return [(one.tenant, one.user) for one in erasures if not one.answers_only]
