"""How many requests to work on at a time, found from how long they take: a value, with time passed in.

More at a time raise the throughput while engines join them into batches; beyond that they only wait for each other, up to where every
answer comes too late. The limit follows the mean duration (exponentially weighted):

    at the start       limit + 1 for each answer while all places are taken, which doubles it in a round trip, until the mean is too long
    mean > target      limit x target / mean, at least half of it, once in a round trip: durations grow with what is under way.
                       A quick answer lowers nothing: after a stall, its late answers keep the mean high for a while
    mean <= target     limit + 1 / sqrt(limit) for each answer while all places are taken: sqrt(limit) in a round trip

A start with all places would take in seconds of work before the first answer says how long one takes. The last is the square-root rule of
staffing: so many places above the load keep a server busy through random arrivals.
"""

from math import inf, sqrt

from msgspec import Struct
from msgspec.structs import replace

_WEIGHT = 0.1
_FEWEST = 1 / 16
_FIRST = 16.0


class AdaptiveLimit(Struct, frozen=True):
    """`most` places, at least a sixteenth of them; durations and `target_s` in seconds on one clock that only moves forward."""

    most: int
    target_s: float
    exact: float | None = None
    mean_s: float | None = None
    lowered_at: float = -inf

    @property
    def places(self) -> int:
        """Requests that may be under way."""
        return int(self._limit)

    @property
    def lowered(self) -> bool:
        """Whether answers have taken too long."""
        return self.lowered_at > -inf

    def after(self, took_s: float, now: float, *, full: bool) -> "AdaptiveLimit":
        """The limit after one more answer, `took_s` after its request was admitted; `full`: all places were taken until now."""
        mean_s = took_s if self.mean_s is None else self.mean_s + _WEIGHT * (took_s - self.mean_s)
        limit = self._limit
        if mean_s <= self.target_s:
            return replace(self, mean_s=mean_s, exact=self._bounded(limit + full * (1 / sqrt(limit) if self.lowered else 1)))
        if took_s <= self.target_s or now - took_s < self.lowered_at:  # quick, or begun under the larger limit
            return replace(self, mean_s=mean_s)
        lowered = self._bounded(limit * max(0.5, self.target_s / mean_s))
        return replace(self, mean_s=self.target_s, exact=lowered, lowered_at=now)  # the old mean would lower it again

    @property
    def _limit(self) -> float:
        return self._bounded(_FIRST if self.exact is None else self.exact)

    def _bounded(self, limit: float) -> float:
        return min(float(self.most), max(limit, self.most * _FEWEST, 1.0))
