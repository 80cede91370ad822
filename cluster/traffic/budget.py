"""The time of a request: one deadline for all its steps, each of which gets the time that is left.

arrival ---- history ---- encoder ---- generator ---- blend, titles ---- deadline
"""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from msgspec.structs import replace

from cluster.errors import DeadlineExceeded
from cluster.values import RecommendRequest

T = TypeVar("T")
FINISH_S = 0.005
"""The time that no step gets: after the last one, the answer is still to be put together and sent."""


def started(request: RecommendRequest, clock: Callable[[], float] = monotonic) -> RecommendRequest:
    """The request with its time running: from its arrival where that is known, else from now."""
    if request.deadline is not None or request.deadline_ms is None:
        return request
    return replace(request, deadline=clock() + request.deadline_ms / 1000)


def unhurried(request: RecommendRequest) -> RecommendRequest:
    """The same request without a deadline, for a computation in the background."""
    return replace(request, deadline_ms=None, deadline=None)


@dataclass(frozen=True, slots=True)
class Budget:
    """The time until `deadline`, in seconds on `clock`; None: there is no limit but each step's own."""

    deadline: float | None = None
    clock: Callable[[], float] = monotonic

    def left_s(self) -> float:
        """The seconds that are left; negative once the time is over."""
        return math.inf if self.deadline is None else self.deadline - self.clock()

    def within(self, most_s: float) -> float:
        """How many seconds a step that begins now may take: those that are left, at most `most_s`; 0.0 where none are."""
        return max(0.0, min(most_s, self.left_s() - FINISH_S))


async def in_time(work: Callable[[], Awaitable[T]], within_s: float, until: float | None = None) -> T:
    """The result of `work` within that many seconds (inf: without a timer), or by `until` on the loop's clock where its time runs already.
    Raises DeadlineExceeded where the work does not end in time, or there is no time to begin.
    """
    if within_s == math.inf:
        return await work()
    if within_s <= 0:
        raise DeadlineExceeded("no time was left for it")
    limit = asyncio.timeout(within_s) if until is None else asyncio.timeout_at(until)
    try:
        async with limit:
            return await work()
    except TimeoutError:
        if not limit.expired():  # a TimeoutError of the work's own is no lack of time here
            raise
        raise DeadlineExceeded(f"it was not done within {within_s * 1000:.0f} ms") from None


async def each_in_time(parts: AsyncIterator[T], within_s: float) -> AsyncGenerator[T, None]:
    """The parts that come within that many seconds from the first request for one. Raises DeadlineExceeded once they are over.

    Only the waiting is under the time limit: a limit around a `yield` would cancel the caller while it uses a part.
    """
    deadline = asyncio.get_running_loop().time() + within_s
    try:
        while True:
            try:
                part = await in_time(lambda: anext(parts), within_s, deadline)
            except StopAsyncIteration:
                return
            yield part
    finally:
        if isinstance(parts, AsyncGenerator):
            await parts.aclose()
