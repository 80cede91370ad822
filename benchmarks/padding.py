"""How full batches are, by how they are chosen: users of a data set's lengths, or geometric ones, who wait in random order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from benchmarks.turns import Contender, Turn, run_in_turns
from cluster.config import BatchingSettings
from cluster.errors import DataError
from cluster.registry import DATASETS, choose
from cluster.values import Int64Array
from cluster.window import Window
from deployments.replicas.batching import alike

LIMITS = BatchingSettings()
WAITING = (32, 128)
"""How many requests wait whenever a batch is formed."""
LEAST, MEAN = 20, 106
"""Events of a user, as in MovieLens-100K."""
BATCHING_COLUMNS = ("waiting", "batching", "requests a batch", "padding", "choosing (us a request)")


@dataclass(frozen=True, slots=True)
class Padding:
    """How full batches are: `wasted` is the share of their rows that is padding, `choosing_us` the time to choose it, per request."""

    batching: str
    waiting: int
    requests_per_batch: float
    wasted: float
    choosing_us: float


def mix_of(data: Path | None, history: int) -> tuple[str, list[int]]:
    """What the mix of lengths is, and how many events of each user an engine is given, in random order."""
    name, events = lengths_of(data) if data else ("geometric", geometric())
    window = Window.of(history)
    lengths = [count - window.start(count) for count in np.random.default_rng(0).permutation(events).tolist()]
    least, median, mean, most = min(lengths), np.median(lengths), np.mean(lengths), max(lengths)
    text = f"{name}: {len(lengths)} users of {least} to {most} events (median {median:.0f}, mean {mean:.0f}) in a window of {history}"
    return text, lengths


def lengths_of(data: Path) -> tuple[str, Int64Array]:
    """Raises DataError where it holds neither data set."""
    refusals = []
    for name in ("ml-100k", "ml-1m"):
        try:
            return f"{name}, users' lengths", choose("dataset", DATASETS, name)(data).interactions.lengths
        except DataError as error:
            refusals.append(str(error))
    raise DataError("; ".join(refusals))


def geometric() -> Int64Array:
    return LEAST - 1 + np.random.default_rng(1).geometric(1 / (MEAN - LEAST + 1), 1000).astype(np.int64)


Chooses: TypeAlias = Callable[[Sequence[int]], list[int]]
"""Lengths of the waiting requests -> positions of those that form the next batch."""


def first_come(tokens: Sequence[int]) -> list[int]:
    """In the order of their arrival, as many as the batch's number and padded size allow."""
    longest = np.maximum.accumulate(tokens[: LIMITS.max_requests])
    fits = longest * np.arange(1, len(longest) + 1) <= LIMITS.max_tokens
    return list(range(max(1, int(fits.sum()))))


def chosen_alike(tokens: Sequence[int]) -> list[int]:
    return alike(tokens, LIMITS)


def nearest_in_length(tokens: Sequence[int]) -> list[int]:
    """However much padding they need."""
    return alike(tokens, LIMITS.model_copy(update={"max_padding": 1.0}))


BATCHINGS: dict[str, Chooses] = {
    "first come": first_come,
    "alike, any padding": nearest_in_length,
    f"alike, max_padding {LIMITS.max_padding:g}": chosen_alike,
}


def batches(lengths: Sequence[int], choice: Chooses, waiting: int) -> list[list[int]]:
    """Users in batches, while so many wait as there are users left."""
    queue, rest, formed = list(range(len(lengths)))[:waiting], iter(range(waiting, len(lengths))), []
    while queue:
        positions = set(choice([lengths[user] for user in queue]))
        formed.append([queue[position] for position in sorted(positions)])
        queue = [user for position, user in enumerate(queue) if position not in positions]
        queue += [user for _, user in zip(formed[-1], rest, strict=False)]
    return formed


def padded(lengths: Sequence[int], waiting: int, rounds: int) -> Iterator[Padding]:
    def into(choice: Chooses) -> Turn:
        return lambda _: sum(map(len, batches(lengths, choice, waiting)))

    contenders = [Contender(name, into(choice)) for name, choice in BATCHINGS.items()]
    run_in_turns(contenders, max(3, rounds // 10))
    for contender, choice in zip(contenders, BATCHINGS.values(), strict=True):
        formed = batches(lengths, choice, waiting)
        rows = sum(len(batch) * max(lengths[user] for user in batch) for batch in formed)
        per_batch, wasted = len(lengths) / len(formed), 1 - sum(lengths) / rows
        yield Padding(contender.name, waiting, per_batch, wasted, float(np.median(contender.us)))


def batching_row(one: Padding) -> list[str]:
    return [str(one.waiting), one.batching, f"{one.requests_per_batch:.1f}", f"{one.wasted:.1%}", f"{one.choosing_us:.1f}"]
