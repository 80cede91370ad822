"""Work that requests share, or that outlives them: its context, its lane, and what holds its tasks."""

import asyncio
from collections.abc import Coroutine, Hashable
from contextvars import Context, ContextVar, copy_context
from math import inf
from typing import Any, TypeVar

from cluster import tracing

T = TypeVar("T")
BACKGROUND = "no request"
"""The lane of the work that no caller has caused; no tenant has this name, nor has any key's lane."""
LANE: ContextVar[str | None] = ContextVar("lane", default=None)
"""The lane of the caller that has caused the work that is under way. None: callers are not told apart."""
AHEAD: ContextVar[bool] = ContextVar("ahead", default=False)
"""Whether the work that is under way was begun before a caller waits for it: it leaves half of what it shares to what callers wait for."""


def lane_of(tenant: str) -> str:
    """The lane of work for the tenant, as lanes take turns: that of the context or, where callers are not told apart, the tenant's."""
    return LANE.get() or tenant


def no_requests_context() -> Context:
    """A context to make tasks in, to be taken outside of requests, as an object is made. Serve cancels all calls made in the context of a
    cancelled request, even calls that other requests wait for. Its lane is BACKGROUND.
    """
    return _in_lane(copy_context(), BACKGROUND, ahead=True)


def continued_in(context: Context, lane: str | None, *, ahead: bool) -> Context:
    """A copy of that context for work in this lane, `AHEAD` or not, in which the caller's trace goes on."""
    return _in_lane(tracing.continued_in(context), lane, ahead=ahead)


class Background:
    """Tasks that no request waits for, at most `limit` at a time. To be made outside of requests: its tasks run in the context in which it
    was made.
    """

    def __init__(self, limit: float = inf) -> None:
        self._limit, self._tasks, self._closed = limit, dict[asyncio.Task[Any], str | None](), False  # task -> its lane
        self._by_key: dict[Hashable, asyncio.Task[Any]] = {}
        self._context = no_requests_context()

    def __len__(self) -> int:
        return len(self._tasks)

    def has_room(self) -> bool:
        """Whether one more task may begin."""
        return not self._closed and len(self._tasks) < self._limit

    def has_room_for(self, lane: str | None, within: float) -> bool:
        """As `has_room`, with at most `within` tasks at a time, of which the lane has as many as there is room left for: half while it is
        alone, so that there is room for another.
        """
        room = min(self._limit, within) - len(self._tasks)
        return not self._closed and sum(lane == other for other in self._tasks.values()) < room

    def start(self, work: Coroutine[Any, Any, T], *, lane: str | None = BACKGROUND, ahead: bool = True) -> "asyncio.Task[T]":
        """Begin the work as a task, in the caller's trace and this lane but in no request's context, and `keep` the task."""
        task = asyncio.get_running_loop().create_task(work, context=continued_in(self._context, lane, ahead=ahead))
        self.keep(task, lane)
        return task

    def replace(self, key: Hashable, work: Coroutine[Any, Any, Any]) -> None:
        """`start` the work in place of what was begun for this key before: that is cancelled where it still runs."""
        if before := self._by_key.pop(key, None):
            before.cancel()
        task = self._by_key[key] = self.start(work)
        task.add_done_callback(lambda done: self._by_key.get(key) is done and self._by_key.pop(key))

    def keep(self, task: "asyncio.Task[Any]", lane: str | None = BACKGROUND) -> None:
        """Hold the task until it ends; `close` cancels it."""
        self._tasks[task] = lane
        task.add_done_callback(self._tasks.pop)

    async def finish(self) -> None:
        """Wait until the tasks that are under way now have ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _in_lane(context: Context, lane: str | None, *, ahead: bool) -> Context:
    context.run(LANE.set, lane)
    context.run(AHEAD.set, ahead)
    return context
