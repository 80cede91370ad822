"""What users of a service do, drawn from a seed: they come back, and between two requests of a user something happens to that user.

A visit is an event and, a while later, a request. A user's next event comes as long after that request as the request after its event.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

MEDIAN_GAP_S, SPREAD = 5.0, 0.8
"""Seconds between an event and the user's next request, lognormal: half of them are shorter."""
MEAN_GAP_S = MEDIAN_GAP_S * float(np.exp(SPREAD**2 / 2))


@dataclass(frozen=True, slots=True, order=True)
class Step:
    """At `due`, in seconds from the beginning, user number `user` meets the item (an index from 0), or asks (`item` None)."""

    due: float
    user: int
    item: int | None = None


def visits(requests_per_s: float, seconds: float, items: int, seed: int = 0) -> list[Step]:
    """In order. So many users take part that together they ask so often; each begins at a moment of its own."""
    users = max(1, round(requests_per_s * 2 * MEAN_GAP_S))
    rngs = np.random.default_rng(seed).spawn(users)
    return sorted(step for user, rng in enumerate(rngs) for step in _of(user, rng, seconds, items))


def _of(user: int, rng: np.random.Generator, seconds: float, items: int) -> Iterator[Step]:
    due = rng.uniform(0, 2 * MEAN_GAP_S)
    while due < seconds:
        yield Step(due, user, int(rng.integers(items)))
        due += _gap(rng)
        if due < seconds:
            yield Step(due, user)
        due += _gap(rng)


def _gap(rng: np.random.Generator) -> float:
    return float(rng.lognormal(np.log(MEDIAN_GAP_S), SPREAD))
