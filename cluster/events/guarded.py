"""An event store on a request's path: opened when it can be, asked within a time limit, left alone for a while when it keeps failing.

Reading is part of every answer, so it has a limit and a breaker. Writing has neither: a writer is told how it ended, however long that
takes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import TypeVar

from cluster.engines.breaker import Breaker, BreakerSettings, BreakerState
from cluster.errors import BackendUnavailable
from cluster.events.store import Batches, Event, EventStore, Loaded, Stored, StoredHistory, StoredUser, StoreStatistics, open_event_store

T = TypeVar("T")
BREAKER = BreakerSettings(failures_to_open=3, pause_s=1.0, longest_pause_s=10.0)


class GuardedEventStore:
    """The store at `url`; one that is away now is opened by the first call after it is back. For one event loop.

    `read_within_s` bounds `version`, `history` and `users`. All methods raise as an EventStore's do.
    """

    def __init__(
        self,
        url: str,
        read_within_s: float,
        *,
        clock: Callable[[], float] = monotonic,
        open_store: Callable[[str], Awaitable[EventStore]] = open_event_store,
    ) -> None:
        self._url, self._read_within_s, self._clock, self._open_store = url, read_within_s, clock, open_store
        self.name = url.partition("://")[0]
        self._breaker, self._problem = Breaker(BREAKER), ""
        self._opening: asyncio.Task[EventStore] | None = None

    async def open(self) -> str:
        """Open the store; why that is not possible now, or ""."""
        try:
            await self._opened()
        except BackendUnavailable as error:
            return str(error)
        return ""

    async def append(self, events: Sequence[Event]) -> list[Stored]:
        return await (await self._opened()).append(events)

    async def history(self, tenant: str, user_id: str, limit: int) -> StoredHistory:
        return await self._read(lambda store: store.history(tenant, user_id, limit))

    async def version(self, tenant: str, user_id: str) -> str:
        return await self._read(lambda store: store.version(tenant, user_id))

    async def erase(self, tenant: str, user_id: str) -> int:
        return await (await self._opened()).erase(tenant, user_id)

    async def digest(self, tenant: str, user_id: str) -> str:
        return await (await self._opened()).digest(tenant, user_id)

    async def load(self, batches: Batches) -> Loaded:
        return await (await self._opened()).load(batches)

    async def users(self, tenant: str, limit: int) -> list[StoredUser]:
        return await self._read(lambda store: store.users(tenant, limit))

    async def statistics(self) -> StoreStatistics:
        return await (await self._opened()).statistics()

    async def close(self) -> None:
        if self._opening is None:
            return
        if not self._opening.done():
            self._opening.cancel()
        elif not self._opening.cancelled() and self._opening.exception() is None:
            await self._opening.result().close()

    async def _read(self, question: Callable[[EventStore], Awaitable[T]]) -> T:
        if self._breaker.state(self._clock()) is BreakerState.OPEN:
            raise BackendUnavailable(f"{self._problem}; it is asked again in {self._breaker.wait_s(self._clock()):.1f} s")
        try:
            async with asyncio.timeout(self._read_within_s):
                answer = await question(await self._opened())
        except TimeoutError:
            raise self._failed(f"the event store ({self.name}) did not answer within {self._read_within_s:g} s") from None
        except BackendUnavailable as error:
            raise self._failed(str(error)) from error
        self._breaker = self._breaker.succeeded()
        return answer

    def _failed(self, problem: str) -> BackendUnavailable:
        self._breaker, self._problem = self._breaker.failed(self._clock()), problem
        return BackendUnavailable(problem)

    async def _opened(self) -> EventStore:
        """The store. Calls made while it is being opened wait for the same attempt, which goes on when a caller leaves."""
        if self._opening is None or (self._opening.done() and (self._opening.cancelled() or self._opening.exception())):
            self._opening = asyncio.ensure_future(self._open_store(self._url))
            self._opening.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, though all callers may have left
        return await asyncio.shield(self._opening)
