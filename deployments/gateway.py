"""The gateway deployment: HTTP in, the recommendation pipeline, HTTP out.

For each version that serves, a gateway holds what retrieval and reranking need of items: catalogue, vectors, first-seen times, popularity,
blend weights. Of users it holds cached answers and the event store. The stages that it asks are deployments of their own, or, with
`placement: colocated`, in its own process.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from functools import partial
from time import monotonic, perf_counter, process_time
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.cache.shared_notes import SharedNotes
from cluster.cache.tiered import TieredCache
from cluster.config import Settings, parse, split_changes, with_changes
from cluster.dataset import Catalogue
from cluster.engines.forgetting import Scope
from cluster.events.guarded import GuardedHistories
from cluster.events.read_turns import ReadTurns
from cluster.events.store import ServedEvents
from cluster.fleet.board import Presence
from cluster.fleet.heartbeat import Orders
from cluster.fleet.rollout import Rollout
from cluster.fleet.switchboard import Position
from cluster.profile import starts_haproxy
from cluster.ranking import Ranking, RankingRequest
from cluster.stages import STAGES
from cluster.tracing import say_whence, span
from cluster.traffic.utilisation import Utilisation
from cluster.values import AnswerPart, Item, Recommendation, RecommendRequest, Strategy
from deployments.admin_api import AdminApi
from deployments.anticipation import Anticipation
from deployments.calls.shared_answer import SharedAnswer
from deployments.flags import Flags
from deployments.fleet.heartbeat import Heartbeat
from deployments.fleet.model_cache import ModelCache
from deployments.http.api import create_api
from deployments.http.exchange import HttpRequest, HttpResponse, exchange
from deployments.http.interface import HttpInterface
from deployments.http.listening import take_many_connections
from deployments.http.messages import BackendsOut, ReadyOut, SwitchOut
from deployments.http.models import ModelsOut
from deployments.http.playground import Offers
from deployments.replicas.encoder import Encoder
from deployments.replicas.generator import Generator
from deployments.replicas.ranker import Ranker
from deployments.served_model import ServedModel
from deployments.sizing.fit import require_replica_fits
from deployments.stages import ColocatedStages, SplitStages, Stages
from deployments.stores import keep_removed, open_cache, open_events
from deployments.telemetry.logs import SlowAnswers, join_serves_log
from deployments.telemetry.metrics import GatewayRecorder, meter
from deployments.user_data import UserData
from deployments.version_router import VersionRouter
from pipelines.remembered import REQUEST_CODEC, UsualRequests
from pipelines.stored_history import StoredHistories

CACHE_INTERVAL_S = 5.0
"""Seconds between two looks at the caches' figures."""
READINESS_S = 0.5
"""Seconds that an answer about readiness is kept."""
ERASE_WITHIN_S = 5.0
"""Seconds that `close` gives to erasures: fewer than its deployment's graceful_shutdown_timeout_s."""
logger = logging.getLogger("ray.serve")


class Gateway:
    """One gateway replica, independent of Serve. `api`: its ASGI application; `stages`: how it asks its stages; `local`: this machine alone
    reaches the service. `start` is to be called before the first request.

    Its methods in their order: how it begins, what Serve asks of a replica, how it ends (`start` to `close`); the heartbeat's `Member`
    (`model_cache` to `drop_answers`); what the ZeroMQ door calls (`exchange`, `check_key`); the routes' `Service` (`recommend` to
    `models`), which has `close` too.
    """

    def __init__(
        self,
        settings: Settings,
        switchboard: DeploymentHandle[Any],
        heartbeat: Heartbeat,
        stages: Stages,
        *,
        cache: TieredCache[Recommendation] | None = None,
        events: ServedEvents | None = None,
        local: bool = False,
    ) -> None:
        self._settings, self._limits, self._stages, self._cache = settings, settings.gateway, stages, cache
        self._heartbeat = heartbeat
        self._shared = shared = cache.shared if cache is not None else None
        self._usual = UsualRequests(None if shared is None else SharedNotes(shared, REQUEST_CODEC))
        turns = None if events is None else ReadTurns(lambda: events.readers)
        histories = None if events is None else GuardedHistories(events, settings.events.read_deadline_ms / 1000, turns)
        self._histories = StoredHistories(histories, settings.events.longest)

        self._models = ModelCache(BundleStore(settings.model_dir), self._make, self._discard, keep_s=2 * settings.longest_answer_s)
        self._versions = VersionRouter(self._models, stages)
        self._flags = Flags(self._limits.flags, self._versions.trial_for)
        self._admin = AdminApi(switchboard, lambda: self._versions.stable.bundle)
        self._readiness = SharedAnswer(self._admin.readiness, READINESS_S)
        self._recorder, self._slow = GatewayRecorder(meter()), SlowAnswers()
        self._anticipation: Anticipation | None = None
        if cache is not None:
            after_s = settings.events.anticipate_after_s
            self._anticipation = Anticipation(
                self._versions,
                self._usual,
                anticipates=self._flags.anticipates,
                after_s=after_s,
                free=lambda: self.api.edge.free_places(),  # noqa: PLW0108 - the edge is made after it
                within_rate=lambda tenant: self.api.edge.may_compute_ahead(tenant),  # noqa: PLW0108
            )
        self._data = UserData(
            settings,
            self._admin,
            self._versions,
            cache=cache,
            events=events,
            turns=turns,
            usual=self._usual,
            recorder=self._recorder,
            anticipation=self._anticipation,
        )
        self.api = create_api(
            self,
            self._data,
            self._limits,
            gateways=lambda: heartbeat.gateways,
            meter=meter(),
            local=local,
            proxied=starts_haproxy(),
        )
        if cache is not None:
            cache.give_way(self.api.edge.spare_places)
        self._utilisation = Utilisation(monotonic(), self._busy_s())
        self._cache_figures: asyncio.Task[None] | None = None
        self._warned = False
        heartbeat.join("gateway", self)

    async def start(self) -> None:
        """Returns when requests can be answered. Raises BundleError where no version can be served."""
        await self._heartbeat.start()
        self._utilisation = Utilisation(monotonic(), self._busy_s())  # anew: what the start took is no load
        if self._cache is not None:
            self._cache_figures = asyncio.create_task(self._look_at(self._cache))

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take new limits and flags, another size of l1, and colocated stages' settings, while requests are served; settings that are not
        given are as in `args`. Where it raises ConfigError, nothing changes.
        """
        sections = split_changes(self._settings, user_config, source := "user_config of the gateway")
        changed = {name: with_changes(self._settings, name, changes, source) for name, changes in sections.items()}
        self._limits = changed["gateway"].gateway
        self._flags.configured = self._limits.flags
        self.api.edge.reconfigure(self._limits)
        if self._cache is not None:
            self._cache.resize(changed["cache"].cache.l1_bytes)
        await self._stages.reconfigure({name: sections[name] for name in sections if name in STAGES}, self._limits.flags)

    async def check_health(self) -> None:
        """Raises the error of a background task that has ended."""
        self._heartbeat.check()
        if self._cache_figures and self._cache_figures.done():
            self._cache_figures.result()
        await self._stages.check_health()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """`utilisation`: the share of a core that this process uses, without the opening and closing of versions."""
        return {"utilisation": self._utilisation.share(monotonic(), self._busy_s())}

    async def close(self) -> None:
        """Carry out the erasures still due, of which no other gateway may know; close the cache, the event store, the stages."""
        self._heartbeat.close()
        if self._cache_figures:
            self._cache_figures.cancel()
        await self._versions.close()
        try:
            async with asyncio.timeout(ERASE_WITHIN_S):
                await self._heartbeat.leave()
        except Exception:
            logger.exception("not all erasures that were to be repeated have been, as this gateway ends")
        await self._data.close()
        await self._admin.close()
        await self._stages.close()

    @property
    def model_cache(self) -> ModelCache[ServedModel]:
        """The versions that this gateway holds."""
        return self._models

    async def load(self, versions: Sequence[int], *, only: bool) -> None:
        await self._models.fill(versions, only=only)

    def presence(self, rollout: Rollout) -> Presence:
        uses, shards = self._versions.uses(), self._shared.seen if self._shared is not None else None
        figures = self._versions.figures() if rollout.trial else {}
        return Presence("gateway", self._models.holds, uses, rollout.period, figures, shards)

    def snapshot(self) -> None:
        """None: a gateway has no engines of its own."""

    def follow(self, rollout: Rollout, orders: Orders) -> None:
        if self._shared is not None and orders.layout is not None:
            self._shared.follow(orders.layout)
        if self._cache is not None:
            self._cache.divide(self._heartbeat.gateways)
        if self._heartbeat.gateways > 1:
            self._warn_of_lost_answers()
        if self._models.models:
            served = self._versions.stable
            self._versions.update(rollout, orders.fleet)
            if self._versions.stable is not served and self._anticipation is not None:
                self._anticipation.make_ready()
            version = self._versions.stable.bundle.manifest.version
            wanted = rollout.stable if self._heartbeat.knows_rollout else 0
            self._recorder.look(self.api.edge.statistics(), self._stages.calls(), version=version, wanted=wanted)

    async def forget(self, users: Collection[Scope], again: Collection[Scope]) -> None:
        for each, repeated in ((users, False), (again, True)):
            for tenant, user in each:
                await self._data.forget(tenant, user, again=repeated)
                await asyncio.sleep(0)  # requests go on

    def drop_answers(self, tenant: str | None, user: str | None) -> None:
        self._data.drop_answers(tenant, user)

    async def exchange(self, request: HttpRequest) -> HttpResponse:
        """Answer an HTTP exchange that came by another door, with the same edge, routes and messages."""
        return await exchange(self.api, request)

    async def check_key(self, request: HttpRequest) -> HttpResponse:
        """For another door: 204 where the key of a request is known here."""
        return await exchange(self.api.edge.check_key, request)

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        began = perf_counter()
        with span("recommend", strategy=request.strategy or "", k=request.k) as current:
            answer = await self._versions.recommend(request)
            say_whence(current, answer)
        took_s = perf_counter() - began
        self._recorder.answered(request, answer, took_s, flags=self._flags.tried(request))
        self._slow.note(answer, took_s, self._limits.slow_ms)
        return answer

    async def stream(self, request: RecommendRequest) -> AsyncGenerator[AnswerPart, None]:
        epoch, began, held_s = self._recorder.epoch, perf_counter(), 0.0
        async with aclosing(self._versions.stream(request)) as parts:
            async for part in parts:
                given = perf_counter()
                if isinstance(part, Recommendation):
                    self._recorder.answered(request, part, began=epoch, flags=self._flags.tried(request))
                    self._slow.note(part, given - began - held_s, self._limits.slow_ms)
                yield part
                held_s += perf_counter() - given  # by the reader

    async def rank(self, request: RankingRequest) -> Ranking:
        began = perf_counter()
        with span("rank candidates", candidates=len(request.candidates)):
            ranking = await self._versions.rank(request)
        self._recorder.ranked(request, ranking)
        self._slow.note(ranking, perf_counter() - began, self._limits.slow_ms)
        return ranking

    def item(self, item_id: str) -> Item | None:
        catalogue = self._versions.stable.catalogue
        index = catalogue.index_of(item_id)
        return None if index is None else catalogue[index]

    def catalogue(self) -> Catalogue:
        return self._versions.stable.catalogue

    def offers(self) -> Offers:
        manifest = self._versions.stable.bundle.manifest
        able: tuple[Strategy, ...] = ("unified", "retrieval", "generative") if manifest.decoder else ("retrieval",)
        strategies = tuple(sorted(able, key=lambda one: one != self._limits.flags.strategy))  # the default first
        return Offers(self._versions.stable.bundle.version, strategies, ranker=manifest.ranker is not None)

    async def backends(self) -> BackendsOut:
        return await self._admin.backends()

    async def switch(self, stage: str, name: str, to: Position) -> SwitchOut:
        return await self._admin.switch(stage, name, to)

    async def readiness(self) -> ReadyOut:
        """Whether each stage is ready. Callers may ask often: the switchboard is asked twice a second at most."""
        return await self._readiness.get()

    async def models(self) -> ModelsOut:
        return await self._admin.models()

    def _warn_of_lost_answers(self) -> None:
        """Warn once where several gateways share no cache: one of them alone then has the answer that it has computed ahead."""
        if self._cache is not None and self._shared is None and self._limits.flags.anticipate and not self._warned:
            self._warned = True
            logger.warning(
                "%d gateways with cache.l2: off: after an event the next answer is computed ahead by the gateway that stores it, and the"
                " others compute it again; set cache: {l2: actors}, or gateway: {flags: {anticipate: false}}",
                self._heartbeat.gateways,
            )

    def _busy_s(self) -> float:
        return process_time() - self._models.beside.spent_s

    async def _make(self, bundle: Bundle) -> ServedModel:
        await self._models.beside.run(require_replica_fits, self._settings, bundle, "gateway", beside=self._models.bundles)
        return await self._models.beside.run(
            ServedModel,
            bundle,
            self._settings,
            self._stages,
            self._histories,
            cache=self._cache,
            usual=self._usual,
            flagged=partial(self._flags.apply, generates=bundle.manifest.decoder is not None),
            count=self._recorder.ran,
        )

    async def _discard(self, model: ServedModel) -> None:
        """Drop the cached answers, which refer to the model's catalogue. It has nothing to close."""
        if self._cache is not None:
            self._cache.let_go(lambda answer: answer.model_version == model.bundle.version)

    async def _look_at(self, cache: TieredCache[Recommendation]) -> None:
        while True:
            self._recorder.look_at_cache(await cache.statistics())
            await asyncio.sleep(CACHE_INTERVAL_S)


class GatewayDeployment(Gateway):
    """The gateway as a Serve deployment: Serve makes the replica, then asks it for its ASGI application. Without handles, its stages are
    in its own process.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: dict[str, Any],
        switchboard: DeploymentHandle[Any],
        encoder: DeploymentHandle[Any] | None = None,
        generator: DeploymentHandle[Any] | None = None,
        ranker: DeploymentHandle[Any] | None = None,
        *,
        local: bool = False,
        zeromq: DeploymentHandle[Any] | None = None,  # noqa: ARG002 - Serve runs the deployments that its root is given
    ) -> None:
        join_serves_log()
        take_many_connections()
        tree, context = parse(settings), serve.get_replica_context()
        heartbeat = Heartbeat(tree, switchboard, context.replica_id.unique_id)
        stages = _stages(tree, heartbeat, (encoder, generator, ranker))
        cache, events = await open_cache(tree.cache, context.app_name), await open_events(tree)
        super().__init__(tree, switchboard, heartbeat, stages, cache=cache, events=events, local=local)
        await self.start()
        self._removal = asyncio.create_task(keep_removed(tree.cache, context.app_name))

    async def close(self) -> None:
        """Remove no more cache actors, and close what the gateway has open."""
        self._removal.cancel()
        await super().close()

    def __serve_build_asgi_app__(self) -> HttpInterface:
        return self.api


def _stages(
    settings: Settings,
    heartbeat: Heartbeat,
    handles: tuple[DeploymentHandle[Any] | None, DeploymentHandle[Any] | None, DeploymentHandle[Any] | None],
) -> Stages:
    encoder, generator, ranker = handles
    if encoder is None or generator is None or ranker is None:
        return ColocatedStages(Encoder(settings, heartbeat), Generator(settings, heartbeat), Ranker(settings, heartbeat))
    return SplitStages(encoder, generator, ranker)
