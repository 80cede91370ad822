"""The encoder's stage of the pipeline: the items nearest to the user's state, or the popular ones if the encoder has no answer."""

import time
from typing import TypeAlias

from cluster.bundle import Bundle
from cluster.engines.skipped import NothingKnown
from cluster.errors import BackendError
from cluster.stages import ENCODER
from cluster.traffic.budget import Budget
from cluster.values import Encoded, EncodeRequest, SkippedBackend, StageAnswer, StageReport
from pipelines.asking import Ask, ask_in_time, why_none
from pipelines.candidates import Candidates, broken
from pipelines.history import ResolvedRequest
from pipelines.popularity import POPULARITY, Popularity

Encode: TypeAlias = Ask[EncodeRequest, Encoded]


class Retrieval:
    """`encode` is the encoder stage, in this process or another. It may take `deadline_s` at most."""

    def __init__(self, bundle: Bundle, encode: Encode, *, deadline_s: float) -> None:
        self._identity, self._size, self._encode, self._deadline_s = bundle.identity, len(bundle.catalogue), encode, deadline_s
        self._popularity = Popularity(bundle.popularity)

    async def find(self, resolved: ResolvedRequest, count: int, budget: Budget, *, states: bool = False) -> Candidates:
        """The `count` best items that are not excluded, fewer where there are fewer; popularity for a user without known behaviours, or
        where no encoder answers in time. `states`: whether a decoder is to be prompted with the user's.
        """
        began, top_n = time.perf_counter(), min(count + len(resolved.barred), self._size)
        if not len(resolved.sequence):
            why = NothingKnown(ENCODER.name, "the user has no behaviour with an item of the catalogue")
            found = self._popular(resolved, top_n, (why,), began)
        else:
            user, tenant = resolved.request.user_id, resolved.request.tenant
            request = EncodeRequest(resolved.sequence, top_n, resolved.among, user, tenant, states=states, model_version=self._identity)
            try:
                found = _nearest(await ask_in_time(ENCODER, self._encode, request, budget.within(self._deadline_s), self._identity))
            except BackendError as error:
                found = self._popular(resolved, top_n, why_none(ENCODER, error), began, degraded=True)
        return found.without(resolved.barred, count)

    def _popular(
        self, resolved: ResolvedRequest, top_n: int, skipped: tuple[SkippedBackend, ...], began: float, *, degraded: bool = False
    ) -> Candidates:
        items, scores = self._popularity.nearest(top_n, resolved.among)
        report = StageReport(POPULARITY, POPULARITY, (time.perf_counter() - began) * 1000, skipped)
        return Candidates(items, scores, report, degraded)


def _nearest(answer: StageAnswer[Encoded]) -> Candidates:
    encoded = answer.result
    return Candidates(encoded.items, encoded.scores, answer.report, broken(answer.report), encoded.states)
