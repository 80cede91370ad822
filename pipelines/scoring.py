"""The ranker's stage of the pipeline: what the user would do with each candidate, and one score from these predictions.

    score = p(click) * (w_click + sum over the other tasks of w_task * prediction_task)

The other tasks are predicted for a user that has turned to the item, so the score is what showing the item is worth: with weight 1 for
`click` alone the probability of a click, with weight 1 for `purchase` alone that of a purchase. Ratings are scaled to 0..1.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cluster.bundle import Bundle, RankerRecord
from cluster.errors import BackendError, InvalidRequest
from cluster.ranking import Ranked, RankRequest, Task
from cluster.stages import RANKER
from cluster.traffic.budget import Budget
from cluster.values import FloatArray, Int32Array, StageAnswer
from pipelines.asking import Ask, ask_in_time, why_none
from pipelines.candidates import Candidates, broken
from pipelines.history import ResolvedRequest

Rank: TypeAlias = Ask[RankRequest, Ranked]


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """Candidates, best first, and the predictions for each, (C, T); empty if the stage gave no answer."""

    candidates: Candidates
    predictions: FloatArray


class Scoring:
    """`rank` is the ranker stage, None if there is none. It may take `deadline_s` at most."""

    def __init__(self, bundle: Bundle, rank: Rank | None, *, deadline_s: float) -> None:
        self._version, self._identity = bundle.version, bundle.identity
        self._record, self._deadline_s = bundle.manifest.ranker, deadline_s
        self._rank = rank if self._record else None

    @property
    def tasks(self) -> Sequence[Task]:
        """The tasks in the order of the predictions' columns; none where the model has no ranker."""
        return self._record.tasks if self._record and self._rank else ()

    @property
    def last_stage(self) -> bool:
        """Whether the ranker orders recommendations where a request does not say."""
        return bool(self._rank and self._record and self._record.last_stage)

    async def score(
        self, items: Int32Array, resolved: ResolvedRequest, budget: Budget, weights: Mapping[Task, float] | None = None
    ) -> Scored:
        """These items in the order of their scores. `weights` as in RankingRequest."""
        if self._rank is None or self._record is None:
            return self._nothing(Candidates.not_asked(RANKER, f"{self._version} has no ranker"))
        user, tenant = resolved.request.user_id, resolved.request.tenant
        request = RankRequest(resolved.sequence, items, user, tenant, model_version=self._identity)
        began = time.perf_counter()
        try:
            answer = await ask_in_time(RANKER, self._rank, request, budget.within(self._deadline_s), self._identity)
        except BackendError as error:
            return self._nothing(Candidates.asked_in_vain(RANKER.step, why_none(RANKER, error), began))
        return self._ordered(items, answer, self._record, weights)

    def _ordered(
        self, items: Int32Array, answer: StageAnswer[Ranked], record: RankerRecord, weights: Mapping[Task, float] | None
    ) -> Scored:
        scores = combined(answer.result.predictions, record, record.weights if weights is None else weights)
        order = np.argsort(-scores, kind="stable")
        candidates = Candidates(items[order], scores[order], answer.report, broken(answer.report))
        return Scored(candidates, answer.result.predictions[order])

    def _nothing(self, none: Candidates) -> Scored:
        return Scored(none, np.empty((0, len(self.tasks)), np.float32))


def combined(predictions: FloatArray, record: RankerRecord, weights: Mapping[Task, float]) -> FloatArray:
    """One score for each row of predictions (C, T), by the formula at the top of this file."""
    columns = dict(zip(record.tasks, predictions.T, strict=True))
    worth = np.full(len(predictions), weights.get(Task.CLICK, 0.0), np.float32)
    for task, column in columns.items():
        if task is not Task.CLICK and (weight := weights.get(task, 0.0)):
            scaled = (column - record.rating.low) / (record.rating.high - record.rating.low) if task is Task.RATING else column
            worth += weight * scaled
    scores: FloatArray = (columns[Task.CLICK] * worth).astype(np.float32)
    return scores


def checked_weights(weights: Mapping[Task, float] | None, tasks: Sequence[Task]) -> None:
    """Raises InvalidRequest at a task that the model does not predict, and where all weights are 0."""
    if weights is None:
        return
    for task in weights:
        if tasks and task not in tasks:
            raise InvalidRequest(f"weights.{task}", f"is no task of this model's ranker; it predicts {', '.join(tasks)}")
    if not any(weights.values()):
        raise InvalidRequest("weights", "give at least one task a weight above 0, or leave them out")
