"""The last good answer of each user, given while no encoder answers and the cache still holds it.

Fallbacks in order: generated items -> the encoder's ranking -> the last good answer -> popular items
"""

import time
from collections.abc import Sequence

from msgspec.structs import replace

from cluster.cache.entry import Key
from cluster.cache.recent import Recent
from cluster.cache.tier_values import Found
from cluster.cache.tiered import TieredCache
from cluster.engines.skipped import NothingKnown
from cluster.errors import DeadlineExceeded
from cluster.traffic.budget import Budget, in_time
from cluster.values import Recommendation, RecommendRequest, ScoredItem, StageReport
from pipelines.answer_key import cacheable, request_key
from pipelines.popularity import POPULARITY

LAST_GOOD = "cached"
LOOK_UP_S = 0.1
AT_ONCE_S = 0.001
"""Time for a look-up in this process's memory after the request's deadline."""


class StaleFallback:
    """For one model: request without its history -> the cache key of its last good answer, which may be stale or over an older history."""

    def __init__(self, model_digest: str) -> None:
        self._model_digest, self._keys = model_digest, Recent[Key]()

    def note(self, request: RecommendRequest, key: Key, answer: Recommendation) -> None:
        """Remember this answer's key, unless it is degraded, or of popular items: those can be had again without an encoder. One as of a
        time is right for no other.
        """
        if request.request_time is None and not answer.degraded and all(stage.stage != POPULARITY for stage in answer.stages):
            self._keys.put(request_key(request, self._model_digest), key)

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """Forget the last good answers of one user, of all users of `tenant`, or of all tenants."""
        self._keys.forget(tenant, user_id)

    async def rather_than(
        self, answer: Recommendation, request: RecommendRequest, cache: TieredCache[Recommendation], *, history_lost: bool
    ) -> Recommendation:
        """The last good answer, marked as degraded, without items that the user has seen since or blocks now; items of `answer` follow in
        place of those. `answer` itself if an encoder contributed to it or was not needed, if no good answer is cached, or if no item of
        that is left. `history_lost`: it could not be read, so that no item of `answer` follows, which may have been seen; else popular
        items are right for a user without known behaviours.
        """
        popular = next((stage for stage in answer.stages if stage.stage == POPULARITY), None)
        if not answer.degraded or popular is None or not cacheable(request):
            return answer
        if not history_lost and any(isinstance(one, NothingKnown) for one in popular.fallback_from):
            return answer
        began = time.perf_counter()
        if (found := await self._kept(request, cache)) is None or not (items := _wanted(found.value.items, request)):
            return answer
        report = StageReport(LAST_GOOD, found.tier, (time.perf_counter() - began) * 1e3, popular.fallback_from)
        before = answer.stages[: answer.stages.index(popular)]
        if not history_lost:
            held = {one.item.item_id for one in items}
            items = (*items, *(one for one in answer.items if one.item.item_id not in held))[: request.k]
        return replace(found.value, items=items, stages=(*before, report), degraded=True, unknown_items=answer.unknown_items)

    async def _kept(self, request: RecommendRequest, cache: TieredCache[Recommendation]) -> Found[Recommendation] | None:
        if (key := self._keys.get(request_key(request, self._model_digest))) is None:
            return None
        try:
            found = await in_time(lambda: cache.get(key), max(AT_ONCE_S, Budget(request.deadline).within(LOOK_UP_S)))
        except DeadlineExceeded:
            return None
        return None if found is None or found.value.degraded else found


def _wanted(items: Sequence[ScoredItem], request: RecommendRequest) -> tuple[ScoredItem, ...]:
    seen = {behaviour.item_id for behaviour in request.behaviours or ()} if request.exclude_seen else set()
    unwanted, allowed = seen | request.blocked, request.allowed
    return tuple(one for one in items if one.item.item_id not in unwanted and (allowed is None or one.item.item_id in allowed))
