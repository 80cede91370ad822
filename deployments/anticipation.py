"""Answers that are computed before they are asked for.

events of a user        -> expect     -> the user waits until the events have paused -> in the lane's turn, the user's usual answer
another version serves  -> make_ready -> the usual answers of the users that ask most, beside other work
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Collection
from contextlib import suppress
from contextvars import Context
from math import inf
from time import monotonic
from typing import NamedTuple

from cluster import tracing
from cluster.background import Background, lane_of, no_requests_context
from cluster.cache.entry import Key
from cluster.cache.recent import REMEMBERED, Fullest, Recent
from cluster.cache.scopes import concerns
from cluster.errors import GenrecError
from deployments.version_router import VersionRouter
from pipelines.remembered import UsualRequests, usual_key

READY_USERS, READY_SHARE = 100, 0.2
"""After a change of versions, the answers of READY_USERS users are computed anew, in READY_SHARE of the time: the rest is for callers."""
RECALLS_AT_ONCE = 16
"""Look-ups at a time, one per call for all its users, of the usual requests that gateways share; beyond them, those known here serve."""
AT_ONCE, LATE_S = 32, 60.0
"""After events, AT_ONCE users' answers are computed at a time, and no more than requests would have a place at once; a user that has no
turn within LATE_S is left out. As many wait as usual requests are remembered: beyond that, the one that has waited longest of the lane with
the most is left out.
"""
BUSY_S = 0.1
"""How soon a gateway without a free place is looked at again."""
TICK_S = 0.001
"""By how much a timer may be early."""


class Turn(NamedTuple):
    """When a user's events have paused, on the event loop's clock; `context` has the trace of the call that stored the last one."""

    due: float
    context: Context


class Waiting:
    """Users that wait in the lanes of the callers that told of their events, at most `limit` in all: lanes take turns, a lane's own go as
    they came. A user that several callers tell of waits in the lane of each. However many lanes there are, which callers may name, the
    next lane and the fullest one are found without a look at the others.
    """

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit, self._count, self._fullest = limit, 0, Fullest()
        self._lanes: dict[str, OrderedDict[Key, Turn]] = {}  # none is empty
        self._lanes_of: dict[Key, set[str]] = {}
        self._early = OrderedDict[tuple[str, Key], Turn]()  # of all lanes those that are not due yet, the next first
        self._due = OrderedDict[str, None]()  # the lanes whose first user is due, the next first

    def __len__(self) -> int:
        return self._count

    def put(self, lane: str, key: Key, turn: Turn) -> None:
        """Have the user wait, anew where it waits in this lane. No turn is due before one that was put before it."""
        if key in self._lanes.get(lane, ()):
            self._remove(lane, key)
        users = self._lanes.setdefault(lane, OrderedDict())
        users[key] = self._early[lane, key] = turn
        self._lanes_of.setdefault(key, set()).add(lane)
        self._count += 1
        self._fullest.resized(lane, len(users) - 1, len(users))
        if len(self) > self._limit:
            fullest = self._fullest.name()
            self._remove(fullest, next(iter(self._lanes[fullest])))

    def due(self, now: float) -> str | None:
        """The lane that is next of those in which a user's turn is due; None where none is. `now`: no earlier than the time before."""
        while self._early and next(iter(self._early.values())).due <= now:
            (lane, _), _ = self._early.popitem(last=False)
            self._due.setdefault(lane)
        return next(iter(self._due), None)

    def take(self, lane: str) -> tuple[Key, Turn]:
        """Take out the first user of a lane that is `due`, in the lane's turn."""
        self._due.move_to_end(lane)
        key = next(iter(self._lanes[lane]))
        return key, self._remove(lane, key)

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """Let one user wait no more, all users of `tenant`, or of all tenants."""
        if tenant is not None and user_id is not None:
            keys = [usual_key(tenant, user_id)]
        else:
            keys = [key for key in self._lanes_of if concerns(key, tenant, user_id)]
        for key in keys:
            for lane in list(self._lanes_of.get(key, ())):
                self._remove(lane, key)

    def _remove(self, lane: str, key: Key) -> Turn:
        users, lanes = self._lanes[lane], self._lanes_of[key]
        turn = users.pop(key)
        self._early.pop((lane, key), None)
        if not users or (lane, next(iter(users))) in self._early:
            self._due.pop(lane, None)
        if not users:
            del self._lanes[lane]
        lanes.remove(lane)
        if not lanes:
            del self._lanes_of[key]
        self._count -= 1
        self._fullest.resized(lane, len(users) + 1, len(users))
        return turn


class Anticipation:
    """`anticipates`: whether answers of a tenant's user are computed ahead, asked each time; `after_s`: for how long a user's events must
    have paused, as several often come at a time; `free`: gives how many places no request has; `within_rate`: counts an
    answer after events, and gives False where that is beyond the tenant's rate: the user is left out. To be made outside of requests.
    """

    def __init__(
        self,
        versions: VersionRouter,
        usual: UsualRequests,
        *,
        anticipates: Callable[[str, str], bool],
        after_s: float,
        free: Callable[[], float] = lambda: inf,
        within_rate: Callable[[str], bool] = lambda _: True,
    ) -> None:
        self._versions, self._usual = versions, usual
        self._anticipates, self._after_s, self._free, self._within_rate = anticipates, after_s, free, within_rate
        self._recalls, self._turns, self._background = Background(RECALLS_AT_ONCE), Background(AT_ONCE), Background()
        self._context = no_requests_context()
        self._waiting, self._hottest = Waiting(), Recent[None]()
        self._looks_again: asyncio.TimerHandle | None = None

    def expect(self, users: Collection[tuple[str, str]]) -> None:
        """Events of these users have come: anticipate those that have a known usual request, the latest that any gateway was asked."""
        wanted = {user: lane_of(user[0]) for user in users if self._anticipates(*user)}
        if wanted and self._usual.shared is not None and self._recalls.has_room():
            self._recalls.start(self._recall(wanted))
        else:
            self._await_turns(wanted)

    def make_ready(self) -> None:
        """Another version serves: compute the usual answers of the users that ask most, before they ask, and beside other work."""
        self._hottest.forget()
        for user in self._usual.hottest(READY_USERS):
            self._hottest.put(usual_key(*user), None)
        self._background.replace("another version", self._prepare())

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """Let no user wait for an answer that is to be forgotten: one user, all users of `tenant`, or of all tenants."""
        self._waiting.forget(tenant, user_id)
        self._hottest.forget(tenant, user_id)

    async def close(self) -> None:
        await self._recalls.close()  # which begin others
        self._waiting.forget()
        if self._looks_again is not None:
            self._looks_again.cancel()
        await self._turns.close()
        await self._background.close()

    async def _prepare(self) -> None:
        while self._hottest:
            if self._free() < 1:
                await asyncio.sleep(BUSY_S)
                continue
            began = monotonic()
            await self._anticipate(self._hottest.take()[0])
            await asyncio.sleep((monotonic() - began) * (1 / READY_SHARE - 1))

    async def _recall(self, users: dict[tuple[str, str], str]) -> None:
        await self._usual.recall(users)
        self._await_turns(users)

    def _await_turns(self, users: dict[tuple[str, str], str]) -> None:
        """`users`: user -> the lane of the call that told of events."""
        if known := [(lane, usual_key(*user)) for user, lane in users.items() if self._usual.of(*user) is not None]:
            loop = asyncio.get_running_loop()
            turn = Turn(loop.time() + self._after_s, tracing.continued_in(self._context))
            for lane, key in known:
                self._waiting.put(lane, key, turn)
            loop.call_later(self._after_s, self._give_turns)

    def _give_turns(self, _ended: object = None) -> None:
        """Begin what is due, as far as there is room: as it becomes due, and as a computation ends."""
        loop = asyncio.get_running_loop()
        now = loop.time() + TICK_S
        while (lane := self._waiting.due(now)) is not None:
            busy = len(self._turns) >= self._free()
            if busy and not self._turns and self._looks_again is None:
                self._looks_again = loop.call_later(BUSY_S, self._look_again)
            if busy or not self._turns.has_room():
                return
            key, turn = self._waiting.take(lane)
            if now - turn.due < LATE_S and self._within_rate(key.namespace):
                turn.context.run(self._turns.start, self._anticipate(key), lane=lane).add_done_callback(self._give_turns)

    def _look_again(self) -> None:
        self._looks_again = None
        self._give_turns()

    async def _anticipate(self, key: Key) -> None:
        if self._anticipates(key.namespace, key.group):
            with suppress(GenrecError):  # a caller that asks for it is told why
                await self._versions.model_for(key.namespace, key.group).answers.anticipate(key.namespace, key.group)
