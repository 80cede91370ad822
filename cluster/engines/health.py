"""The health of one backend: its breaker, its last error, and its figures."""

import logging
import threading
from collections.abc import Callable

from cluster.traffic.breaker import Breaker, BreakerSettings, BreakerState
from cluster.traffic.latency import LatencyRecorder, LatencySummary
from cluster.values import SkippedBackend

LOADING = "is being loaded"
logger = logging.getLogger(__name__)


class Health:
    """`calls` counts requests, `answers` those that were answered, `failures` those it broke on; some are neither, as late ones.
    `told`: `last_error` as callers read it.

    `suspected` says whether one failure is enough to open the breaker.
    """

    def __init__(self, name: str, breaker: BreakerSettings, clock: Callable[[], float]) -> None:
        self.last_error = self.told = ""
        self.calls = self.answers = self.failures = 0
        self.suspected: Callable[[], bool] = lambda: False
        self._name, self._breaker, self._clock = name, Breaker(breaker), clock
        self._latency, self._latency_lock = LatencyRecorder(clock()), threading.Lock()

    @property
    def state(self) -> BreakerState:
        return self._breaker.state(self._clock())

    @property
    def breaker_closed(self) -> bool:
        """Whether the breaker lets every call through."""
        return self.state is BreakerState.CLOSED

    def obstacle(self) -> SkippedBackend | None:
        """The reason that the breaker lets no call through now; None where it lets one through."""
        if self.state is not BreakerState.OPEN:
            return None
        return self.skipped(f"{self.told}; next trial in {self._breaker.wait_s(self._clock()):.1f} s", failed=True)

    def unready(self) -> SkippedBackend:
        """The reason that the backend waits to be loaded, or loaded anew if it broke."""
        return self.skipped(LOADING) if self.breaker_closed else self.skipped(f"{self.told}; it is being loaded again", failed=True)

    def broke(self, *, calls: int = 1, at_once: bool = False) -> None:
        """Count so many broken calls in a row; with `at_once` they open the breaker, however few they are."""
        self._breaker = self._breaker.failed(self._clock(), calls=calls, at_once=at_once or self.suspected())

    def succeeded(self) -> None:
        """The backend is sound: close the breaker, and count failures from 0."""
        self._breaker = self._breaker.succeeded()

    def record(self, duration_s: float, calls: int = 1) -> None:
        """Count `calls` calls that were answered together in `duration_s`."""
        self.answers += calls
        with self._latency_lock:
            self._latency.record(duration_s * 1e3, self._clock(), calls)

    def latency(self) -> LatencySummary:
        with self._latency_lock:
            return self._latency.summary(self._clock())

    def note(self, reason: str, error: Exception | None = None, *, told: str = "") -> SkippedBackend:
        """Note what is wrong, log it where it is new, and return it as a reason. `told`: the text for callers, where `reason` may hold
        data of another user, or the place of a file.
        """
        if reason != self.last_error:
            logger.warning("backend %s %s", self._name, reason, exc_info=error)
        self.last_error, self.told = reason, told or reason
        return self.skipped(self.told, failed=True)

    def skipped(self, reason: str, *, failed: bool = False) -> SkippedBackend:
        return SkippedBackend(self._name, reason, failed)
