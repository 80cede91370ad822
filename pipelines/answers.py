"""Answer a request: by a kept answer where there is one, else the recommender over the history that was sent, or is stored.

    request -> key: model, history, parameters -> kept answer: l1 | l2 | somebody is computing it
                                               -> none: stored history -> recommender -> kept

A failing cache or event store costs time, never an answer.
"""

import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from pydantic import TypeAdapter, ValidationError

from cluster.cache.codec import Codec
from cluster.cache.entry import Key
from cluster.cache.tier_values import Computed, Found
from cluster.cache.tiered import TieredCache
from cluster.errors import BackendError
from cluster.values import AnswerPart, CacheReport, Recommendation, RecommendRequest, StageReport
from pipelines.answer_key import answer_key, cacheable, version_of
from pipelines.recommend import Recommender
from pipelines.stored_history import Completed, StoredHistories

REMEMBERED_USERS = 10_000
REMEMBERED_ITEMS = 100
"""Items that a remembered request may list: what is remembered is bounded by users, and must be small for each."""
_RECOMMENDATION = TypeAdapter(Recommendation)
logger = logging.getLogger(__name__)


class Answers:
    """`cache` is None where none is wanted; `model_digest` tells this model from every other that shares the cache. For one event loop."""

    def __init__(
        self, recommender: Recommender, histories: StoredHistories, cache: TieredCache[Recommendation] | None, model_digest: str
    ) -> None:
        self._recommender, self._histories, self._cache, self._model_digest = recommender, histories, cache, model_digest
        self._usual: OrderedDict[tuple[str, str], RecommendRequest] = OrderedDict()

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        """The answer. Raises InvalidRequest."""
        answer = await self._recommend(request)
        self._remember(request)
        return answer

    async def stream(self, request: RecommendRequest) -> AsyncGenerator[AnswerPart, None]:
        """The answer's parts as they are found. A kept answer comes as its stages, its items and itself; a streamed one is not kept."""
        if kept := await self._kept(request):
            parts_kept: tuple[AnswerPart, ...] = (*kept.stages, *kept.items, kept)
            for part in parts_kept:
                yield part
            return
        completed = await self._histories.complete(request)
        if completed.report:
            yield completed.report
        async with aclosing(self._recommender.stream(completed.request)) as parts:
            async for part in parts:
                yield _with_history(part, completed) if isinstance(part, Recommendation) else part

    def expects(self, tenant: str, user_id: str) -> bool:
        """Whether it is known what the user usually asks for, so that `anticipate` can compute it."""
        return self._cache is not None and (tenant, user_id) in self._usual

    async def anticipate(self, tenant: str, user_id: str) -> None:
        """Compute, in the background, what a user of whom something new is known will ask for next: what they asked for last time."""
        usual = self._usual.get((tenant, user_id))
        if self._cache is not None and usual is not None and (key := await self._key(usual)) is not None:
            self._cache.refresh(key, lambda: self._computed(usual))

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """What users usually ask for: one user's of a tenant, a tenant's or everybody's."""
        if tenant is not None and user_id is not None:
            self._usual.pop((tenant, user_id), None)
            return
        for key in [key for key in self._usual if tenant in (None, key[0])]:
            del self._usual[key]

    async def _recommend(self, request: RecommendRequest) -> Recommendation:
        if self._cache is None or (key := await self._key(request)) is None:
            return await self._compute(request)
        if kept := await self._without_hurry(request):
            return kept
        found = await self._cache.get_or_compute(key, lambda: self._computed(request), refresh=request.cache == "refresh")
        return _reported(found)

    async def _without_hurry(self, request: RecommendRequest) -> Recommendation | None:
        """For who is in a hurry, what is kept for who is not; there is nothing better."""
        return await self._kept(replace(request, deadline_ms=None)) if request.deadline_ms is not None else None

    async def _kept(self, request: RecommendRequest) -> Recommendation | None:
        if self._cache is None or request.cache != "use" or (key := await self._key(request)) is None:
            return None
        found = await self._cache.get(key)
        if found and found.stale:
            self._cache.refresh(key, lambda: self._computed(request))
        return _reported(found) if found else None

    async def _compute(self, request: RecommendRequest) -> Recommendation:
        completed = await self._histories.complete(request)
        return _with_history(await self._recommender.recommend(completed.request), completed)

    async def _computed(self, request: RecommendRequest) -> Computed[Recommendation]:
        """Degraded answers are kept for a moment only, and not at all where the caller's own deadline may be the reason."""
        answer = await self._compute(request)
        return Computed(answer, negative=answer.degraded, keep=not (answer.degraded and request.deadline_ms is not None))

    async def _key(self, request: RecommendRequest) -> Key | None:
        """None where nothing is to be taken from the cache, or where the version of the history is not known."""
        if not cacheable(request):
            return None
        if request.behaviours is not None:
            return answer_key(request, self._model_digest, version_of(request.behaviours))
        try:
            return answer_key(request, self._model_digest, await self._histories.version(request))
        except BackendError as error:
            logger.warning("an answer is computed without the cache: %s", error)
            return None

    def _remember(self, request: RecommendRequest) -> None:
        """What the user asks for, where it follows from the user alone: then the next event says when to compute it again."""
        listed = len(request.blocked) + len(request.allowed or ())
        if request.behaviours is None and request.request_time is None and listed <= REMEMBERED_ITEMS and cacheable(request):
            self._usual[request.tenant, request.user_id] = replace(request, cache="use", deadline_ms=None)
            self._usual.move_to_end((request.tenant, request.user_id))
            if len(self._usual) > REMEMBERED_USERS:
                self._usual.popitem(last=False)


def _reported(found: Found[Recommendation]) -> Recommendation:
    """The answer, with where it was."""
    return replace(found.value, cache=CacheReport(found.tier, found.age_s, found.stale))


def _with_history(answer: Recommendation, completed: Completed) -> Recommendation:
    """The answer, with whoever had the history among its stages."""
    stages: tuple[StageReport, ...] = (completed.report, *answer.stages) if completed.report else answer.stages
    return replace(answer, stages=stages, degraded=answer.degraded or completed.degraded)


def encode_answer(answer: Recommendation) -> bytes:
    """JSON, so that what comes out of a cache can do no harm."""
    return _RECOMMENDATION.dump_json(answer)


def decode_answer(payload: bytes) -> Recommendation:
    """Raises ValueError where these are not the bytes of an answer."""
    try:
        return _RECOMMENDATION.validate_json(payload)
    except ValidationError as error:
        raise ValueError(f"not an answer: {error}") from error


ANSWER_CODEC: Codec[Recommendation] = Codec(encode_answer, decode_answer)
