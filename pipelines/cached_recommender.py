"""Answer a request from the cache, or by the recommender over the history that was sent or is stored.

    request -> key: model, settings, history, options -> cached answer: l1 | l2 | joins the request that computes it
                                                      -> none: stored history -> recommender -> cached
                                                                              -> no encoder answers: the user's last good answer, if cached

A failing cache or event store costs time, never an answer, and never more time than the request's deadline leaves.
"""

import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from time import monotonic

from msgspec.structs import replace

from cluster.cache.entry import Key
from cluster.cache.tier_values import Computed, Found
from cluster.cache.tiered import TieredCache
from cluster.errors import BackendError, DeadlineExceeded
from cluster.few_lines import TOLD_EVERY_S, FewLines
from cluster.traffic.budget import Budget, in_time, started, unhurried
from cluster.values import AnswerPart, CacheReport, Recommendation, RecommendRequest, StageReport
from pipelines.answer_key import answer_key, cacheable, version_of
from pipelines.recommend import Recommender
from pipelines.remembered import UsualRequests
from pipelines.stale_fallback import LAST_GOOD, StaleFallback
from pipelines.stored_history import Completed, StoredHistories

LATE_S = 0.05
"""How long after its deadline a request still waits for an answer that is on its way; then it is answered without it."""
logger = logging.getLogger(__name__)


class CachedRecommender:
    """Answers of one version of the model. `model_digest` tells the version, and the settings by which it answers, apart from others in the
    same cache; `cache` is None if caching is switched off; `usual` remembers the users' usual requests across versions, as they were sent.
    `flagged` gives a request, also a remembered one, the present flags where it leaves a choice open. `count` is told of the stages of each
    answer that is computed, also where no caller waits for it. For one event loop.
    """

    def __init__(
        self,
        recommender: Recommender,
        histories: StoredHistories,
        cache: TieredCache[Recommendation] | None,
        model_digest: str,
        usual: UsualRequests | None = None,
        *,
        flagged: Callable[[RecommendRequest], RecommendRequest] = lambda request: request,
        count: Callable[[Sequence[StageReport]], object] | None = None,
    ) -> None:
        self._recommender, self._histories, self._cache, self._model_digest = recommender, histories, cache, model_digest
        self._usual = UsualRequests() if usual is None else usual
        self._fallback, self._flagged, self._count = StaleFallback(model_digest), flagged, count
        self._lines = FewLines(most=1, within_s=TOLD_EVERY_S)

    def check(self, request: RecommendRequest) -> None:
        """Raises InvalidRequest if this version of the model cannot serve the request's options."""
        self._recommender.check(self._flagged(request))

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        """The answer. Raises InvalidRequest."""
        request = self._begun(request)
        history_version = await self._history_version(request)
        if history_version is None:
            return await self._compute(request)
        if request.deadline is None:
            return await self._kept_or_computed(request, history_version)
        until = _look_up_until(request)
        answer = await self._in_time(request, history_version, until)
        if answer.degraded and answer.cache and answer.cache.tier == "joined" and Budget(request.deadline).left_s() > 0:
            return await self._in_time(request, history_version, until)  # what it joined may have had less time left
        return answer

    async def stream(self, request: RecommendRequest) -> AsyncGenerator[AnswerPart, None]:
        """The answer's parts as they are found. A cached answer yields its stages, its items and itself; a streamed one is not cached."""
        request = self._begun(request)
        if kept := await self._kept(request, await self._history_version(request)):
            for part in parts_of(kept):
                yield part
            return
        completed = await self._histories.complete(request)
        if completed.report:
            yield completed.report
        async with aclosing(self._recommender.stream(completed.request)) as parts:
            async for part in parts:
                if not isinstance(part, Recommendation):
                    yield part
                    continue
                answer = await self._best(part, completed)
                for one in parts_of(answer) if _is_last_good(answer) else (answer,):
                    if one is not completed.report:  # which was told
                        yield one

    async def anticipate(self, tenant: str, user_id: str) -> None:
        """Have the answer to the user's usual request computed before it is asked for, as after a new event of the user; returns when it is
        kept, or cannot be had.
        """
        usual = self._usual.of(tenant, user_id)
        if self._cache is None or usual is None:
            return
        request = self._flagged(usual)
        if (history_version := await self._history_version(request)) is not None:
            key = self._key(request, history_version)
            await self._cache.expect(key, lambda: self._compute_for_cache(request, key, history_version))

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """Forget usual requests and last good answers: of one user, of all users of `tenant`, or of all tenants."""
        self._usual.forget(tenant, user_id)
        self._fallback.forget(tenant, user_id)

    def _begun(self, sent: RecommendRequest) -> RecommendRequest:
        """The request with its flags and its time running; noted as it was sent, as the flags may change until it is computed ahead. Raises
        InvalidRequest.
        """
        request = started(self._flagged(sent))
        self._recommender.check(request)
        if cacheable(request):
            self._usual.note(sent)  # before the answer: noted after its user was erased, it would stay in the shared cache
        return request

    async def _in_time(self, request: RecommendRequest, history_version: str, until: float) -> Recommendation:
        """The answer cached, joined or computed by the deadline; else what needs no engine: the last good answer, or popular items."""
        within_s = max(0.0, Budget(request.deadline).left_s()) + LATE_S
        try:
            return await in_time(lambda: self._kept_or_computed(request, history_version, until), within_s)
        except DeadlineExceeded:
            return await self._compute(request)

    async def _kept_or_computed(self, request: RecommendRequest, history_version: str, until: float = math.inf) -> Recommendation:
        """`until`: when the shared cache is waited for no longer, on this process's monotonic clock."""
        assert self._cache is not None
        key = self._key(request, history_version)
        found = await self._cache.get_or_compute(
            key,
            lambda: self._compute_for_cache(request, key, history_version),
            refresh=request.cache == "refresh",
            pace="" if request.deadline_ms is None else f"{request.deadline_ms} ms",
            renew=lambda: self._compute_for_cache(unhurried(request), key, history_version),
            look_up_s=until - monotonic(),
        )
        return self._with_tier(request, key, found)

    async def _kept(self, request: RecommendRequest, history_version: str | None) -> Recommendation | None:
        """A cached answer, if any."""
        if self._cache is None or history_version is None or request.cache != "use":
            return None
        key = self._key(request, history_version)
        if (found := await self._cache.get(key, within_s=_look_up_until(request) - monotonic())) is None:
            return None
        if found.due:
            self._cache.refresh(key, lambda: self._compute_for_cache(unhurried(request), key, history_version))
        return self._with_tier(request, key, found)

    async def _compute(self, request: RecommendRequest) -> Recommendation:
        return await self._recommend_over(await self._histories.complete(request))

    async def _recommend_over(self, completed: Completed) -> Recommendation:
        return await self._best(await self._recommender.recommend(completed.request), completed)

    async def _best(self, answer: Recommendation, completed: Completed) -> Recommendation:
        """The recommender's answer, or the user's last good one if no encoder contributed to it."""
        answer = _with_history(answer, completed)
        if self._cache is not None:
            answer = await self._fallback.rather_than(answer, completed.request, self._cache, history_lost=completed.degraded)
        if self._count is not None:
            self._count(answer.stages)
        return answer

    async def _compute_for_cache(self, request: RecommendRequest, key: Key, history_version: str) -> Computed[Recommendation]:
        """The answer and how to cache it. A degraded answer is cached briefly, and not at all where the request has a deadline or `cache:
        refresh`, or the answer itself came from the cache. No answer over another history than `history_version` is cached: the user may
        have been erased meanwhile.
        """
        completed = await self._histories.complete(request)
        answer = await self._recommend_over(completed)
        if completed.version not in (None, history_version):
            return Computed(answer, keep=False)
        self._fallback.note(request, key, answer)
        keep_degraded = request.deadline_ms is None and request.cache == "use" and not _is_last_good(answer)
        return Computed(answer, degraded=answer.degraded, keep=not answer.degraded or keep_degraded)

    async def _history_version(self, request: RecommendRequest) -> str | None:
        """The version of the user's history; None if the cache is not to be used, or the event store does not answer."""
        if self._cache is None or not cacheable(request):
            return None
        if request.behaviours is not None:
            return version_of(request.behaviours)
        try:
            return await self._histories.version(request)
        except BackendError as error:
            if (more := self._lines.more()) is not None:
                logger.warning("an answer is computed without the cache%s: %s", more, error)
            return None

    def _key(self, request: RecommendRequest, history_version: str) -> Key:
        return answer_key(request, self._model_digest, history_version)

    def _with_tier(self, request: RecommendRequest, key: Key, found: Found[Recommendation]) -> Recommendation:
        """The answer, with the tier that held it. The user's last good answer is noted if another replica computed it and it is kept."""
        if found.kept and found.tier in {"l2", "joined"}:
            self._fallback.note(request, key, found.value)
        return replace(found.value, cache=CacheReport(found.tier, found.age_s, found.stale))


def _look_up_until(request: RecommendRequest) -> float:
    """When the request stops waiting for the shared cache, on this process's monotonic clock: after a quarter of the time that is left."""
    return monotonic() + Budget(request.deadline).left_s() / 4


def parts_of(answer: Recommendation) -> tuple[AnswerPart, ...]:
    """The parts of the answer in a stream: its stages, its items and itself."""
    return *answer.stages, answer.items, answer


def _is_last_good(answer: Recommendation) -> bool:
    return any(stage.stage == LAST_GOOD for stage in answer.stages)


def _with_history(answer: Recommendation, completed: Completed) -> Recommendation:
    """The answer, with the event store's report among its stages."""
    if completed.report is None and not completed.degraded:
        return answer
    stages: tuple[StageReport, ...] = (completed.report, *answer.stages) if completed.report else answer.stages
    return replace(answer, stages=stages, degraded=answer.degraded or completed.degraded)
