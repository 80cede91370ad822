"""Batches for an engine: requests of similar numbers of rows, limited by number, padded size and waiting time."""

import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from math import inf
from time import monotonic
from typing import Generic, Protocol, TypeVar

from cluster import tracing
from cluster.config import BatchingSettings
from cluster.traffic.adaptive_limit import AdaptiveLimit
from cluster.traffic.batcher import Batcher, Member, Pacing

AHEAD_S = 0.1
"""Where the latest batch took longer, the next one is not made up ahead: the engine idles only for a small part of the time, and a request
is not computed for a caller that left longer ago.
"""
MADE_UP_AFTER_S = 0.002
"""How long a batch is computed before the next one is made up: one that takes less time is over before more would wait."""
SEVERAL = 4
"""A batch that takes so many times as long as foretold by the one before it may have had more rows to compute than were foreseen."""
GATHER_S = 0.001
"""How long a request waits for as many others as there were in the latest batch: they are likely to be on their way, and each batch costs
as much as several requests in it.
"""
TOO_LATE = "the time was over while the request waited for a batch"


class Due(Protocol):
    """A request with a `deadline` on this process's monotonic clock; None where it has none."""

    @property
    def deadline(self) -> float | None: ...


Request = TypeVar("Request", bound=Due)
Answer = TypeVar("Answer")
Watch = Callable[[Sequence[int], Sequence[float]], None]
"""A function that is called with each batch as it starts: the rows of its requests, and the seconds that each has waited."""


def engine_batcher(
    compute: Callable[[list[Request]], Awaitable[Sequence[Answer]]],
    limits: BatchingSettings,
    rows: Callable[[Request], int],
    too_late: Callable[[], Answer],
    watch: Watch,
    *,
    most_rows: Callable[[Request], int] | None = None,
    one_by_one: Callable[[], bool] = lambda: False,
) -> Batcher[Request, Answer]:
    """Make batches of the request that has waited longest, and those of similar size. Requests that arrive while a batch is
    computed form the next one. The first request waits for others only while the engine is idle: `max_wait_ms`, or GATHER_S if that is
    longer and the latest batch had more requests than wait now. The next batch is made up while the engine's thread works on the first, and
    follows it at once, without the event loop, which may be busy with other requests. That is done where batches are short: what is made up
    is computed, whether or not its callers leave meanwhile.

    `compute` answers a batch with one answer for each request, in order. `rows`: how many rows a request takes up; `most_rows`: how many
    it may take where that is a forecast, so that one batch that took long for many rows is not taken for one of few. Requests past their
    deadlines, or past them before their batch can end, are not computed, as they would cost the others time: they get the answer of
    `too_late`. `one_by_one`: whether the engine makes batches itself at present; each request is then given to it at once, alone; neither
    it nor any later batch waits for those the engine still has.
    """
    batches = EngineBatches(compute, BatchLimits(limits), too_late, watch, most_rows, one_by_one)
    pacing = Pacing(max_running=batches.most_running, wait_s=limits.max_wait_ms / 1e3, gather_s=GATHER_S, overlap_after_s=MADE_UP_AFTER_S)
    return Batcher(batches.run, batches.choose, batches.most, pacing=pacing, size=rows)


@dataclass(slots=True, eq=False)
class EngineBatches(Generic[Request, Answer]):
    """How a Batcher chooses, paces and runs an engine's batches. It does not refer to the Batcher, which is thus in no cycle, and gone as
    soon as nothing submits to it, without a garbage collection.

    `_alone`: whether requests go to the engine one by one, as of the batcher's latest step; `_given_alone`: how many such it still has.
    """

    compute: Callable[[list[Request]], Awaitable[Sequence[Answer]]]
    limits: "BatchLimits"
    too_late: Callable[[], Answer]
    watch: Watch
    most_rows: Callable[[Request], int] | None
    one_by_one: Callable[[], bool]
    _alone: bool = field(init=False, default=False)
    _given_alone: int = field(init=False, default=0)

    def choose(self, sizes: Sequence[int]) -> Sequence[int]:
        self._alone = self.one_by_one()  # asked here, where each step of the batcher begins
        return [0] if self._alone else alike(sizes, self.limits.next)

    def most(self) -> int:
        return 1 if self._alone else self.limits.next.max_requests

    def most_running(self) -> int:
        return sys.maxsize if self._alone else self._given_alone + (2 if self.limits.took_s < AHEAD_S else 1)

    async def run(self, members: Sequence[Member[Request, Answer]]) -> Sequence[Answer]:
        counts = int(self._alone)
        self._given_alone += counts
        try:
            return await self._answers_of(members)
        finally:
            self._given_alone -= counts

    async def _answers_of(self, members: Sequence[Member[Request, Answer]]) -> Sequence[Answer]:
        now, sizes = monotonic(), [member.size for member in members]
        self.watch(sizes, [now - member.since for member in members])
        requests = [member.request for member in members]
        deadlines = [inf if request.deadline is None else request.deadline for request in requests]
        left = [size for size, deadline in zip(sizes, deadlines, strict=True) if deadline > now]
        ends = self.limits.earliest_end(max(left, default=0) * len(left), now)
        timely = [deadline > ends for deadline in deadlines]
        with tracing.joined_span("batch", [member.trace for member in members], requests=len(members), longest=max(sizes)):
            answers = iter(await self.compute(list(compress(requests, timely))) if any(timely) else ())
            if any(timely):  # that nothing was computed says nothing of how long it takes
                count, rows_each = sum(timely), max(compress(sizes, timely))
                most_each = max(map(self.most_rows, compress(requests, timely))) if self.most_rows else rows_each
                self.limits.after(count, count * rows_each, count * most_each, now)
            return [next(answers) if in_time else self.too_late() for in_time in timely]


class BatchLimits:
    """`next`: those of the next batch, as configured, but fewer requests while batches take longer than `target_ms`. `took_s`: the
    engine's time for the latest batch, infinity before the first.
    """

    def __init__(self, limits: BatchingSettings) -> None:
        self.next, self.took_s = limits, inf
        self._ended, self._latest = 0.0, deque[tuple[float, int]](maxlen=2)
        self._before_s, self._rows_before = inf, 1  # of the batch before, by the rows that were foreseen
        self._adaptive = None if limits.target_ms is None else AdaptiveLimit(limits.max_requests, limits.target_ms / 1e3)

    def after(self, requests: int, rows: int, most_rows: int, began: float) -> None:
        """Adapt the limits to one more batch, of so many requests and rows, padding among them, which has ended now. The engine took it up
        when it `began`, or when the batch before it had ended. A batch that takes over SEVERAL times as long as the one before suggests is
        recorded with `most_rows`: users' kept states may be gone. Where the next one takes as long, the engine is slow.
        """
        began, self._ended = max(began, self._ended), monotonic()
        self.took_s = self._ended - began
        expected_s = self._before_s * max(1.0, rows / self._rows_before)
        self._latest.append((self.took_s, most_rows if self.took_s > SEVERAL * expected_s else rows))
        self._before_s, self._rows_before = self.took_s, max(1, rows)
        if self._adaptive is None:
            return
        self._adaptive = self._adaptive.after(self.took_s, self._ended, full=requests >= self._adaptive.places)
        if self._adaptive.places != self.next.max_requests:
            self.next = self.next.model_copy(update={"max_requests": self._adaptive.places})

    def earliest_end(self, rows: int, now: float) -> float:
        """When a batch of so many rows that begins now ends at the earliest, by the latest two: by both, so that one stall deters no
        request; one of fewer rows in their part of the time. The longer the engine has had nothing to do since, the less they still say.
        """
        if len(self._latest) < 2:
            return now
        takes_s = min(took_s * min(1.0, rows / max(1, rows_then)) for took_s, rows_then in self._latest)
        return now + max(0.0, takes_s - (now - self._ended))


def alike(rows: Sequence[int], limits: BatchingSettings) -> list[int]:
    """Which of the waiting requests, of so many `rows` each, go into one batch: positions, ascending. The first is always among them.

    The others are those nearest to it in length, as long as the batch's padded size, longest x number, is within the limits, and so is its
    padding: at most `free_padding` rows or, where that is more, the share `max_padding`.
    """
    if not rows:
        return []
    if len(rows) <= limits.max_requests and _fits(max(rows), len(rows), sum(rows), limits):
        return list(range(len(rows)))
    chosen, total, longest = [0], rows[0], rows[0]
    for position in sorted(range(1, len(rows)), key=lambda one: abs(rows[one] - rows[0])):
        if len(chosen) == limits.max_requests:
            break
        if _fits(max(longest, rows[position]), len(chosen) + 1, total + rows[position], limits):
            chosen.append(position)
            total, longest = total + rows[position], max(longest, rows[position])
    return sorted(chosen)


def _fits(longest: int, requests: int, rows: int, limits: BatchingSettings) -> bool:
    padded = longest * requests
    return padded <= limits.max_tokens and padded - rows <= max(limits.free_padding, limits.max_padding * padded)
