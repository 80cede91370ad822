"""When to ask a second time before the first answer is there: a slow replica then costs what most requests take, and not its own time.

    ask -> no answer after the p95 of recent answers -> ask another replica -> the first answer counts, the other call is cancelled

After Dean and Barroso, "The Tail at Scale" (2013): a copy after the 95th percentile costs at most 5 % more work, which a budget of its own
keeps true when all replicas are slow at once.
"""

import math
import time
from collections.abc import Callable

from cluster.traffic.latency import LatencyRecorder, percentile_ms
from cluster.traffic.retry_budget import RetryBudget

QUANTILE = 0.95
SHARE = 0.05
ENOUGH = 100
"""Answers that must have been seen before their 95th percentile says something."""
WINDOW_S = 30.0
LOOK_EVERY_S = 1.0
LEAST_S = 0.005


class Durations:
    """How long answers took lately. `clock`: seconds on any clock that only moves forward."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._latency = clock, LatencyRecorder(clock(), WINDOW_S)
        self._looked_at, self._p95_s = clock(), math.inf

    def answered(self, duration_s: float) -> None:
        self._latency.record(duration_s * 1e3, self._clock())

    def p95_s(self) -> float:
        """The 95th percentile of recent answers, up to a second old; infinite while there are fewer than ENOUGH."""
        now = self._clock()
        if now - self._looked_at >= LOOK_EVERY_S:
            self._looked_at, buckets = now, self._latency.summary(now).buckets
            p95_ms = percentile_ms(buckets, QUANTILE)
            self._p95_s = math.inf if p95_ms is None or sum(buckets) < ENOUGH else max(LEAST_S, p95_ms / 1e3)
        return self._p95_s


class Hedge:
    """For requests that any replica answers the same, and that change nothing. At most `share` of them are sent twice.

    `on` may be set at any time. `sent`: copies, counted by the code that sends them.
    """

    def __init__(self, *, on: bool = True, share: float = SHARE, clock: Callable[[], float] = time.monotonic) -> None:
        self.on, self._budget = on, RetryBudget(share, least_per_s=0.0, clock=clock)
        self.sent = 0

    def request(self) -> None:
        """Count a request, when it is sent the first time."""
        self._budget.request()

    def take(self) -> bool:
        """Whether a copy may be sent now; if so, it is taken from the share."""
        return self.on and self._budget.take()
