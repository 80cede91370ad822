"""Work that several callers wait for, on one event loop.

A flight is a task of its own, in the context of no caller: a caller that leaves does not end it while others wait, and its error reaches
each of them. The flight is cancelled with the last caller that waits. It has its turns in the lane of the caller that begins it, or for
which it is begun ahead, whichever callers join it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

from cluster.background import AHEAD, LANE, continued_in, no_requests_context
from cluster.errors import BackendUnavailable

KeyT = TypeVar("KeyT", bound=Hashable)
T = TypeVar("T")


class Flight(Generic[KeyT, T]):
    """One computation, and how many wait for it."""

    __slots__ = ("key", "task", "waiting")

    def __init__(self, key: KeyT, task: "asyncio.Task[T]", waiting: int) -> None:
        self.key, self.task, self.waiting = key, task, waiting


class SingleFlight(Generic[KeyT, T]):
    """At most one computation of a key at a time; later callers join it. To be made outside of requests: computations have that context."""

    def __init__(self) -> None:
        self._flights: dict[KeyT, Flight[KeyT, T]] = {}
        self._running: set[asyncio.Task[T]] = set()  # the loop itself keeps tasks by weak references only
        self._context = no_requests_context()

    def get(self, key: KeyT) -> Flight[KeyT, T] | None:
        """The key's flight that is under way, to `wait` for; None where there is none."""
        return self._flights.get(key)

    def start(self, key: KeyT, compute: Callable[[], Coroutine[Any, Any, T]], *, waiting: int = 0) -> Flight[KeyT, T]:
        """A new flight, which later callers join. `waiting`: how many wait for it already and never leave: 1 for background work, which is
        `AHEAD`.
        """
        context = continued_in(self._context, LANE.get(), ahead=AHEAD.get() or waiting > 0)
        task = asyncio.get_running_loop().create_task(compute(), context=context)
        flight = self._flights[key] = Flight(key, task, waiting)
        self._running.add(flight.task)
        flight.task.add_done_callback(lambda done: self._landed(flight, done))
        return flight

    async def wait(self, flight: Flight[KeyT, T]) -> T:
        """The flight's answer. Where the last caller that waits is cancelled, so is the flight, and the next caller begins another. Raises
        BackendUnavailable where the flight alone was cancelled, as when this process ends.
        """
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if flight.task.cancelled() and caller is not None and not caller.cancelling():
                raise BackendUnavailable("what others computed too was given up here: this process ends") from None
            raise
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                flight.task.cancel()
                self._drop(flight)

    def detach(self, concerned: Callable[[KeyT], bool]) -> None:
        """Have no more callers join the concerned flights; callers that wait for one still get its answer."""
        for key in [key for key in self._flights if concerned(key)]:
            del self._flights[key]

    def _landed(self, flight: Flight[KeyT, T], task: "asyncio.Task[T]") -> None:
        self._running.discard(task)
        self._drop(flight)
        if not task.cancelled():
            task.exception()  # or the loop reports it as never retrieved where all callers went away

    def _drop(self, flight: Flight[KeyT, T]) -> None:
        if self._flights.get(flight.key) is flight:
            del self._flights[flight.key]
