"""The last good answer of each user: what there is instead of an answer that no encoder had a part in, as long as it is kept.

generated items -> the encoder's ranking -> the last good answer -> popular items
"""

import time
from dataclasses import replace

from cluster.cache.entry import Key
from cluster.cache.tier_values import Found
from cluster.cache.tiered import TieredCache
from cluster.errors import DeadlineExceeded
from cluster.traffic.budget import Budget, in_time
from cluster.values import Recommendation, RecommendRequest, ScoredItem, StageReport
from pipelines.answer_key import cacheable, wishes_key
from pipelines.remembered import Recent

CACHED = "cached"
POPULARITY = "popularity"
LOOK_UP_S = 0.1
AT_ONCE_S = 0.001
"""What a look into this process's memory may take though the time is over."""


class LastGood(Recent[Key]):
    """Under which key the last good answer to the same wishes is kept: over an older history, or past its time. One model's answers."""

    def __init__(self, model_digest: str) -> None:
        super().__init__()
        self._model_digest = model_digest

    def note(self, request: RecommendRequest, key: Key, answer: Recommendation) -> None:
        """A degraded answer never takes the place of a good one."""
        if not answer.degraded:
            self.put(wishes_key(request, self._model_digest), key)

    async def rather_than(self, answer: Recommendation, request: RecommendRequest, cache: TieredCache[Recommendation]) -> Recommendation:
        """The last good answer, degraded, less what the user has seen since or wants blocked now; `answer` itself where an encoder had a
        part in it, where nothing better is kept, or where nothing of it is left. There may be fewer items than are asked for.
        """
        popular = next((stage for stage in answer.stages if stage.stage == POPULARITY), None)
        if not answer.degraded or popular is None or not cacheable(request):
            return answer
        began = time.perf_counter()
        if (found := await self._kept(request, cache)) is None or not (items := _wanted(found.value.items, request)):
            return answer
        report = StageReport(CACHED, found.tier, (time.perf_counter() - began) * 1e3, popular.fallback_from)
        before = answer.stages[: answer.stages.index(popular)]
        return replace(found.value, items=items, stages=(*before, report), degraded=True, unknown_items=answer.unknown_items)

    async def _kept(self, request: RecommendRequest, cache: TieredCache[Recommendation]) -> Found[Recommendation] | None:
        if (key := self.get(wishes_key(request, self._model_digest))) is None:
            return None
        try:
            found = await in_time(lambda: cache.get(key), max(AT_ONCE_S, Budget(request.deadline).within(LOOK_UP_S)))
        except DeadlineExceeded:
            return None
        return None if found is None or found.value.degraded else found


def _wanted(items: tuple[ScoredItem, ...], request: RecommendRequest) -> tuple[ScoredItem, ...]:
    seen = {behaviour.item_id for behaviour in request.behaviours or ()} if request.exclude_seen else set()
    allowed = request.allowed
    return tuple(
        one for one in items if one.item.item_id not in seen | request.blocked and (allowed is None or one.item.item_id in allowed)
    )
