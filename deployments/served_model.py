"""One version of the model in a gateway: what answers by it, and the way to the stages that hold it."""

import math
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from time import monotonic
from typing import TypeVar

from cluster import tracing
from cluster.bundle import Bundle
from cluster.cache.tier_values import KEPT_TIMES
from cluster.cache.tiered import TieredCache
from cluster.config import Settings
from cluster.dataset import Catalogue
from cluster.errors import ModelGone
from cluster.ranking import RankingRequest
from cluster.stages import ENCODER, GENERATOR, RANKER, Stage
from cluster.values import GeneratedPart, GenerateRequest, Recommendation, RecommendRequest, StageAnswer, StageReport
from deployments.stages import Stages
from pipelines.answer_key import digest_with
from pipelines.cached_recommender import CachedRecommender
from pipelines.rank import CandidateRanker
from pipelines.recommend import Recommender
from pipelines.remembered import UsualRequests
from pipelines.stored_history import StoredHistories

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


class ServedModel:
    """One version in a gateway: the data that rank and title its items, and the way to the stages that hold it."""

    def __init__(
        self,
        bundle: Bundle,
        settings: Settings,
        stages: Stages,
        histories: StoredHistories,
        *,
        cache: TieredCache[Recommendation] | None = None,
        usual: UsualRequests | None = None,
        flagged: Callable[[RecommendRequest], RecommendRequest] = lambda request: request,
        count: Callable[[Sequence[StageReport]], object] | None = None,
    ) -> None:
        self.bundle, self._stages = bundle, stages
        self._gone_at, self._kept_s = -math.inf, KEPT_TIMES * settings.cache.negative_ttl_s
        generates, edge = bundle.manifest.decoder is not None, settings.gateway
        recommender = Recommender(
            bundle,
            partial(self._ask, ENCODER),
            partial(self._ask, GENERATOR) if generates else None,
            self._stream if generates else None,
            partial(self._ask, RANKER),
            beam=settings.generator.beam,
            pool=edge.pool,
            rank_pool=edge.rank_pool,
            deadline_s=edge.deadline_s,
            generation_deadline_s=edge.generation_deadline_s,
            ranking_deadline_s=edge.ranking_deadline_s,
        )
        made_by = digest_with(
            bundle.digest,
            beam=settings.generator.beam,
            pool=edge.pool,
            rank_pool=edge.rank_pool,
            longest=settings.events.longest,
            store=settings.event_store_url.partition(":")[0] if settings.events.enabled else "",  # which answers name
        )
        self.answers = CachedRecommender(recommender, histories, cache, made_by, usual, flagged=flagged, count=count)
        self.candidates = CandidateRanker(
            bundle,
            histories,
            partial(self._ask, ENCODER),
            partial(self._ask, RANKER),
            deadline_s=edge.deadline_s,
            ranking_deadline_s=edge.ranking_deadline_s,
        )

    @property
    def catalogue(self) -> Catalogue:
        return self.bundle.catalogue

    def check(self, request: RecommendRequest | RankingRequest) -> None:
        """Raises InvalidRequest where this version cannot do what is asked, as for want of a decoder."""
        if isinstance(request, RankingRequest):
            self.candidates.check(request)
        else:
            self.answers.check(request)

    def was_gone(self, since: float) -> bool:
        """Whether a replica lacked this version after `since`, or so shortly before that a degraded answer of then may still be kept."""
        return self._gone_at >= since - self._kept_s

    async def _ask(self, stage: Stage[RequestT, ResultT], request: RequestT, within_s: float) -> StageAnswer[ResultT]:
        with self._gone_noted():
            if not tracing.recording():
                return await self._stages.ask(stage, request, within_s)
            with tracing.span(stage.step, model_version=self.bundle.version, **stage.extent(request)) as current:
                answer = await self._stages.ask(stage, request, within_s)
                tracing.say_who_served(current, answer.report)
                return answer

    async def _stream(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[GeneratedPart, None]:
        with self._gone_noted():
            async with aclosing(self._stages.stream(request, within_s)) as parts:
                async for part in parts:
                    yield part

    @contextmanager
    def _gone_noted(self) -> Iterator[None]:
        """Within the block, that a replica lacks this version is noted for `was_gone`."""
        try:
            yield
        except ModelGone:
            self._gone_at = monotonic()
            raise
