"""Which version of the model answers which user, in one gateway.

    user -> the trial's version, where the user's hash falls to its share and all replicas can serve it
            (the stable one, where only that can do what is asked)
         -> else the stable one, once all replicas can serve it; until then the version that served before or, where a stage has lost
            that, another that they can

An answer is made of one version from its first stage to its last. Where a replica turns out not to hold that version, another version
answers the whole request.
"""

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing, suppress
from time import monotonic
from typing import TypeVar

from msgspec.structs import replace

from cluster.background import LANE, Background
from cluster.errors import InvalidRequest
from cluster.fleet.board import FleetNews
from cluster.fleet.rollout import Arm, Rollout, Trial
from cluster.fleet.trial_guard import VersionFigures
from cluster.ranking import Ranking, RankingRequest
from cluster.values import AnswerPart, Recommendation, RecommendRequest
from deployments.fleet.model_cache import ModelCache
from deployments.served_model import ServedModel
from deployments.stages import Stages
from deployments.trial_figures import TrialFigures
from pipelines.cached_recommender import parts_of

AnswerT = TypeVar("AnswerT", Recommendation, Ranking)
SHADOWS_AT_ONCE = 2
"""How many requests are repeated in the shadow at a time; further ones are only answered."""
logger = logging.getLogger("ray.serve")


class VersionRouter:
    """`model_cache` holds the gateway's versions; `update` tells which of them should answer."""

    def __init__(self, model_cache: ModelCache[ServedModel], stages: Stages) -> None:
        self._model_cache, self._stages = model_cache, stages
        self._serving, self._was_ready = 0, False  # whether all replicas were known to hold it
        self._rollout = Rollout(stable=1)
        self._tried: int | None = None
        self._figures = TrialFigures(self.trial_for)
        self._shadows = Background(SHADOWS_AT_ONCE)

    @property
    def stable(self) -> ServedModel:
        """The version that serves users outside of trials."""
        return self._model_cache.get(self._serving) or self._model_cache.models[0]

    def model_for(self, tenant: str, user_id: str) -> ServedModel:
        """The version that answers this user."""
        trial = self.trial_for(tenant, user_id)
        return (trial and self._model_cache.get(trial.version)) or self.stable

    def trial_for(self, tenant: str, user_id: str) -> Trial | None:
        """The trial that this user is served under."""
        return None if self._tried is None else self._rollout.trial_for(tenant, user_id)

    def update(self, rollout: Rollout, news: FleetNews) -> None:
        """Change over to the version that every replica holds by now."""
        before, self._rollout = self._rollout, rollout
        self._figures.update(rollout)
        self._stages.update(news)
        able = [v for v in self._rollout.versions if self._model_cache.get(v) and self._stages.ready(v)]
        if self._rollout.stable in able and news.settled:
            self._serve(self._rollout.stable)
        elif self._model_cache.get(self._serving) is None or (news.settled and (not self._was_ready or self._is_gone(news))):
            self._serve(self._stand_in(news.used))
        self._was_ready |= news.settled and self._stages.ready(self._serving)
        self._tried = self._tried_now(able, before, settled=news.settled)

    def _is_gone(self, news: FleetNews) -> bool:
        """Whether some stage holds the serving version nowhere any more, and all hold another: as where the only encoder has started again,
        and found the version damaged.
        """
        return bool(news.ready) and self._serving not in news.held

    def _stand_in(self, used: Collection[int]) -> int:
        """The version to answer by where none answers yet, or one that replicas do not hold: one that they do hold, best the stable one,
        then one that was stable before, then one that other gateways answer by, and that on trial last; a shadow's only where the gateway
        holds no other.
        """
        trial, here = self._rollout.trial, [model.bundle.manifest.version for model in self._model_cache.models]
        held = [version for version in here if trial is None or trial.kind != "shadow" or version != trial.version] or here
        if ready := [version for version in held if self._stages.ready(version)]:
            of = self._rollout
            return min(ready, key=lambda version: (of.standing(version), not of.answers_users(version), version not in used, -version))
        return next((version for version in (self._serving, *sorted(used)) if version in held), held[0])

    def _tried_now(self, able: Collection[int], before: Rollout, *, settled: bool) -> int | None:
        """The version on trial from now on. A restarted switchboard has not heard from all processes yet: a trial goes on meanwhile."""
        if (trial := self._rollout.trial) is None:
            return None
        if settled:
            return trial.version if trial.version in able else None
        goes_on = self._tried == trial.version and self._rollout.period == before.period and self._model_cache.get(trial.version)
        return trial.version if goes_on else None

    def uses(self) -> frozenset[int]:
        return frozenset({self._serving, self._tried or self._serving} - {0})

    def figures(self) -> dict[Arm, VersionFigures]:
        return self._figures.by_arm()

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        """The answer by the user's version. Raises InvalidRequest."""
        began, model = monotonic(), self._able(request)
        answer = await self._elsewhere(model, await self._timed(model, request), began, lambda other: self._timed(other, request))
        if self._shadowed(request):
            self._in_shadow(request, answer)
        return answer

    async def rank(self, request: RankingRequest) -> Ranking:
        """The ranking by the user's version. Raises InvalidRequest. Its duration depends on the candidates, and does not count for a trial;
        a shadow ranks nothing.
        """
        began, model = monotonic(), self._able(request)
        with self._figures.measured(model, request) as note:
            note(answer := await model.candidates.rank(request))
        return await self._elsewhere(model, answer, began, lambda other: other.candidates.rank(request))

    async def stream(self, request: RecommendRequest) -> AsyncGenerator[AnswerPart, None]:
        """The answer's parts by the user's version; where replicas turn out to lack it, another version's follow. A stream's duration
        depends on its reader too, and does not count for a trial.
        """
        began, model = monotonic(), self._able(request)
        with self._figures.measured(model, request) as note:
            async with aclosing(model.answers.stream(request)) as parts:
                async for part in parts:
                    if isinstance(part, Recommendation):  # the last one
                        answer = part
                    else:
                        yield part
            note(answer)
        given = await self._elsewhere(model, answer, began, lambda other: self._timed(other, request))
        for one in (answer,) if given is answer else parts_of(given):
            yield one

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """Forget the usual requests and last answers of a user, of a tenant's users, or of all, and that a trial has had them."""
        self._figures.forget(tenant, user_id)
        for model in self._model_cache.models:
            model.answers.forget(tenant, user_id)

    async def close(self) -> None:
        await self._shadows.close()

    def _able(self, request: RecommendRequest | RankingRequest) -> ServedModel:
        """The user's version; the stable one where the version on trial cannot do what is asked, as for want of a decoder, and the stable
        one can. The request then counts as one that failed in the trial.
        """
        model, stable = self.model_for(request.tenant, request.user_id), self.stable
        if model is stable:
            return stable
        try:
            model.check(request)
        except InvalidRequest:
            with suppress(InvalidRequest):
                stable.check(request)
                self._figures.recorder(model, request).failed()
                return stable
        return model

    def _serve(self, version: int) -> None:
        if version != self._serving:
            logger.info("version %d serves%s", version, f" instead of {self._serving}" if self._serving else "")
            self._serving, self._was_ready = version, False

    async def _elsewhere(
        self, first: ServedModel, answer: AnswerT, began: float, ask: Callable[[ServedModel], Awaitable[AnswerT]]
    ) -> AnswerT:
        """The answer of `first`, or of another version where replicas turned out to lack those asked before: of those by which users may be
        answered, the one on trial last. Another version that cannot answer the request, as for want of a decoder, is passed over.
        """
        model, others = first, [other for other in self._best_first() if other is not first]
        while answer.degraded and model.was_gone(began) and others:
            other = others.pop(0)
            with suppress(InvalidRequest):
                answer, model = await ask(other), other
        return answer

    def _best_first(self) -> list[ServedModel]:
        """The versions here by which users may be answered: the stable one, earlier ones, the latest first, and the one on trial. The
        version that serves is always among them.
        """
        here = {model.bundle.manifest.version: model for model in self._model_cache.models}
        fit = [version for version in here if version == self._serving or self._rollout.answers_users(version)]
        return [here[version] for version in sorted(fit, key=lambda version: (self._rollout.standing(version), -version))]

    async def _timed(self, model: ServedModel, request: RecommendRequest) -> Recommendation:
        """The version's answer. A trial is told how long it took."""
        with self._figures.measured(model, request, timed=True) as note:
            note(answer := await model.answers.recommend(request))
        return answer

    def _shadowed(self, request: RecommendRequest) -> bool:
        trial = self._rollout.trial
        in_it = self._tried is not None and trial is not None and trial.kind == "shadow"
        return bool(in_it and trial and trial.includes(request.tenant, request.user_id) and self._shadows.has_room())

    def _in_shadow(self, request: RecommendRequest, answer: Recommendation) -> None:
        """Repeat the request, in its caller's lane: the durations of both are compared."""
        model = self._model_cache.get(self._tried or 0)
        if model is not None:
            shadow = self._compare(model, replace(request, cache="bypass", deadline=None), answer)
            self._shadows.start(shadow, lane=LANE.get(), ahead=False)

    async def _compare(self, model: ServedModel, request: RecommendRequest, answer: Recommendation) -> None:
        try:
            self._figures.recorder(model, request).compared(await self._timed(model, request), answer)
        except InvalidRequest:  # of what the version that has answered can do
            self._figures.recorder(model, request).failed()
        except Exception:
            logger.exception("the shadow of an answer could not be computed by %s", model.bundle.version)
