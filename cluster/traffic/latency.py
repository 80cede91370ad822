"""How long calls take and how many there are: a histogram of fixed buckets, so that those of many replicas add up.

Bucket i holds durations up to `0.01 ms * 10 ** (i / 16)`: from 10 microseconds to 1000 seconds in steps of 15.5 %, which is how exact a
percentile is. Percentiles are those of the most recent calls (one to two `window_s`), and stay when traffic stops.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, zip_longest

SMALLEST_MS = 0.01
BUCKETS_PER_DECADE = 16
LAST_BUCKET = 8 * BUCKETS_PER_DECADE
THROUGHPUT_WINDOW_S = 30


def bucket_of(duration_ms: float) -> int:
    """The first bucket whose upper bound is not below the duration."""
    if duration_ms <= SMALLEST_MS:
        return 0
    return min(LAST_BUCKET, math.ceil(math.log10(duration_ms / SMALLEST_MS) * BUCKETS_PER_DECADE - 1e-9))


def upper_bound_ms(bucket: int) -> float:
    return float(SMALLEST_MS * 10 ** (bucket / BUCKETS_PER_DECADE))


def percentile_ms(buckets: Sequence[int], share: float) -> float | None:
    """The duration that `share` (0..1) of the calls did not exceed, None where there were none."""
    total = sum(buckets)
    if not total:
        return None
    rank = max(1, math.ceil(share * total))
    return round(upper_bound_ms(next(bucket for bucket, seen in enumerate(accumulate(buckets)) if seen >= rank)), 3)


@dataclass(frozen=True, slots=True)
class LatencySummary:
    """`count` calls since the start; `per_second` over the last half minute; `buckets` to merge by (trailing zeros left off)."""

    count: int = 0
    per_second: float = 0.0
    buckets: tuple[int, ...] = ()

    @property
    def p50_ms(self) -> float | None:
        return percentile_ms(self.buckets, 0.50)

    @property
    def p95_ms(self) -> float | None:
        return percentile_ms(self.buckets, 0.95)

    @property
    def p99_ms(self) -> float | None:
        return percentile_ms(self.buckets, 0.99)

    def as_json(self) -> dict[str, float | None]:
        """The figures to show; `count` is left to the caller, whose counters say more."""
        return {"p50_ms": self.p50_ms, "p95_ms": self.p95_ms, "p99_ms": self.p99_ms, "throughput_per_s": self.per_second}


def merge(summaries: Iterable[LatencySummary]) -> LatencySummary:
    """What one replica would have measured, had it served all the calls."""
    several = list(summaries)
    buckets = tuple(sum(column) for column in zip_longest(*(summary.buckets for summary in several), fillvalue=0))
    return LatencySummary(sum(summary.count for summary in several), sum(summary.per_second for summary in several), buckets)


class LatencyRecorder:
    """The calls of one replica. `now` is in seconds on a clock that only moves forward."""

    def __init__(self, now: float, window_s: float = 300.0) -> None:
        self._started, self._window_s = now, window_s
        self._count = 0
        self._window_began = now
        self._recent: Counter[int] = Counter()
        self._before: Counter[int] = Counter()
        self._per_second: Counter[int] = Counter()

    def record(self, duration_ms: float, now: float, calls: int = 1) -> None:
        """`calls` calls that were answered together at `now`, each having taken `duration_ms`."""
        if (passed_s := now - self._window_began) >= self._window_s:
            self._before = self._recent if passed_s < 2 * self._window_s else Counter()
            self._recent, self._window_began = Counter(), now
        self._count += calls
        self._recent[bucket_of(duration_ms)] += calls
        self._per_second[int(now)] += calls
        for second in [second for second in self._per_second if second <= now - THROUGHPUT_WINDOW_S]:
            del self._per_second[second]

    def summary(self, now: float) -> LatencySummary:
        both = self._recent + self._before
        buckets = tuple(both[bucket] for bucket in range(max(both, default=-1) + 1))
        lately = sum(calls for second, calls in self._per_second.items() if second > now - THROUGHPUT_WINDOW_S)
        return LatencySummary(self._count, round(lately / min(THROUGHPUT_WINDOW_S, max(1.0, now - self._started)), 3), buckets)
