"""The order in which large bodies are read."""

import asyncio
from dataclasses import dataclass
from math import inf
from time import monotonic

from starlette.exceptions import HTTPException

from deployments.http.connection import SMALL
from deployments.http.problems import overloaded


@dataclass(eq=False, slots=True)
class _Body:
    """One that waits to be read: before it, `start` bytes are read of its lane's, as lanes take turns."""

    start: float
    size: int
    read: asyncio.Future[None]


class ReadingQueue:
    """Bodies that are slow to read are read one after the other, `per_s` bytes of them a second. Lanes take turns by bytes, as in
    start-time fair queueing (Goyal, Vin and Cheng, 1996): next is the body with the lowest `start`, and a lane that comes begins at that
    of the body that is being read. What it does not use is not kept for it.
    """

    def __init__(self, per_s: float) -> None:
        self.per_s = per_s
        self._waiting = list[_Body]()  # as they came
        self._ends: dict[str | None, float] = {}  # lane -> where its next body starts; of those alone that are not at rest
        self._start, self._until = 0.0, -inf  # of the body that is read now
        self._timer: asyncio.TimerHandle | None = None  # while others wait

    async def wait(self, lane: str | None, size: int, within_s: float) -> None:
        """Returns when a body of the lane's is to be read. Raises HTTPException (503) where that is not within so many seconds: at once
        where those before it take longer, and later where other lanes have come meanwhile.
        """
        now = monotonic()
        if not self._waiting and self._until <= now:
            self._ends, self._until = {lane: float(size)}, now
            self._read(0.0, size)
            return
        start = max(self._start, self._ends.get(lane, 0.0))
        wait_s = self._until - now + sum(other.size for other in self._waiting if other.start <= start) / self.per_s
        if wait_s > within_s:
            raise self._too_late(wait_s)
        body = _Body(start, size, asyncio.get_running_loop().create_future())
        self._ends[lane] = start + size
        self._waiting.append(body)
        self._wake()
        try:
            async with asyncio.timeout(within_s):
                await body.read
        except TimeoutError:
            raise self._too_late(within_s) from None
        finally:
            if body in self._waiting:  # the time is over, or the client has left: another is read in its place
                self._waiting.remove(body)
                if lane in self._ends:
                    self._ends[lane] -= size
                self._wake()

    def _read(self, start: float, size: int) -> None:
        self._start = start
        self._until += size / self.per_s

    def _next(self) -> None:
        self._timer = None
        there = [body for body in self._waiting if not body.read.done()]  # the others leave just now
        if there:
            body = min(there, key=lambda one: one.start)
            self._waiting.remove(body)
            self._read(body.start, body.size)
            self._ends = {lane: end for lane, end in self._ends.items() if end > body.start}
            body.read.set_result(None)
            self._wake()

    def _wake(self) -> None:
        """Have the next one read when the one before it is done, if any waits."""
        if self._timer is None and self._waiting:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, self._until - monotonic()), self._next)
        elif self._timer is not None and not self._waiting:
            self._timer.cancel()
            self._timer = None

    def _too_late(self, wait_s: float) -> HTTPException:
        told = f"batches, events and bodies with values to convert, of more than {SMALL} bytes, are read at {self.per_s:.0f} bytes a second"
        return overloaded(f"{told}, and others are before this one; ask again later, or in smaller parts", wait_s)
