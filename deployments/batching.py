"""Join requests that wait for one engine into batches, by number, padded size and waiting time."""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.config import BatchingSettings

Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Request, Answer]):
    request: Request
    tokens: int
    arrived: float
    answer: asyncio.Future[Answer]


def fitting(tokens: Sequence[int], limits: BatchingSettings) -> int:
    """How many of the first waiting requests, of `tokens` behaviours each, go into one batch: at least one.

    What counts is the padded size, longest x number, since that is what the engine computes.
    """
    longest = 0
    for count, length in enumerate(tokens[: limits.max_requests], start=1):
        longest = max(longest, length)
        if count > 1 and longest * count > limits.max_tokens:
            return count - 1
    return min(len(tokens), limits.max_requests)


class MicroBatcher(Generic[Request, Answer]):
    """Serve requests in order of arrival, several at a time.

    `run` answers a batch with one answer per request, in order. One batch runs at a time; what arrives meanwhile forms the next one, so
    that `max_wait_ms` is only ever spent while the engine would idle and few are waiting.
    """

    def __init__(
        self,
        run: Callable[[list[Request]], Awaitable[Sequence[Answer]]],
        limits: BatchingSettings,
        tokens: Callable[[Request], int],
    ) -> None:
        self._run, self._limits, self._tokens = run, limits, tokens
        self._waiting: deque[_Waiting[Request, Answer]] = deque()
        self._arrival = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait for a batch."""
        return len(self._waiting)

    async def submit(self, request: Request) -> Answer:
        """The answer to one request; raises what `run` raised on its batch. A caller that is cancelled leaves the queue."""
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        place = _Waiting[Request, Answer](request, self._tokens(request), time.perf_counter(), asyncio.get_running_loop().create_future())
        self._waiting.append(place)
        self._arrival.set()
        return await place.answer

    async def _work(self) -> None:
        while True:
            await self._company()
            batch = self._take()
            if batch:
                await self._serve(batch)

    async def _company(self) -> None:
        """Wait for a first request, then until a batch is full or its first request has waited long enough."""
        while not self._waiting:
            self._arrival.clear()
            await self._arrival.wait()
        deadline = self._waiting[0].arrived + self._limits.max_wait_ms / 1000
        while not self._full() and (left := deadline - time.perf_counter()) > 0:
            self._arrival.clear()
            try:
                await asyncio.wait_for(self._arrival.wait(), left)
            except TimeoutError:
                return

    def _full(self) -> bool:
        count = fitting([place.tokens for place in self._waiting], self._limits)
        return count < len(self._waiting) or count == self._limits.max_requests

    def _take(self) -> list[_Waiting[Request, Answer]]:
        while self._waiting and self._waiting[0].answer.done():
            self._waiting.popleft()
        count = fitting([place.tokens for place in self._waiting], self._limits)
        taken = [self._waiting.popleft() for _ in range(count)]
        return [place for place in taken if not place.answer.done()]

    async def _serve(self, batch: list[_Waiting[Request, Answer]]) -> None:
        try:
            answers = await self._run([place.request for place in batch])
            outcomes = list(zip(batch, answers, strict=True))
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the callers of this batch
            for place in batch:
                if not place.answer.done():
                    place.answer.set_exception(error)
            return
        for place, answer in outcomes:
            if not place.answer.done():
                place.answer.set_result(answer)
