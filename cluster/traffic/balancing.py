"""Which replica a request without a home goes to: the least loaded one, or by weights the one that is soonest done.

    loads (requests under way, by replica) -> the replicas in the order to try them

Power of two choices, Serve's default, reads two replicas' loads; these read all of them, which the router's cache holds anyway.
"""

from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from random import Random
from typing import TypeGuard


def least_loaded(loads: Mapping[str, int], random: Random) -> list[str]:
    """The replicas with the fewest requests first; equals in an order drawn anew each time, so that routers do not all choose the same."""
    return _by(lambda replica: loads[replica], loads, random)


def weighted(loads: Mapping[str, int], weights: Mapping[str, object], random: Random) -> list[str]:
    """The replicas by the delay to expect there, (requests + 1) / weight, shortest first; equals as drawn.

    Under load each has requests in proportion to its weight; with little of it, the heaviest serve. The formula is that of "shortest
    expected delay" in Linux Virtual Server (Zhang, 2000).
    """
    complete = filled(loads, weights)
    return _by(lambda replica: (loads[replica] + 1) / complete[replica], loads, random)


def filled(replicas: Iterable[str], weights: Mapping[str, object]) -> dict[str, float]:
    """A weight for each of `replicas`: its own or, where that is no finite number above 0, the others' mean; 1 if none has one."""
    known = {name: float(weight) for name in replicas if _is_weight(weight := weights.get(name))}
    mean = sum(known.values()) / len(known) if known else 1.0
    return {name: known.get(name, mean) for name in replicas}


def _is_weight(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value) and value > 0


def _by(key: Callable[[str], float], replicas: Iterable[str], random: Random) -> list[str]:
    return sorted(replicas, key=lambda replica: (key(replica), random.random()))
