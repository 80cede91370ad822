"""The share of recent time in which something was busy, from the seconds that it has been busy since its start."""

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from threading import Lock, get_ident
from time import clock_gettime, pthread_getcpuclockid
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
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


class Uncounted:
    """Work in other threads that no request asked for, so that its processor time can be left out of what a process is busy with."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._under_way = dict[int, float]()  # a thread's clock -> what it said when the work began
        self._lock = Lock()

    @property
    def spent_s(self) -> float:
        """Seconds of processor time so far, those of work that goes on included."""
        with self._lock:
            return self._ended_s + sum(clock_gettime(clock) - began for clock, began in self._under_way.items())

    async def run(self, work: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """What the work returns, or the error that it raises."""
        return await asyncio.to_thread(self._timed, partial(work, *args, **kwargs))

    def _timed(self, work: Callable[[], T]) -> T:
        clock = pthread_getcpuclockid(get_ident())
        with self._lock:
            self._under_way[clock] = clock_gettime(clock)
        try:
            return work()
        finally:
            with self._lock:
                self._ended_s += clock_gettime(clock) - self._under_way.pop(clock)
