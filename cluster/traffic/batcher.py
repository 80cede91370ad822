"""Have requests that wait go together: into an engine, or to another process in one call.

    submit -> waits, as its Pacing says -> goes with others that wait, as `choose` says -> its own answer

A step chooses a batch, starts it if it is due, else sets a timer for when it is; all else prepares or follows a step. Each member of a
batch has an answer of its own; only the failure of the whole batch is every member's.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from contextvars import Context
from dataclasses import dataclass
from time import monotonic
from typing import Any, Generic, TypeVar

from opentelemetry.trace import SpanContext

from cluster import tracing
from cluster.errors import BackendFailed

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class Raised:
    """In place of an answer: the error that this request came to."""

    error: Exception


@dataclass(slots=True, eq=False)
class Member(Generic[RequestT, AnswerT]):
    """A request that waits since `since`, on this process's monotonic clock: for `wait_s`, unless it goes earlier in a full batch, or with
    one that waits less. `trace`: its place in its trace, where it is traced.
    """

    request: RequestT
    size: int
    since: float
    trace: SpanContext | None
    answer: asyncio.Future[AnswerT]
    wait_s: float = 0.0

    def end(self, outcome: AnswerT | Raised) -> None:
        """Answer the request, unless it has its answer or its caller has left."""
        if self.answer.done():
            return
        if isinstance(outcome, Raised):
            self.answer.set_exception(outcome.error)
        else:
            self.answer.set_result(outcome)


@dataclass(frozen=True, slots=True)
class Pacing:
    """When the next batch begins."""

    max_running: Callable[[], int] = lambda: 1
    """How many batches run at a time."""
    wait_s: float = 0.0
    """While no batch runs, the first request waits this long for others; 0: it goes with those of the same turn of the loop."""
    gather_s: float = 0.0
    """While no batch runs, wait this long at most until as many requests wait as the latest batch had; after a batch of one, not at all."""
    overlap_after_s: float = 0.0
    """The latest batch runs this long before the next begins beside it, unless that one is full."""
    patience_s: float = math.inf
    """A batch that runs for longer no longer holds others up."""


class Batcher(Generic[RequestT, AnswerT]):
    """For one event loop. `run` answers a batch: one answer or Raised for each member, in order; it may `end` members before that.

    `choose` gets the sizes of all that wait, the longest-waiting first, and returns the positions of the next batch: ascending, 0 among
    them, at most `most()`. `size`: of a request. `cancel_when_all_left`: a batch is cancelled once some of its members have left and all
    others have their answers. `context`: in which batches run; None: that of the request that starts the batch. `idle`: called when nothing
    waits or runs.
    """

    def __init__(
        self,
        run: Callable[[Sequence[Member[RequestT, AnswerT]]], Awaitable[Sequence[AnswerT | Raised]]],
        choose: Callable[[Sequence[int]], Sequence[int]],
        most: Callable[[], int],
        *,
        pacing: Pacing = Pacing(),
        size: Callable[[RequestT], int] = lambda _: 1,
        cancel_when_all_left: bool = False,
        context: Context | None = None,
        idle: Callable[[], object] = lambda: None,
    ) -> None:
        self._run, self._choose, self._most, self._size = run, choose, most, size
        self._pacing, self._context, self._idle = pacing, context, idle
        self._cancel_when_all_left = cancel_when_all_left
        self._waiting: list[Member[RequestT, AnswerT]] = []
        self._running: dict[asyncio.Task[None], tuple[float, int]] = {}  # when each began, and how many members it has; the oldest first
        self._latest = 0  # members of the latest batch
        self._steps_soon = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """How many requests wait: for a batch, or in one behind the batch that began first."""
        return len(self._waiting) + sum([members for _, members in self._running.values()][1:])

    @property
    def under_way(self) -> int:
        """How many requests wait or are in a batch that runs."""
        return len(self._waiting) + sum(members for _, members in self._running.values())

    def submit(self, request: RequestT, wait_s: float = 0.0) -> asyncio.Future[AnswerT]:
        """A future of the answer or the error. A caller that leaves cancels it. `wait_s`: how long the request may wait for others."""
        loop = asyncio.get_running_loop()
        member = Member(request, self._size(request), monotonic(), tracing.here(), loop.create_future(), wait_s)
        self._waiting.append(member)
        if not self._steps_soon:
            self._steps_soon = True
            loop.call_soon(self._step, context=self._context)
        return member.answer

    def _step(self) -> None:
        """Start what waits, as far as it may start now: after arrivals, when a batch has ended, and when one is due."""
        self._steps_soon = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._waiting = [member for member in self._waiting if not member.answer.done()]
        while self._waiting:
            chosen = self._choose([member.size for member in self._waiting])
            if (due := self._due(len(chosen))) > monotonic():
                self._step_at(due)
                return
            self._start(self._taken(chosen))
        if not self._running:
            self._idle()

    def _due(self, count: int) -> float:
        """When the next batch, of so many members, may begin; infinity: when one that runs has ended."""
        pacing = self._pacing
        lately = [began for began, _ in self._running.values() if monotonic() - began < pacing.patience_s]
        if len(lately) >= pacing.max_running():
            return lately[0] + pacing.patience_s
        if count < len(self._waiting) or count == self._most():
            return 0.0
        patient = min(member.since + member.wait_s for member in self._waiting)
        if self._running:
            return max(patient, max(began for began, _ in self._running.values()) + pacing.overlap_after_s)
        wait_s = pacing.wait_s if count >= self._latest else max(pacing.wait_s, pacing.gather_s)
        return max(patient, self._waiting[0].since + wait_s)

    def _step_at(self, due: float) -> None:
        if due < math.inf:  # else the end of a batch is the next step
            self._timer = asyncio.get_running_loop().call_later(due - monotonic(), self._step, context=self._context)

    def _taken(self, chosen: Sequence[int]) -> list[Member[RequestT, AnswerT]]:
        """The members at these positions, which then wait no longer."""
        waiting, positions = self._waiting, set(chosen)
        self._waiting = [member for position, member in enumerate(waiting) if position not in positions]
        return [waiting[position] for position in chosen]

    def _start(self, members: Sequence[Member[RequestT, AnswerT]]) -> None:
        batch = asyncio.get_running_loop().create_task(self._serve(members), context=self._context)
        self._running[batch] = monotonic(), len(members)
        self._latest = len(members)
        batch.add_done_callback(self._ended, context=self._context)
        if self._cancel_when_all_left:
            _cancel_once_all_have_left(batch, members)

    def _ended(self, batch: asyncio.Task[None]) -> None:
        del self._running[batch]
        self._step()

    async def _serve(self, members: Sequence[Member[RequestT, AnswerT]]) -> None:
        try:
            outcomes = list(zip(members, await self._run(members), strict=True))
        except asyncio.CancelledError:  # all members have left, or a call within was cancelled elsewhere, as by a replica that is stopped
            outcomes = [(member, Raised(BackendFailed("its batch was cancelled"))) for member in members]
        except Exception as error:  # noqa: BLE001 - every error of the whole batch belongs to its members
            outcomes = [(member, Raised(error)) for member in members]
        for member, outcome in outcomes:
            member.end(outcome)


def _cancel_once_all_have_left(batch: asyncio.Task[None], members: Sequence[Member[Any, Any]]) -> None:
    waiting = len(members)

    def done(_: asyncio.Future[Any]) -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting and any(member.answer.cancelled() for member in members):  # else the batch is about to end by itself
            batch.cancel()

    for member in members:
        member.answer.add_done_callback(done)
