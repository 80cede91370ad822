"""The clock by which the switchboard tells which processes live and which are silent."""

from collections.abc import Callable
from time import monotonic, time


def steady(day: Callable[[], float] = time, running: Callable[[], float] = monotonic) -> Callable[[], float]:
    """A clock in seconds since 1970 that starts at the system's time and goes on evenly where that is set anew later."""
    began = day() - running()
    return lambda: began + running()
