"""The share of recent time in which something was busy, from the seconds that it has been busy since its start."""

from collections import deque

WINDOW_S = 5.0


class Utilisation:
    """The share of the last `window_s`, 0 where nothing was done. `now`: seconds on a clock that only moves forward."""

    def __init__(self, now: float, busy_s: float = 0.0, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._seen = deque([(now, busy_s)])

    def share(self, now: float, busy_s: float) -> float:
        """The share of one core, or thread. Work counts when it ends, with all its seconds."""
        while len(self._seen) > 1 and self._seen[1][0] <= now - self._window_s:
            self._seen.popleft()
        began, before = self._seen[0]
        self._seen.append((now, busy_s))
        return max(0.0, busy_s - before) / (now - began) if now > began else 0.0
