"""Work that requests share, or that outlives them: its context, and what holds its tasks."""

import asyncio
from collections.abc import Coroutine
from contextvars import Context, copy_context
from math import inf
from typing import Any, TypeVar

from cluster import tracing

T = TypeVar("T")


def no_requests_context() -> Context:
    """A context to make tasks in. It is taken where an object is made, which is to be outside of requests: Serve cancels the calls that
    were made in a cancelled request's context, also those that other requests wait for.
    """
    return copy_context()


class Background:
    """Tasks that no request waits for, at most `limit` at a time; `dropped` counts those there was no room for. To be made outside of
    requests: what it starts has that context.
    """

    def __init__(self, limit: float = inf) -> None:
        self.dropped = 0
        self._limit, self._tasks, self._closed = limit, set[asyncio.Task[Any]](), False
        self._context = no_requests_context()

    def __len__(self) -> int:
        return len(self._tasks)

    def has_room(self) -> bool:
        """Whether one more may begin; counted as dropped where not."""
        if self._closed or len(self._tasks) >= self._limit:
            self.dropped += 1
            return False
        return True

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Begin it, in the caller's trace and in no request's context, and `keep` it."""
        task = asyncio.get_running_loop().create_task(work, context=tracing.continued_in(self._context))
        self.keep(task)
        return task

    def keep(self, task: "asyncio.Task[Any]") -> None:
        """Hold it until it ends, or cancel it at `close`."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
