"""Fit the blend on events whose outcome is known: the weights with which the unified list ranks them best.

The lists must be those that serving would make before the event: the retrieved pool and the generated items, without what was seen.
An outcome that no list holds has rank infinity. Temperature is not searched: only (1 - w) / (temperature * w) orders items.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cluster.errors import DataError
from cluster.values import FloatArray, Generated, Int32Array, Int64Array
from pipelines.blend import TEMPERATURE, BlendWeights, Evidence
from pipelines.ranking_metrics import ranking_metrics

UNRANKED = np.iinfo(np.int64).max
GENERATOR_WEIGHTS = tuple(step / 20 for step in range(21))
MARGINS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)
CRITERION = "ndcg@10"
NO_ITEMS, NO_SCORES = np.empty(0, np.int32), np.empty(0, np.float32)

Quality: TypeAlias = Mapping[str, Mapping[str, float]]


class Retrieved(Protocol):
    """Items, best first, and their cosines: `Encoded` or `Candidates`."""

    @property
    def items(self) -> Int32Array: ...
    @property
    def scores(self) -> FloatArray: ...


def fit(
    retrieved: Sequence[Retrieved], generated: Sequence[Generated], targets: Sequence[int], *, temperature: float = TEMPERATURE
) -> tuple[BlendWeights, Quality]:
    """The weights of the best NDCG@10 on these events, and the quality of each strategy with them, as `measure` has it.

    Equal results go to the smaller weight of the generator, then to the smaller margin. Raises DataError where there is no event.
    """
    if not len(targets):
        raise DataError("a blend cannot be fitted without events; hold at least one user's event out")
    events = Events.of(retrieved, generated, targets, temperature)
    grid = [BlendWeights(weight, temperature, margin) for weight, margin in product(GENERATOR_WEIGHTS, MARGINS)]
    quality = [ranking_metrics(events.ranks(weights))[CRITERION] for weights in grid]
    weights = grid[int(np.argmax(quality))]
    return weights, measure(weights, retrieved, generated, targets)


def measure(weights: BlendWeights, retrieved: Sequence[Retrieved], generated: Sequence[Generated], targets: Sequence[int]) -> Quality:
    """The metrics of pipelines/ranking_metrics.py for the strategies retrieval, generative and unified, over all events."""
    ranks = {
        "retrieval": places((one.items for one in retrieved), targets),
        "generative": places((one.items for one in generated), targets),
        "unified": Events.of(retrieved, generated, targets, weights.temperature).ranks(weights),
    }
    return {strategy: ranking_metrics(found) for strategy, found in ranks.items()}


def places(lists: Iterable[Int32Array], targets: Sequence[int]) -> Int64Array:
    """Where each target stands in its list, from 1; UNRANKED where the list lacks it."""
    found = [np.flatnonzero(items == target) for items, target in zip(lists, targets, strict=True)]
    return np.array([place[0] + 1 if len(place) else UNRANKED for place in found], np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Events:
    """The evidence of all events with a target in one of their lists, concatenated; `all` counts the other events too.

    `starts`: where each event's evidence begins; `lengths`: of how many items it is; `wanted`: where its target stands.
    """

    evidence: Evidence
    starts: npt.NDArray[np.intp]
    wanted: npt.NDArray[np.intp]
    lengths: npt.NDArray[np.intp]
    all: int

    @classmethod
    def of(cls, retrieved: Sequence[Retrieved], generated: Sequence[Generated], targets: Sequence[int], temperature: float) -> "Events":
        parts, places = [], []
        for ours, theirs, target in zip(retrieved, generated, targets, strict=True):
            part = Evidence.of((ours.items, ours.scores), (theirs.items, theirs.log_probs), temperature)
            if len(place := np.flatnonzero(part.items == target)):
                parts.append(part)
                places.append(int(place[0]))
        lengths = np.array([len(part.items) for part in parts], np.intp)
        starts = (np.cumsum(lengths) - lengths).astype(np.intp)
        return cls(_joined(parts), starts, starts + np.array(places, np.intp), lengths, len(targets))

    def ranks(self, weights: BlendWeights) -> Int64Array:
        """The rank the blend gives each target (all,), in no particular order; as in the blend, what stands first wins a tie."""
        ranks = np.full(self.all, UNRANKED, np.int64)
        if len(self.starts):
            scores = self.evidence.scores(weights)
            rivals = np.repeat(scores[self.wanted], self.lengths)
            earlier = np.arange(len(scores)) < np.repeat(self.wanted, self.lengths)
            better = (scores > rivals) | (earlier & (scores == rivals))
            ranks[: len(self.starts)] = np.add.reduceat(better, self.starts, dtype=np.int64) + 1
        return ranks


def _joined(parts: Sequence[Evidence]) -> Evidence:
    nothing = Evidence.of((NO_ITEMS, NO_SCORES), (NO_ITEMS, NO_SCORES), TEMPERATURE)
    every = [nothing, *parts]
    return Evidence(
        np.concatenate([part.items for part in every]),
        np.concatenate([part.retrieval for part in every]),
        np.concatenate([part.generation for part in every]),
        np.concatenate([part.named for part in every]),
    )
