"""Rank given candidates: behaviours -> history -> predictions of the ranker -> titled candidates, best first.

Where no ranker answers, the encoder orders the candidates by how near they are to the user's state; where no encoder does, popularity.
"""

from cluster.bundle import Bundle
from cluster.ranking import RankedItem, Ranking, RankingRequest
from cluster.traffic.budget import Budget, started
from cluster.values import FloatArray, RecommendRequest
from pipelines.candidates import Candidates
from pipelines.history import ResolvedRequest, resolve
from pipelines.retrieval import Encode, Retrieval
from pipelines.scoring import Rank, Scoring, checked_weights
from pipelines.stored_history import Completed, StoredHistories


class CandidateRanker:
    """One model version's way from candidates to their order. `encode` and `rank` are its stages, as in Recommender."""

    def __init__(
        self, bundle: Bundle, histories: StoredHistories, encode: Encode, rank: Rank | None, *, deadline_s: float, ranking_deadline_s: float
    ) -> None:
        self._catalogue, self._version, self._histories = bundle.catalogue, bundle.version, histories
        self._scoring = Scoring(bundle, rank, deadline_s=ranking_deadline_s)
        self._retrieval = Retrieval(bundle, encode, deadline_s=deadline_s)

    def check(self, request: RankingRequest) -> None:
        """Raises InvalidRequest if this version of the model cannot serve the request's options."""
        checked_weights(request.weights, self._scoring.tasks)

    async def rank(self, request: RankingRequest) -> Ranking:
        """The answer to one request. Raises InvalidRequest; never an error because an engine broke."""
        self.check(request)
        completed = await self._histories.complete(started(_as_recommendation(request)))
        resolved, budget = resolve(completed.request, self._catalogue), Budget(completed.request.deadline)

        assert resolved.among is not None  # the candidates
        scored = await self._scoring.score(resolved.among, resolved, budget, request.weights)
        lists = [scored.candidates]
        if not scored.candidates.served:
            lists.append(await self._retrieval.find(resolved, len(resolved.among), budget))

        predictions = self._by_task(scored.predictions) or [{}] * len(lists[-1].items)  # {}: no ranker answered
        return self._answer(self._titled(lists[-1], predictions), lists, resolved, completed)

    def _by_task(self, predictions: FloatArray) -> list[dict[str, float]]:
        """The rows of `predictions`, (C, T), as task -> prediction. A task is its name: a Task costs more as a key, and to be written."""
        tasks = [task.value for task in self._scoring.tasks]
        return [dict(zip(tasks, row, strict=True)) for row in predictions.tolist()]

    def _titled(self, candidates: Candidates, predictions: list[dict[str, float]]) -> tuple[RankedItem, ...]:
        rows = zip(candidates.items.tolist(), candidates.scores.tolist(), predictions, strict=True)
        return tuple([RankedItem(self._catalogue[index], score, predicted) for index, score, predicted in rows])

    def _answer(self, items: tuple[RankedItem, ...], lists: list[Candidates], resolved: ResolvedRequest, completed: Completed) -> Ranking:
        history = (completed.report,) if completed.report else ()
        reports = (*history, *(one.report for one in lists))
        degraded = completed.degraded or any(one.degraded for one in lists)
        return Ranking(resolved.request.user_id, items, reports, self._version, degraded, resolved.unknown_items)


def _as_recommendation(request: RankingRequest) -> RecommendRequest:
    """The ranking as a request for recommendations of the candidates alone, even of those in the history."""
    return RecommendRequest(
        user_id=request.user_id,
        behaviours=request.behaviours,
        request_time=request.request_time,
        exclude_seen=False,
        allowed=frozenset(request.candidates),
        tenant=request.tenant,
        deadline_ms=request.deadline_ms,
        deadline=request.deadline,
    )
