"""Histories for answers: read within a time limit, from a store that is left alone for a while when it keeps failing.

A caller that asks for a history itself waits for its turn with them, and then as long as the store takes, as one that writes events does.
"""

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import TypeVar

from cluster.background import Background
from cluster.engines.skipped import kind_of
from cluster.errors import BackendUnavailable
from cluster.events.read_turns import ReadTurns
from cluster.events.store import Histories, StoredHistory
from cluster.traffic.breaker import Breaker, BreakerSettings, BreakerState

T = TypeVar("T")
BREAKER = BreakerSettings(failures_to_open=3, pause_s=1.0, longest_pause_s=10.0)


class GuardedHistories:
    """The histories of `store`, each read within `within_s` seconds from its turn, for which it waits as long at most. `turns`: of all that
    is read of the store. Raises BackendUnavailable where a read takes longer and, without asking, while the store is left alone, or one
    read tries whether it is back; DeadlineExceeded where no turn comes; else as the store does. For one event loop.

    A turn that does not come says nothing about the store, unless another read for an answer takes too long meanwhile. Nor does a read that
    its caller gives up, so one like it goes on without a caller: a store that hangs is found out even where every request is in a hurry.
    """

    def __init__(
        self, store: Histories, within_s: float, turns: ReadTurns | None = None, *, clock: Callable[[], float] = monotonic
    ) -> None:
        self._store, self._within_s, self._clock = store, within_s, clock
        self._turns = turns or ReadTurns()
        self.name = store.name
        self._silent = f"the event store ({self.name}) did not answer within {within_s:g} s"
        self._breaker, self._problem = Breaker(BREAKER), ""
        self._trial = Background(1)  # a read for the breaker alone, which no request's end cuts short

    async def history(self, tenant: str, user_id: str, limit: int, until: int | None = None) -> StoredHistory:
        return await self._read(tenant, lambda: self._store.history(tenant, user_id, limit, until))

    async def version(self, tenant: str, user_id: str) -> str:
        return await self._read(tenant, lambda: self._store.version(tenant, user_id))

    async def _read(self, tenant: str, question: Callable[[], Awaitable[T]]) -> T:
        self._refuse_if_open()
        if self._breaker.state(self._clock()) is BreakerState.CLOSED:
            try:
                return await self._asked(tenant, question)
            except asyncio.CancelledError:
                if self._trial.has_room():
                    self._try(question)
                raise
        if not self._trial.has_room():
            raise BackendUnavailable(f"{self._problem}; one request is trying it again")
        return await asyncio.shield(self._try(question))

    def _try(self, question: Callable[[], Awaitable[T]]) -> asyncio.Task[T]:
        trial = self._trial.start(self._asked(None, question))
        trial.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, though its caller may have left
        return trial

    async def _asked(self, tenant: str | None, question: Callable[[], Awaitable[T]]) -> T:
        async def in_turn() -> T:
            self._refuse_if_open()  # by reads that had their turn before this one
            try:
                return await question()
            except BackendUnavailable as error:
                raise self._failed(kind_of(error)) from error

        try:
            answer = await self._turns.read_for_answer(tenant, in_turn, self._within_s)
        except TimeoutError:
            raise self._failed(self._silent) from None
        self._breaker = self._breaker.succeeded()
        return answer

    def _refuse_if_open(self) -> None:
        if self._breaker.state(self._clock()) is BreakerState.OPEN:
            raise BackendUnavailable(f"{self._problem}; it is asked again in {self._breaker.wait_s(self._clock()):.1f} s")

    def _failed(self, problem: str) -> BackendUnavailable:
        self._breaker, self._problem = self._breaker.failed(self._clock()), problem
        return BackendUnavailable(problem)
