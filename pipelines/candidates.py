"""A list of items on its way through the pipeline, and who made it."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.values import FloatArray, Int32Array, SkippedBackend, StageReport

NOBODY = "none"


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Items that may be recommended, best first, with their scores, the report of the stage that ranked them, and whether it degrades the
    answer. `states`: the user's, (T, D), where an encoder that gives them made the list. Not `complete` are items that a stage found while
    it is still at work; its complete list need not have them, where it found better ones later.
    """

    items: Int32Array
    scores: FloatArray
    report: StageReport
    degraded: bool = False
    states: FloatArray | None = None
    complete: bool = True

    @classmethod
    def none(cls, stage: str, skipped: tuple[SkippedBackend, ...], *, degraded: bool, duration_ms: float = 0.0) -> "Candidates":
        """The list of a stage that nobody served, and why."""
        return cls(np.empty(0, np.int32), np.empty(0, np.float32), StageReport(stage, NOBODY, duration_ms, skipped), degraded)

    @property
    def served(self) -> bool:
        return self.report.backend != NOBODY

    def at(self, positions: npt.NDArray[Any] | list[int] | slice) -> "Candidates":
        """The items at these positions, in the order of the positions; or where a mask over all of them is true."""
        return replace(self, items=self.items[positions], scores=self.scores[positions])

    def without(self, excluded: Int32Array, most: int | None = None) -> "Candidates":
        """Those that are not `excluded`, the first `most` of them."""
        passed_over = set(excluded.tolist())
        places = [place for place, item in enumerate(self.items.tolist()) if item not in passed_over]
        return self.at(places[:most])


def held(items: Int32Array, ascending: Int32Array) -> npt.NDArray[np.bool_]:
    """Which of the items stand in `ascending`: `np.isin` for a few hundred of them, at a quarter of its cost."""
    if not len(ascending):
        return np.zeros(len(items), bool)
    places = np.minimum(np.searchsorted(ascending, items), len(ascending) - 1)
    found: npt.NDArray[np.bool_] = ascending[places] == items
    return found


def broken(report: StageReport) -> bool:
    """Whether a backend that should have served this stage broke, now or lately."""
    return any(skipped.failed for skipped in report.fallback_from)
