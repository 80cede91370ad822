"""Recommend items: behaviours -> history -> user state -> nearest items -> filter -> titled items."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from cluster.bundle import Bundle
from cluster.controller import NoBackendAnswered
from cluster.errors import BackendError
from cluster.values import (
    EncodeAnswer,
    EncodeRequest,
    FloatArray,
    Int32Array,
    Recommendation,
    RecommendRequest,
    ScoredItem,
    SkippedBackend,
    StageReport,
)
from pipelines.history import Wishes, understand
from pipelines.popularity import Popularity

Encode: TypeAlias = Callable[[EncodeRequest], Awaitable[EncodeAnswer]]


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Items that may be recommended, best first, and who ranked them."""

    items: Int32Array
    scores: FloatArray
    stages: tuple[StageReport, ...]
    degraded: bool = False


class Recommender:
    """One model version's way from a request to an answer. `encode` is the encoder stage: in this process, or across the cluster."""

    def __init__(self, bundle: Bundle, encode: Encode) -> None:
        self._catalogue, self._popularity = bundle.catalogue, Popularity(bundle.popularity)
        self._version, self._encode = bundle.version, encode

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        """The answer to one request. Raises InvalidRequest; never an error because an engine broke."""
        wishes = understand(request, self._catalogue)
        candidates = await self._candidates(wishes, request.k)
        chosen = self._title(self._permitted(candidates, wishes), request.k)
        return Recommendation(request.user_id, chosen, candidates.stages, self._version, candidates.degraded, wishes.unknown_items)

    async def _candidates(self, wishes: Wishes, k: int) -> Candidates:
        """The encoder's nearest items; popularity for a user of whom nothing is known, or where no encoder answers."""
        top_n = min(k + len(wishes.excluded), len(self._catalogue))
        if not len(wishes.sequence):
            return self._popular(wishes, top_n, (SkippedBackend("encoder", "the user has no behaviour with an item of the catalogue"),))
        try:
            answer = await self._encode(EncodeRequest(wishes.sequence, top_n, wishes.among))
        except NoBackendAnswered as error:
            return self._popular(wishes, top_n, error.skipped, degraded=True)
        except BackendError as error:
            return self._popular(wishes, top_n, (SkippedBackend("encoder", str(error), failed=True),), degraded=True)
        if answer.model_version != self._version:
            reason = f"the encoder serves {answer.model_version}, this gateway {self._version}: a new version is being rolled out"
            return self._popular(wishes, top_n, (SkippedBackend("encoder", reason, failed=True),), degraded=True)
        broken = any(skipped.failed for skipped in answer.report.fallback_from)
        return Candidates(answer.encoded.items, answer.encoded.scores, (answer.report,), degraded=broken)

    def _popular(self, wishes: Wishes, top_n: int, skipped: tuple[SkippedBackend, ...], *, degraded: bool = False) -> Candidates:
        started = time.perf_counter()
        items, scores = self._popularity.nearest(top_n, wishes.among)
        report = StageReport("popularity", "popularity", (time.perf_counter() - started) * 1000, skipped)
        return Candidates(items, scores, (report,), degraded)

    @staticmethod
    def _permitted(candidates: Candidates, wishes: Wishes) -> Candidates:
        kept = ~np.isin(candidates.items, wishes.excluded)
        return replace(candidates, items=candidates.items[kept], scores=candidates.scores[kept])

    def _title(self, candidates: Candidates, k: int) -> tuple[ScoredItem, ...]:
        pairs = zip(candidates.items[:k].tolist(), candidates.scores[:k].tolist(), strict=True)
        return tuple(ScoredItem(self._catalogue[index], score) for index, score in pairs)
