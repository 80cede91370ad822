"""The common part of all stages' replicas: the versions that serve, each with its engines, in step with the switchboard.

hold the versions that serve, warmed up -> answer requests
beside that, all the time: refresh engines; by the process's heartbeat, report how they do, and follow switches, suspicions, the
rollout and erasures
"""

import asyncio
import logging
from collections.abc import Awaitable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import Any, ClassVar, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

from msgspec.structs import replace
from ray import get_runtime_context, serve
from ray.serve.handle import DeploymentHandle

from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.config import EngineSettings, Settings, parse, with_changes
from cluster.engines.controller import FrameworkController
from cluster.engines.forgetting import Scope
from cluster.engines.heap import freeze_loaded
from cluster.engines.room import apart, beside
from cluster.engines.skipped import NoBackendAnswered
from cluster.engines.snapshots import StageSnapshot
from cluster.errors import BackendUnavailable, ModelGone
from cluster.fleet.board import Presence
from cluster.fleet.heartbeat import Orders
from cluster.fleet.rollout import Rollout
from cluster.fleet.switchboard import Switches
from cluster.stages import StageName
from cluster.traffic.latency import LatencyRecorder
from cluster.traffic.utilisation import Utilisation
from cluster.values import StageAnswer
from deployments.fleet.handover import Handover
from deployments.fleet.heartbeat import Heartbeat
from deployments.fleet.model_cache import ModelCache
from deployments.replicas.stage_model import StageModel
from deployments.sizing.fit import require_replica_fits
from deployments.telemetry.gpus import warn_of_the_first_gpu
from deployments.telemetry.logs import join_serves_log
from deployments.telemetry.metrics import StageRecorder, in_a_replica, meter

ModelT = TypeVar("ModelT", bound=StageModel[Any, Any])
REFRESH_INTERVAL_S = 1.0
WAY_BACK_S = 0.05
LATENCY_WINDOW_S = 5.0
FEWEST_ANSWERS = 100
logger = logging.getLogger("ray.serve")


class StageReplica(Generic[ModelT]):
    """One replica of a stage, in a Serve replica of its own or in a gateway's process. `start` is to be called before the first request.

    From `model_cache` to `drop_answers` it is the heartbeat's `Member`.
    """

    stage: ClassVar[StageName]
    model_type: ClassVar[type[StageModel[Any, Any]]]

    def __init__(self, settings: Settings, heartbeat: Heartbeat, handover: Handover | None = None) -> None:
        """`handover`: hands over the states that engines keep of users; without it, they end with the process."""
        join_serves_log()
        if in_a_replica():
            warn_of_the_first_gpu(tuple(get_runtime_context().get_accelerator_ids()["GPU"]))
        self._settings, self._heartbeat = settings, heartbeat
        self._wanted = settings.engines(self.stage)
        self._switches_version = 0
        self._switches: Switches = {}
        self._suspects: frozenset[str] = frozenset()
        store = BundleStore(settings.model_dir)
        self._models: ModelCache[ModelT] = ModelCache(store, self._make, self._discard, keep_s=2 * settings.longest_answer_s)
        self._without_engine = WeakKeyDictionary[ModelT, str]()  # those that have had none so far: why, after their warm-up
        self._serving: tuple[int, ...] = (1,)
        self._latency = LatencyRecorder(monotonic(), LATENCY_WINDOW_S)
        self._utilisation = Utilisation(monotonic())
        self._recorder = StageRecorder(self.stage, meter())
        self._answered, self._called_at, self._retired_busy_s = 0, 0.0, 0.0
        self._refreshing: asyncio.Task[None] | None = None
        self._handover = handover
        heartbeat.join(self.stage, self)

    async def start(self) -> None:
        """Returns when every role of this process can answer requests. Raises BundleError where no version can be served."""
        await self._heartbeat.start()

    async def close(self) -> None:
        self._heartbeat.close()
        if handover := self._take_handover():
            handover.close()
        if self._refreshing:
            self._refreshing.cancel()
        await self._models.close()

    def __del__(self) -> Awaitable[None] | None:
        """Close the replica. Serve calls this when it stops a replica, even one that could not be constructed, and awaits what it returns;
        no request is under way then. Afterwards the interpreter calls it once more.
        """
        handover = self._take_handover()
        if handover is not None and self._models.models:
            return self._hand_over(handover)
        self._close_engines()
        return None

    async def answer(self, request: Any, within_s: float) -> StageAnswer[Any] | NoBackendAnswered | ModelGone:
        """As `ask`, but returns the error that says why there is no answer: Ray sees no failed call."""
        try:
            return await self.ask(request, within_s)
        except (NoBackendAnswered, ModelGone) as error:
            return error

    async def ask(self, request: Any, within_s: float) -> StageAnswer[Any]:
        """The answer to one request, which may take `within_s` seconds from now on. Raises NoBackendAnswered and ModelGone."""
        with self._recorded(began := monotonic()):
            return await self._model_for(request.model_version).answer(due(request, began, within_s))

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Take a new order or selection, other backends or other options of theirs, while requests are served; settings that are not given
        are as in `args`. A new backend is loaded beside the calls. Where it raises ConfigError, nothing changes.
        """
        changed = with_changes(self._settings, self.stage, user_config, f"user_config of the {self.stage}")
        wanted, told = changed.engines(self.stage), list[ModelT]()
        while untold := [model for model in self._models.models if model not in told]:  # one may have been loaded meanwhile
            for model in untold:
                await model.reconfigure(self._switched(wanted))  # what an operator has switched by hand outlives a deploy
                self._apply(model)
            told += untold
        self._wanted = wanted
        self._models.try_again()

    async def check_health(self) -> None:
        """Unhealthy only where an engine thread is stuck, a task is gone or a fault has ended the process's use of the GPU: a broken engine
        is the controller's business.
        """
        for model in self._models.models:
            await model.check()
        self._heartbeat.check()
        if self._refreshing and self._refreshing.done():
            self._refreshing.result()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The figures of `cluster.autoscaling`: how many requests are under way in batches, how many wait and how full caches are, over all
        engines; how busy the replica is, 0 to 1; the 95th percentile of the durations of the last seconds' calls.
        """
        figures = [one for model in self._models.models for one in model.figures().values()]
        return {
            "requests": sum(one.get("requests", 0.0) for one in figures),
            "waiting": sum(one.get("waiting", 0.0) for one in figures),
            "kv_cache_usage": max((one.get("kv_cache_usage", 0.0) for one in figures), default=0.0),
            "utilisation": min(1.0, self._utilisation.share(monotonic(), self._busy_s())),
            "latency_ms": self._recent_p95_ms(),
        }

    async def record_routing_stats(self) -> dict[str, float]:
        """The speed of this replica's machine for `WeightedRouter`: answers in a second of engine time. Rounded, as each new figure goes to
        every router.
        """
        busy = self._busy_s()
        return {"weight": float(f"{self._answered / busy:.2g}")} if self._answered >= FEWEST_ANSWERS and busy else {}

    @property
    def model_cache(self) -> ModelCache[ModelT]:
        """The versions that this replica holds."""
        return self._models

    @property
    def holds(self) -> Mapping[int, str]:
        """Version -> READY, or why it cannot be served here (yet)."""
        return self._models.holds

    async def load(self, versions: Sequence[int], *, only: bool) -> None:
        await self._models.fill(versions, only=only)
        if self._handover is not None:
            await self._handover.start(self._controllers())
        self._refreshing = asyncio.create_task(self._refresh_forever())

    def presence(self, _: Rollout) -> Presence:
        return Presence(self.stage, self.holds)

    def snapshot(self) -> StageSnapshot | None:
        """The state of the version that serves; the metrics get that of every version here."""
        primary, shown = self._primary(), None
        for model in self._models.models:
            snapshot = model.controller.snapshot()
            self._recorder.count(model.bundle.version, snapshot)
            if model is primary:
                self._recorder.show(snapshot, model.figures())
                shown = snapshot
        return shown

    def follow(self, rollout: Rollout, orders: Orders) -> None:
        self._serving = (*sorted(orders.fleet.used, key=lambda version: (rollout.standing(version), -version)), rollout.stable)
        self._suspects = orders.suspects.get(self.stage, frozenset())
        for model in self._models.models:
            model.controller.suspect(self._suspects)
        if orders.switches_version != self._switches_version:
            self._switches_version, self._switches = orders.switches_version, orders.switches
            for model in self._models.models:
                self._apply(model)
            self._models.try_again()
        if self._handover is not None:
            self._handover.look(orders, self._controllers())

    async def forget(self, users: Collection[Scope], again: Collection[Scope]) -> None:
        """Have all engines forget, after the batches that run, so that these keep nothing of the users later."""
        erased = [*users, *again]
        if self._handover is not None:
            self._handover.erase(erased)
        await asyncio.gather(*(model.controller.forget(erased) for model in self._models.models))

    def drop_answers(self, tenant: str | None, user: str | None) -> None:
        """Does nothing: a stage keeps users' states, and no answers."""

    def _take_handover(self) -> Handover | None:
        handover, self._handover = getattr(self, "_handover", None), None
        return handover

    async def _hand_over(self, handover: Handover) -> None:
        if self._refreshing:
            self._refreshing.cancel()
        await handover.give(self._controllers())
        self._close_engines()

    def _close_engines(self) -> None:
        for model in self._models.models if hasattr(self, "_models") else ():
            model.close()

    def _controllers(self) -> list[FrameworkController[Any, Any]]:
        """The controllers of all versions that are held, that of the serving version first."""
        primary = self._primary()
        return [model.controller for model in sorted(self._models.models, key=lambda model: model is not primary)]

    def _model_for(self, model_version: str) -> ModelT:
        """The model for a request of a gateway that serves the version of this identity; "": the one that is reported. Raises ModelGone."""
        model = self._models.named(model_version) if model_version else self._primary()
        if model is None:
            held = ", ".join(one.bundle.identity for one in self._models.models)
            raise ModelGone(
                f"this replica of the {self.stage} holds {held or 'nothing'}, not {model_version}: a version is being rolled out"
            )
        return model

    def _primary(self) -> ModelT | None:
        """The model whose engines are reported: the first held one of `_serving` (those in use, then the stable one), else any held."""
        answering = (model for version in self._serving if (model := self._models.get(version)))
        return next(answering, None) or next(iter(self._models.models), None)

    def _busy_s(self) -> float:
        return self._retired_busy_s + sum(model.busy_s() for model in self._models.models)

    @contextmanager
    def _recorded(self, began: float) -> Iterator[None]:
        """Record a call as it ends. One that raises has no answer: a replica with broken engines refuses many a second, and is not fast."""
        try:
            yield
            self._answered += 1
        finally:
            self._called_at = now = monotonic()
            self._latency.record((now - began) * 1e3, now)

    def _recent_p95_ms(self) -> float:
        """The 95th percentile of recent calls, in milliseconds; 0 where there were none."""
        now = monotonic()
        return (self._latency.summary(now).p95_ms or 0.0) if now - self._called_at <= 2 * LATENCY_WINDOW_S else 0.0

    async def _make(self, bundle: Bundle) -> ModelT:
        await asyncio.to_thread(require_replica_fits, self._settings, bundle, self.stage, beside=self._models.bundles)
        model = cast(ModelT, self.model_type(self._settings, bundle))
        try:
            await self._instruct(model)
            await model.warm_up()
            logger.info("%s: %s", bundle.version, said := model.controller.explain(whole=True))
            await self._instruct(model)  # what has changed while it was warmed up
            self._require_engine(model, said)
        except asyncio.CancelledError:
            apart(model.close)  # not awaited: an engine that hangs delays no other version
            raise
        except BaseException:
            await beside(model.close)
            raise
        return model

    def _require_engine(self, model: ModelT, explanation: str) -> None:
        """A version for which no engine ever loaded must not replace one with a loaded engine. Raises BackendUnavailable where the new
        model has none and another held one has; where the new model has one, refuses the held versions that had none after their warm-up
        and have none now. A version that has only lost its engines is kept.
        """
        why, needed = "none of its engines works here, and another version's do", self.stage in model.bundle.manifest.stages
        if model.controller.loaded:
            for other in [other for other in self._models.models if other in self._without_engine and not other.controller.loaded]:
                self._models.refuse(other.bundle.manifest.version, f"{why}: {self._without_engine[other]}")
        elif needed and any(other.controller.loaded for other in self._models.models):
            raise BackendUnavailable(f"{why}: {explanation}")
        elif needed:
            self._without_engine[model] = explanation

    async def _instruct(self, model: ModelT) -> None:
        """Bring a model up to the present settings and switches. After the last change, nothing is awaited."""
        told = None
        while told is not self._wanted:
            told = self._wanted
            await model.reconfigure(told)
        self._apply(model)
        model.controller.suspect(self._suspects)

    async def _discard(self, model: ModelT) -> None:
        self._retired_busy_s += model.busy_s()
        await beside(model.close)

    async def _refresh_forever(self) -> None:
        """Probe and load beside the calls, so that the first choice returns, and the status stays true, even without traffic.

        Each version has a task of its own: one that takes long to load delays no other.
        """
        running: dict[int, asyncio.Task[None]] = {}
        while True:
            self._begin_refreshes(running)
            await asyncio.sleep(REFRESH_INTERVAL_S)

    def _begin_refreshes(self, running: dict[int, asyncio.Task[None]]) -> None:
        """`running`: the refresh of each version that has one. No version is referred to between two calls: it may be given up."""
        for version in [version for version, task in running.items() if task.done()]:
            running.pop(version).result()
        for model in self._models.models:
            if model.controller.loaded:
                self._without_engine.pop(model, None)
            if model.bundle.manifest.version not in running:
                running[model.bundle.manifest.version] = asyncio.create_task(_refresh(model.controller))

    def _switched(self, wanted: EngineSettings) -> EngineSettings:
        """The settings, with the switches of this stage applied to its order: while a backend that is gone is unloaded, which may take
        minutes, none is asked that an operator has switched off.
        """
        configured = {name: "off" if name in wanted.disabled else "on" for name in wanted.in_order()}
        off = [name for name, position in configured.items() if self._switches.get((self.stage, name), position) == "off"]
        return wanted.model_copy(update={"disabled": off})

    def _apply(self, model: ModelT) -> None:
        """Have a model follow the switches of this stage. A switch may name a backend of an earlier configuration, which is gone."""
        here = {backend.name for backend in model.controller.snapshot().backends}
        wanted = {name: position for (stage, name), position in self._switches.items() if stage == self.stage and name in here}
        for name, position in wanted.items():
            (model.controller.disable if position == "off" else model.controller.enable)(name)
        model.controller.prefer(next((name for name, position in wanted.items() if position == "first"), None))


class AsDeployment:
    """Makes a StageReplica a Serve deployment, which is given handles of other deployments; Serve awaits the constructor."""

    async def __init__(self: StageReplica[Any], settings: dict[str, Any], switchboard: DeploymentHandle[Any]) -> None:  # type: ignore[misc]
        tree, replica = parse(settings), serve.get_replica_context().replica_id.unique_id
        heartbeat = Heartbeat(tree, switchboard, replica)
        hands_over = self.stage == "encoder" and tree.encoder.handover.max_bytes
        handover = Handover(tree.encoder.handover, switchboard, replica, heartbeat) if hands_over else None
        StageReplica.__init__(self, tree, heartbeat, handover)
        await self.start()


def due(request: Any, began: float, within_s: float) -> Any:
    """The request with a deadline on this process's clock, a little before the caller's, so that the caller can be told the reason."""
    return replace(request, deadline=began + within_s - min(WAY_BACK_S, within_s / 10))


async def _refresh(controller: FrameworkController[Any, Any]) -> None:
    if await controller.refresh():
        await asyncio.to_thread(freeze_loaded)
