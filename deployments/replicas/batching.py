"""Join requests that wait for one engine into batches of similar length, limited by number, padded size and waiting time."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from opentelemetry.trace import SpanContext

from cluster import tracing
from cluster.config import BatchingSettings

Request = TypeVar("Request")
Answer = TypeVar("Answer")
Watch = Callable[[Sequence[int], Sequence[float]], None]
"""Called with each batch as it starts: the rows of its requests, and the seconds that each has waited."""


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Request, Answer]):
    request: Request
    tokens: int
    arrived: float
    answer: asyncio.Future[Answer]
    trace: SpanContext | None


def alike(tokens: Sequence[int], limits: BatchingSettings) -> list[int]:
    """Which of the waiting requests, of `tokens` rows each, go into one batch: positions, ascending. The first is always among them.

    The others are those nearest to it in length, as long as the batch's padded size, longest x number, is within the limits, and what of it
    is padding: `free_padding` rows or, where that is more, the share `max_padding`.
    """
    if not tokens:
        return []
    if len(tokens) <= limits.max_requests and _fits(max(tokens), len(tokens), sum(tokens), limits):
        return list(range(len(tokens)))
    chosen, rows, longest = [0], tokens[0], tokens[0]
    for position in sorted(range(1, len(tokens)), key=lambda one: abs(tokens[one] - tokens[0])):
        if len(chosen) == limits.max_requests:
            break
        if _fits(max(longest, tokens[position]), len(chosen) + 1, rows + tokens[position], limits):
            chosen.append(position)
            rows, longest = rows + tokens[position], max(longest, tokens[position])
    return sorted(chosen)


def _fits(longest: int, requests: int, rows: int, limits: BatchingSettings) -> bool:
    padded = longest * requests
    return padded <= limits.max_tokens and padded - rows <= max(limits.free_padding, limits.max_padding * padded)


class MicroBatcher(Generic[Request, Answer]):
    """Serve requests in batches: the one that has waited longest, and those of similar length.

    `run` answers a batch with one answer per request, in order. One batch runs at a time; requests that arrive meanwhile form the next one,
    so `max_wait_ms` is spent only while the engine is idle and few requests wait.
    """

    def __init__(
        self,
        run: Callable[[list[Request]], Awaitable[Sequence[Answer]]],
        limits: BatchingSettings,
        tokens: Callable[[Request], int],
        watch: Watch | None = None,
    ) -> None:
        self._run, self._limits, self._tokens, self._watch = run, limits, tokens, watch
        self._waiting: list[_Waiting[Request, Answer]] = []
        self._arrival = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait for a batch."""
        return len(self._waiting)

    async def submit(self, request: Request) -> Answer:
        """The answer to one request; raises what `run` raised on its batch. A caller that is cancelled leaves the queue."""
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        place = _Waiting(request, self._tokens(request), time.perf_counter(), answer, tracing.here())
        self._waiting.append(place)
        self._arrival.set()
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        return await place.answer

    async def _work(self) -> None:
        """Ends with the last request, so that no worker outlives its model."""
        while self._waiting:
            await self._company()
            if batch := self._take():
                self._tell(batch)
                await self._serve(batch)

    async def _company(self) -> None:
        """Wait until a batch is full or its first request has waited long enough."""
        deadline = self._waiting[0].arrived + self._limits.max_wait_ms / 1000
        while (left := deadline - time.perf_counter()) > 0 and not self._full():
            self._arrival.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):  # `wait_for` would begin a task for it
                    await self._arrival.wait()

    def _full(self) -> bool:
        count = len(alike([place.tokens for place in self._waiting], self._limits))
        return count < len(self._waiting) or count == self._limits.max_requests

    def _take(self) -> list[_Waiting[Request, Answer]]:
        self._waiting = [place for place in self._waiting if not place.answer.done()]
        chosen = set(alike([place.tokens for place in self._waiting], self._limits))
        taken = [place for position, place in enumerate(self._waiting) if position in chosen]
        self._waiting = [place for position, place in enumerate(self._waiting) if position not in chosen]
        return taken

    def _tell(self, batch: list[_Waiting[Request, Answer]]) -> None:
        if self._watch:
            now = time.perf_counter()
            self._watch([place.tokens for place in batch], [now - place.arrived for place in batch])

    async def _serve(self, batch: list[_Waiting[Request, Answer]]) -> None:
        traces, longest = [place.trace for place in batch], max(place.tokens for place in batch)
        try:
            with tracing.joined_span("batch", traces, requests=len(batch), longest=longest):
                answers = await self._run([place.request for place in batch])
            outcomes = list(zip(batch, answers, strict=True))
        except Exception as error:  # noqa: BLE001 - every error belongs to the callers of this batch
            for place in batch:
                if not place.answer.done():
                    place.answer.set_exception(error)
            return
        for place, answer in outcomes:
            if not place.answer.done():
                place.answer.set_result(answer)
