"""A list of items on its way through the pipeline, with the report of the stage that made it."""

import time
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from cluster.stages import Stage
from cluster.values import FloatArray, Int32Array, SkippedBackend, StageReport

NO_BACKEND = "none"
"""In the report of a stage that no backend served, in place of the backend's name."""


class Candidates(Struct, frozen=True, eq=False):
    """Items that may be recommended, best first, with their scores, the report of the stage that ranked them, and whether that degrades the
    answer. `states`: the user's, (T, D), where an encoder made the list and gives them. A list that is not `complete` holds the items found
    so far; the complete list that follows may lack some of them.
    """

    items: Int32Array
    scores: FloatArray
    report: StageReport
    degraded: bool = False
    states: FloatArray | None = None
    complete: bool = True

    @classmethod
    def not_asked(cls, stage: Stage[Any, Any], reason: str, *, degraded: bool = False) -> "Candidates":
        """The empty list of a stage that could not be asked, with the reason."""
        report = StageReport(stage.step, NO_BACKEND, 0.0, (SkippedBackend(stage.name, reason),))
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), report, degraded)

    @classmethod
    def asked_in_vain(cls, step: str, reasons: tuple[SkippedBackend, ...], began: float) -> "Candidates":
        """The empty list of a stage that was asked at `began`, by time.perf_counter, and gave no answer: that degrades the whole answer."""
        report = StageReport(step, NO_BACKEND, (time.perf_counter() - began) * 1000, reasons)
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), report, degraded=True)

    @property
    def served(self) -> bool:
        return self.report.backend != NO_BACKEND

    def at(self, positions: npt.NDArray[Any] | list[int] | slice) -> "Candidates":
        """The items at these positions, in their order, or those that a boolean mask selects."""
        return Candidates(self.items[positions], self.scores[positions], self.report, self.degraded, self.states, self.complete)

    def without(self, excluded: AbstractSet[int], most: int | None = None) -> "Candidates":
        """The first `most` items that are not `excluded`."""
        wanted = list(islice((place for place, item in enumerate(self.items.tolist()) if item not in excluded), most))
        return self.at(slice(len(wanted)) if not wanted or wanted[-1] == len(wanted) - 1 else wanted)


def contained(items: Int32Array, ascending: Int32Array) -> npt.NDArray[np.bool_]:
    """A mask of the `items` that are in the sorted array `ascending`: as `np.isin`, at a quarter of its cost for a few hundred items."""
    if not len(ascending):
        return np.zeros(len(items), bool)
    places = np.minimum(np.searchsorted(ascending, items), len(ascending) - 1)
    found: npt.NDArray[np.bool_] = ascending[places] == items
    return found


def broken(report: StageReport) -> bool:
    """Whether a backend of this stage was passed over because it failed, now or lately."""
    return any(skipped.failed for skipped in report.fallback_from)
