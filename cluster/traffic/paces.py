"""Which replicas answer far more slowly than the others, so that a router leaves them out until a trial is fast again.

    an answer -> slow, where it took many times what the other replicas usually take -> a breaker for each replica

A replica that still answers, on a core that another process takes or a card that throttles, is neither silent nor full: its own users
would all wait for it. After three slow answers in a row it is left out; after a pause one call is a trial. How long calls usually take is
read from the calls themselves, so no rate or size is assumed. Where more than a third of the replicas are slow, the load is the reason,
and none is left out: the others would only become slow too.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

from cluster.engines.breaker import Breaker, BreakerSettings, BreakerState

TIMES = 4.0
"""An answer that took so many times as long as those of the other replicas is slow."""
LEAST_S = 0.02
"""One that took less than this longer is not, whatever the ratio."""
NEW_S = 60.0
"""A replica that has just come computes the states of its users anew, which may take ten times what it takes to extend them."""
SEEN, ENOUGH = 15, 5
"""Answers that say how long a replica usually takes, and how many must be there."""
AVOIDING = BreakerSettings(failures_to_open=3, pause_s=5.0, growth=2.0, longest_pause_s=60.0)


@dataclass(slots=True)
class _Pace:
    since: float
    breaker: Breaker = field(default_factory=lambda: Breaker(AVOIDING))
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=SEEN))
    usual_s: float | None = None


class Paces:
    """Of the replicas of a deployment, as one process has met them. Times are passed in, in seconds on a clock that only moves forward."""

    def __init__(self, times: float = TIMES) -> None:
        self._times = times
        self._paces: dict[str, _Pace] = {}

    def keep(self, replicas: Iterable[str], now: float) -> None:
        """Take which replicas there are; those known before all others do not count as new."""
        first = not self._paces
        self._paces = {name: self._paces.get(name) or _Pace(now - NEW_S if first else now) for name in replicas}

    def sent(self, replica: str, now: float) -> None:
        """A call goes there. To one that is left out it is a trial, which counts as failed until it is answered in time."""
        pace = self._paces.get(replica)
        if pace and pace.breaker.state(now) is BreakerState.HALF_OPEN:
            pace.breaker = pace.breaker.failed(now)

    def answered(self, replica: str, took_s: float, now: float, *, failed: bool = False) -> None:
        """A call has ended; one that `failed`, or was cancelled, tells only that it took so long."""
        if (pace := self._paces.get(replica)) is None:
            return
        slow = self._is_slow(replica, took_s)
        if failed and not slow:
            return
        if slow and now - pace.since >= NEW_S:
            pace.breaker = pace.breaker.failed(now)
        elif not slow and (pace.breaker.failures or pace.breaker.trial_at is not None):
            pace.breaker = pace.breaker.succeeded()
        pace.took_s.append(took_s)
        pace.usual_s = median(pace.took_s) if len(pace.took_s) >= ENOUGH else None

    def slow(self, now: float) -> frozenset[str]:
        """The replicas to leave out; not among them one that is due for a trial."""
        tried = [name for name, pace in self._paces.items() if pace.breaker.trial_at is not None]
        if not tried or len(tried) > max(1, len(self._paces) // 3):
            return frozenset()
        return frozenset(name for name in tried if self._paces[name].breaker.state(now) is BreakerState.OPEN)

    def _is_slow(self, replica: str, took_s: float) -> bool:
        others = [pace.usual_s for name, pace in self._paces.items() if name != replica and pace.usual_s is not None]
        usual_s = median(others) if others else took_s
        return took_s > self._times * usual_s and took_s > usual_s + LEAST_S
