"""How much processor time the next call of an engine will take, by the calls before it."""

import math

FADES = 0.9
"""What is left of an earlier maximum with each later call."""


class CallCost:
    """A call is expected to take the most that calls of its size took, which fades slowly with each of them. Calls are of one size where
    their numbers of requests have as many binary digits, and their numbers of rows, too. Before the first of its size a call is expected to
    take at most as long as a larger one, and as many times as long as a smaller one as it has more requests or rows. So about a factor of
    two is left open.
    """

    def __init__(self) -> None:
        self._most_s: dict[tuple[int, int], float] = {}

    def note(self, requests: int, rows: int, spent_s: float) -> None:
        """A call for so many requests, of so many rows altogether, took so many seconds."""
        size = requests.bit_length(), rows.bit_length()
        self._most_s[size] = max(spent_s, FADES * self._most_s.get(size, 0.0))

    def expected_s(self, requests: int, rows: int) -> float:
        """Seconds for a call of so many requests, of so many rows altogether; infinity before the first call."""
        size = requests.bit_length(), rows.bit_length()
        if (most_s := self._most_s.get(size)) is not None:
            return most_s
        doublings = ((max(0, size[0] - of[0], size[1] - of[1]), most_s) for of, most_s in self._most_s.items())
        return min((most_s * 2**times for times, most_s in doublings), default=math.inf)
