"""How many requests may be sent twice: a share of those that were sent once, so that retries cannot make an overload worse.

After Finagle's RetryBudget (a share of a window's requests, and a few that are always allowed), with one difference: the greater of the two
counts, not their sum. By the sum, 20 % and 10 a second would let 100 requests a second become 130.
"""

import time
from collections import deque
from collections.abc import Callable

HURRIED = 0.5
"""The part of what is allowed that copies may take which a request's own short deadline makes due."""
SLOTS = 20
"""Into how many slots a window is divided; it moves on slot by slot."""


class RetryBudget:
    """At most `share` of the requests of the last `window_s` seconds may be sent again, or `least_per_s` each second where that is more.

    One for each deployment called, in each process. `clock`: seconds on any clock that only moves forward.
    """

    def __init__(
        self, share: float = 0.2, least_per_s: float = 1.0, window_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.share, self._least, self._clock = share, least_per_s * window_s, clock
        self._requests, self._retries, self._hurried = _Lately(window_s), _Lately(window_s), _Lately(window_s)
        self.granted = self.refused = 0

    def request(self) -> None:
        """Count a request, when it is sent the first time."""
        self._requests.add(self._clock())

    def take(self, *, hurried: bool = False) -> bool:
        """Whether a request may be sent again now; if so, it is counted. `hurried`: because of its own short deadline, for which all of
        these together may take `HURRIED` of what is allowed.
        """
        now = self._clock()
        most = max(self._least, self.share * self._requests.count(now))
        allowed = self._retries.count(now) + 1 <= most and not (hurried and self._hurried.count(now) + 1 > HURRIED * most)
        if allowed:
            self._retries.add(now)
            if hurried:
                self._hurried.add(now)
        self.granted, self.refused = self.granted + allowed, self.refused + (not allowed)
        return allowed


class _Lately:
    """A count over the last `window_s` seconds, give or take a slot."""

    def __init__(self, window_s: float) -> None:
        self._slot_s = window_s / SLOTS
        self._slots: deque[list[int]] = deque()  # [slot, count], oldest first
        self._total = 0

    def add(self, now: float) -> None:
        slot = int(now / self._slot_s)
        if not self._slots or self._slots[-1][0] != slot:
            self.count(now)  # drops old slots: as long as no retry is asked for, nothing else does
            self._slots.append([slot, 0])
        self._slots[-1][1] += 1
        self._total += 1

    def count(self, now: float) -> int:
        oldest = int(now / self._slot_s) - SLOTS
        while self._slots and self._slots[0][0] <= oldest:
            self._total -= self._slots.popleft()[1]
        return self._total
