"""Work that several callers wait for, and work that nobody waits for, on one event loop.

A flight is a task of its own: a caller that goes away does not take it down, and its error reaches each caller that is still there.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
T = TypeVar("T")


class SingleFlight(Generic[KeyT, T]):
    """At most one computation of a key at a time; whoever comes later joins it."""

    def __init__(self) -> None:
        self._flights: dict[KeyT, asyncio.Task[T]] = {}
        self._running: set[asyncio.Task[T]] = set()  # the loop itself keeps tasks by weak references only

    def get(self, key: KeyT) -> "asyncio.Task[T] | None":
        """The one under way. Await it under `asyncio.shield`."""
        return self._flights.get(key)

    def start(self, key: KeyT, compute: Callable[[], Coroutine[Any, Any, T]]) -> "asyncio.Task[T]":
        """A new one, which later callers join."""
        flight = asyncio.get_running_loop().create_task(compute())
        self._flights[key] = flight
        self._running.add(flight)
        flight.add_done_callback(lambda done: self._landed(key, done))
        return flight

    def detach(self, concerned: Callable[[KeyT], bool]) -> None:
        """Nobody joins these any more; who waits for one still gets its answer."""
        for key in [key for key in self._flights if concerned(key)]:
            del self._flights[key]

    def _landed(self, key: KeyT, flight: "asyncio.Task[T]") -> None:
        self._running.discard(flight)
        if self._flights.get(key) is flight:
            del self._flights[key]
        if not flight.cancelled():
            flight.exception()  # or the loop reports it as never retrieved where all callers went away


class Background:
    """Tasks that nobody waits for, at most `limit` at a time; `dropped` counts those there was no room for."""

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self._limit, self._tasks, self._closed = limit, set[asyncio.Task[Any]](), False

    def __len__(self) -> int:
        return len(self._tasks)

    def has_room(self) -> bool:
        """Whether one more may begin; counted as dropped where not."""
        if self._closed or len(self._tasks) >= self._limit:
            self.dropped += 1
            return False
        return True

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
