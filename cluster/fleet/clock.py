"""The time by which a process that keeps boards tells others that live from others that are silent."""

from collections.abc import Callable
from time import monotonic, time


def steady(day: Callable[[], float] = time, running: Callable[[], float] = monotonic) -> Callable[[], float]:
    """A clock in seconds since 1970 as the system's clock has them now; where that is set anew later, this one goes on as before."""
    began = day() - running()
    return lambda: began + running()
