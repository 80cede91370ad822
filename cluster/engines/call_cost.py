"""How much processor time the next call of an engine will take, by the calls before it."""

import math

FADES = 0.9
"""What is left of an earlier maximum with each later call."""
FEW_ROWS = 16
"""Fewer rows cost hardly less: most of such a call is the call itself."""


class CallCost:
    """A call of n requests is expected to take `first_s + (n - 1) * further_s`: each the maximum of recent calls, which fades slowly, and
    infinite before the first call. One whose longest request has more rows than those of late takes as many times as long.
    """

    def __init__(self) -> None:
        self._first_s = self._further_s = math.inf
        self._longest = float(FEW_ROWS)

    def note(self, requests: int, spent_s: float, longest: int = 1) -> None:
        """A call for so many requests, the longest of so many rows, took so many seconds."""
        self._longest = max(FEW_ROWS, longest, FADES * self._longest)
        if requests == 1:
            self._first_s = _lately(self._first_s, spent_s)
            return
        self._first_s = min(self._first_s, spent_s)
        known = self._further_s < math.inf
        self._further_s = _lately(self._further_s, (spent_s - self._first_s) / (requests - 1) if known else spent_s / requests)

    def expected_s(self, requests: int, longest: int = 1) -> float:
        """Seconds for a call of so many requests, the longest of so many rows."""
        alike_s = self._first_s if requests == 1 else self._first_s + (requests - 1) * self._further_s
        return alike_s if longest <= self._longest else alike_s * longest / self._longest


def _lately(before_s: float, now_s: float) -> float:
    return now_s if before_s == math.inf else max(now_s, FADES * before_s)
