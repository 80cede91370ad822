"""The answer to a request, made of the lists that its stages gave: the last list, with freshness and diversity, reasons and titles."""

import time
from functools import partial
from math import inf

from msgspec.structs import replace

from cluster.bundle import Bundle
from cluster.engines.skipped import passed_over
from cluster.errors import DeadlineExceeded
from cluster.titled_items import TitledItems
from cluster.traffic.budget import Budget, in_time
from cluster.values import Recommendation, ScoredItem
from pipelines.candidates import Candidates
from pipelines.cheapest_first import CheapestFirst
from pipelines.explain import explain, most_similar
from pipelines.history import ResolvedRequest
from pipelines.rerank import recency, rerank

ON_THE_LOOP = 2**22
"""Up to so many multiplications, a millisecond or two, an answer's items are chosen on the event loop; beyond, in a thread."""
EXPLANATION = 2**15
"""What the explanation of one item costs, counted in multiplications, without the search for what in the history it is like."""
_THREAD = CheapestFirst("chooses items")
"""Chooses the items of one answer at a time, so that many large requests take the memory of one."""


class Answering:
    """Makes answers by one version of the model."""

    def __init__(self, bundle: Bundle) -> None:
        self._catalogue, self._version = bundle.catalogue, bundle.version
        self._vectors, self._first_seen = bundle.item_vectors, bundle.first_seen

    async def answer(self, lists: list[Candidates], resolved: ResolvedRequest, budget: Budget) -> Recommendation:
        """The answer, made in the thread where that would hold the event loop; without diversity and explanations where that is late."""
        if (cost := self._multiplications(len(last_served(lists).items), resolved)) <= ON_THE_LOOP:
            return self._chosen(lists, resolved)
        began = time.perf_counter()
        try:
            return await in_time(lambda: _THREAD.run(cost, partial(self._chosen, lists, resolved)), budget.within(inf))
        except DeadlineExceeded as late:
            lists = [*lists, Candidates.asked_in_vain("rerank", (passed_over("diversity and explanations", late),), began)]
            plain = replace(resolved, request=replace(resolved.request, diversity=0.0, explain=False))
            return self._chosen(lists, plain)

    def _multiplications(self, candidates: int, resolved: ResolvedRequest) -> int:
        """How many it takes, about: diversity compares each chosen item with all candidates, an explanation with the whole history."""
        request, width = resolved.request, int(self._vectors.shape[1])
        explained = len(resolved.sequence.items) if request.explain else 0
        compared = explained + (candidates if request.diversity else 0)
        return min(request.k, candidates) * (compared * width + (EXPLANATION if request.explain else 0))

    def _chosen(self, lists: list[Candidates], resolved: ResolvedRequest) -> Recommendation:
        request = resolved.request
        chosen = rerank(
            last_served(lists),
            request.k,
            diversity=request.diversity,
            freshness=request.freshness,
            vectors_VD=self._vectors,
            first_seen_V=self._first_seen,
            now=resolved.sequence.request_time,
        )
        items = self._explained(chosen, lists, resolved) if request.explain else self.titled(chosen)
        reports, degraded = tuple([one.report for one in lists]), any(one.degraded for one in lists)
        return Recommendation(request.user_id, items, reports, self._version, degraded, resolved.unknown_items)

    def _explained(self, chosen: Candidates, lists: list[Candidates], resolved: ResolvedRequest) -> tuple[ScoredItem, ...]:
        similar = most_similar(chosen.items, resolved.sequence.items, self._vectors, self._catalogue)
        fresh = recency(self._first_seen[chosen.items], resolved.sequence.request_time) if resolved.request.freshness else None
        reasons = explain(chosen.items, lists, similar, fresh)
        return tuple(replace(item, explanation=reason) for item, reason in zip(self.titled(chosen), reasons, strict=True))

    def titled(self, candidates: Candidates) -> TitledItems:
        """All of the candidates, in their order, as items of an answer."""
        return TitledItems(self._catalogue, candidates.items.tolist(), candidates.scores.tolist(), candidates.report.stage)


def last_served(lists: list[Candidates]) -> Candidates:
    """The list of the last stage that gave one: ranked, else blended, else generated, else retrieved."""
    return next(one for one in reversed(lists) if one.served)
