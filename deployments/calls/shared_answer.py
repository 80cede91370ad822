"""One answer for all that ask within a moment, so that questions from outside cost no remote call each."""

import asyncio
from collections.abc import Callable, Coroutine
from time import monotonic
from typing import Any, Generic, TypeVar

from cluster.background import no_requests_context

T = TypeVar("T")


class SharedAnswer(Generic[T]):
    """The answer of `ask`, which is called at most once in `fresh_s` seconds on `clock` and must not raise. A caller that leaves disturbs
    no other. To be made outside of requests: `ask` runs in that context.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], fresh_s: float, clock: Callable[[], float] = monotonic) -> None:
        self._ask, self._fresh_s, self._clock = ask, fresh_s, clock
        self._asking: asyncio.Task[T] | None = None
        self._began = 0.0
        self._context = no_requests_context()

    async def get(self) -> T:
        if self._asking is None or (self._asking.done() and self._clock() - self._began >= self._fresh_s):
            self._began, self._asking = self._clock(), asyncio.create_task(self._ask(), context=self._context)
        return await asyncio.shield(self._asking)
