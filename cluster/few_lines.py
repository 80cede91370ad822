"""Lines of a log that any request may cause: a few a second, and how many were left out."""

from collections.abc import Callable
from time import monotonic

MOST_PER_S = 10


class FewLines:
    """Lines of one kind, MOST_PER_S a second; those beyond are only counted. `clock` gives seconds."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._second, self._told, self._left_out = -1, 0, 0

    def more(self) -> str | None:
        """What the line is to say of those left out before it, "" where none were; None where the line itself is to be left out."""
        second = int(self._clock())
        self._told = self._told + 1 if second == self._second else 1
        self._second = second
        if self._told > MOST_PER_S:
            self._left_out += 1
            return None
        more = f" ({self._left_out} more before it)" if self._left_out else ""
        self._left_out = 0
        return more
