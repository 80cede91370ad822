"""Lines of a log that any request may cause: a few at a time, and how many were left out."""

from collections.abc import Callable
from time import monotonic

MOST_PER_S = 10
TOLD_EVERY_S = 60.0
"""How often a lasting state is told, such as a store that does not answer."""


class FewLines:
    """Lines of one kind, `most` in `within_s` seconds; those beyond are only counted. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic, *, most: int = MOST_PER_S, within_s: float = 1.0) -> None:
        self._clock, self._most, self._within_s = clock, most, within_s
        self._period, self._told, self._left_out = -1, 0, 0

    def more(self) -> str | None:
        """What the line is to say of those left out before it, "" where none were; None where the line itself is to be left out."""
        period = int(self._clock() // self._within_s)
        self._told = self._told + 1 if period == self._period else 1
        self._period = period
        if self._told > self._most:
            self._left_out += 1
            return None
        more = f" ({self._left_out} more before it)" if self._left_out else ""
        self._left_out = 0
        return more
