"""Record the metrics of cluster.metrics: in a Serve replica through Ray, which serves them on each node by its agent; elsewhere not at all.

gateway         each answer, the stages of each computed one, each event, and twice a second what the edge and the stages' callers count
stage replica   each batch, and twice a second what its controllers and engines count
"""

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from time import time
from typing import TYPE_CHECKING

from ray import serve
from ray.serve.exceptions import RayServeException

from cluster import metrics as m
from cluster.cache.entry import Key
from cluster.cache.epochs import Epochs
from cluster.cache.tier_values import TierStatistics
from cluster.engines.skipped import OutOfTime
from cluster.engines.snapshots import StageSnapshot
from cluster.events.store import Event
from cluster.metrics import SILENT, Meter, Metric, Totals
from cluster.ranking import Ranking, RankingRequest
from cluster.stages import StageName
from cluster.titled_items import item_ids
from cluster.traffic.breaker import BreakerState
from cluster.values import Recommendation, RecommendRequest, SkippedBackend, StageReport
from deployments.shown_items import Followed, ShownItems
from deployments.telemetry.gpus import Gpus, nvml
from deployments.telemetry.ray_meter import RayMeter
from pipelines.popularity import POPULARITY

if TYPE_CHECKING:
    from deployments.http.edge import EdgeStatistics

BREAKER_STATES = {BreakerState.CLOSED: 0.0, BreakerState.HALF_OPEN: 1.0, BreakerState.OPEN: 2.0}
KEPT_COUNTERS: Mapping[str, tuple[Metric, Mapping[str, str]]] = {
    "hits": (m.STATE_LOOKUPS, {"result": "hit"}),
    "misses": (m.STATE_LOOKUPS, {"result": "miss"}),
    "asked_rows": (m.STATE_ROWS, {}),
    "hit_rows": (m.STATE_ROWS_FOUND, {}),
    "evictions": (m.STATE_EVICTIONS, {}),
    "rejected": (m.STATE_REJECTIONS, {}),
    "buffer_hits": (m.BUFFERS, {"result": "hit"}),
    "buffer_misses": (m.BUFFERS, {"result": "miss"}),
    "logits_hits": (m.LOGITS, {"result": "hit"}),
    "logits_misses": (m.LOGITS, {"result": "miss"}),
}
"""Figure of a backend's `kept` (see cluster.protocols) -> its metric and labels; other figures are shown by GET /v1/backends alone."""
KEPT_GAUGES = {"users": m.STATE_USERS, "used_bytes": m.STATE_BYTES, "buffer_held_bytes": m.BUFFER_BYTES}
QUEUES = {"waiting": m.QUEUE_WAITING, "running": m.QUEUE_RUNNING, "kv_cache_usage": m.KV_CACHE_USAGE}


def meter() -> Meter:
    """Ray's meter in a replica; elsewhere one that keeps nothing."""
    return _ray_meter() if in_a_replica() else SILENT


def in_a_replica() -> bool:
    """Whether this process is one of Serve's."""
    try:
        serve.get_replica_context()
    except RayServeException:
        return False
    return True


@cache
def _ray_meter() -> RayMeter:
    made = RayMeter()
    threading.Thread(target=made.hand_over_forever, name="metrics", daemon=True).start()
    return made


class GatewayRecorder:
    """Records the metrics of one gateway. Nothing here raises because a shared cache or a stage is away."""

    def __init__(self, meter: Meter = SILENT) -> None:
        self._meter, self._totals, self._shown = meter, Totals(meter), ShownItems()
        self._erasures = Epochs(0, remembered=10_000)

    @property
    def epoch(self) -> int:
        """The present epoch of erasures, to be passed to `answered` as `began` where an answer is given over a longer time."""
        return self._erasures.now

    def answered(
        self,
        request: RecommendRequest,
        answer: Recommendation,
        duration_s: float | None = None,
        *,
        began: int | None = None,
        flags: str = "",
    ) -> None:
        """Count an answer. `duration_s`: None where the reader's pace is part of it. `began`: the `epoch` when the answer began; what was
        shown to a user that was erased since is not remembered. `flags`: those on trial, counted as a part of the answer's version.
        """
        tier = answer.cache.tier if answer.cache else "none"
        version, items = f"{answer.model_version} {flags}".rstrip(), item_ids(answer.items)
        self._meter.add(m.ANSWERS, tier=tier, degraded=_said(answer.degraded))
        if duration_s is not None:
            self._meter.observe(m.ANSWER_DURATION, duration_s, tier=tier)
        self._input(request, answer)
        self._meter.add(m.RECOMMENDED, len(items), model_version=version)
        if began is None or self._erasures.admits(Key(request.tenant, request.user_id, ""), began):
            self._shown.show(request.tenant, request.user_id, items, version, time())

    def ran(self, stages: Sequence[StageReport]) -> None:
        """Count the stages of an answer as it is computed; it may be given to many callers, or to none."""
        for report in stages:
            self._meter.observe(m.STAGE_DURATION, report.duration_ms / 1e3, stage=report.stage, backend=report.backend)
            for skipped in report.fallback_from:
                self._meter.add(m.FALLBACKS, stage=report.stage, backend=skipped.backend, reason=reason_kind(skipped))

    def ranked(self, request: RankingRequest, ranking: Ranking) -> None:
        """Count a ranking, its stages, and the items that were named."""
        self._meter.add(m.RANKINGS, degraded=_said(ranking.degraded))
        self.ran(ranking.stages)
        self.named({one.item_id for one in request.behaviours or ()}.union(request.candidates), ranking.unknown_items)

    def named(self, items: set[str], unknown: Iterable[str]) -> None:
        """Count the items that a request names, and of them those that are `unknown`."""
        self._meter.add(m.ITEMS_NAMED, len(items))
        if lacking := items.intersection(unknown):
            self._meter.add(m.ITEMS_UNKNOWN, len(lacking))

    def happened(self, event: Event) -> None:
        """Count an event that was stored for the first time."""
        done = event.behaviour
        followed, version = self._shown.follow(event.tenant, event.user_id, done.item_id, done.timestamp, time())
        if followed is Followed.YES:
            self._meter.add(m.FOLLOWED, action=done.action.value, model_version=version)
        elif followed is Followed.NO:
            self._meter.add(m.NOT_FOLLOWED, action=done.action.value)

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """Forget what was recommended to a user, to a tenant's users, or to all."""
        self._erasures.end(tenant, user_id)
        self._shown.forget(tenant, user_id)

    def look(self, edge: "EdgeStatistics", stages: Mapping[StageName, Mapping[str, float]], *, version: int, wanted: int) -> None:
        """Take over the counts of the edge and of the callers of stages, the version that serves and the one that is to (0: not known)."""
        for metric, value in ((m.ADMISSION_RUNNING, edge.running), (m.ADMISSION_WAITING, edge.waiting), (m.ADMISSION_PLACES, edge.places)):
            self._meter.set(metric, value)
        for stage, figures in stages.items():
            self._totals.count(m.STAGE_CALLS, figures["requests"], stage=stage, call="first")
            self._totals.count(m.STAGE_CALLS, figures["copies"], stage=stage, call="copy")
            self._totals.count(m.HEDGES, figures["hedges"], stage=stage)
            self._totals.count(m.RETRIES_REFUSED, figures["refused"], stage=stage)
        self._meter.set(m.MODEL_VERSION, version)
        self._meter.set(m.MODEL_WANTED, wanted)

    def look_at_cache(self, figures: TierStatistics) -> None:
        """Take over the cache's counts; of the second tier, which all gateways share, only what it holds and this gateway's failures."""
        l1 = figures.l1
        for result, count in (("hit", l1.hits - l1.stale_hits), ("stale", l1.stale_hits), ("miss", l1.misses)):
            self._totals.count(m.CACHE_LOOKUPS, count, result=result)
        for work in ("computed", "joined", "dropped"):
            self._totals.count(m.CACHE_WORK, getattr(figures, work), work=work)
        self._totals.count(m.CACHE_WORK, figures.refreshes, work="refreshed")
        self._totals.count(m.CACHE_EVICTIONS, l1.evictions)
        self._totals.count(m.CACHE_FAILURES, figures.codec_failures)
        for shard in figures.shards:  # each by itself: one that is gone takes its failures along, and the others have no new ones
            self._totals.count(m.CACHE_FAILURES, shard.failures, source=shard.name)
        self._meter.set(m.CACHE_LEFT_ALONE, sum(shard.breaker is not BreakerState.CLOSED for shard in figures.shards))
        for tier, held in {"l1": l1, "l2": figures.l2}.items():
            if held is not None:
                self._meter.set(m.CACHE_ENTRIES, held.entries, tier=tier)
                self._meter.set(m.CACHE_BYTES, held.used_bytes, tier=tier)

    def _input(self, request: RecommendRequest, answer: Recommendation) -> None:
        if request.behaviours is not None:  # those of a stored history were counted as they were stored
            items = {one.item_id for one in request.behaviours}
            items.update(request.blocked, request.allowed or ())
            self.named(items, answer.unknown_items)
        if not answer.degraded and POPULARITY in [report.stage for report in answer.stages]:
            self._meter.add(m.USERS_UNKNOWN)


class StageRecorder:
    """Records the metrics of one replica of a stage. `pads`: for its engines all requests of a batch are as long as the longest."""

    def __init__(self, stage: str, meter: Meter = SILENT, *, pads: bool = True) -> None:
        self._stage, self._meter, self._totals, self._pads = stage, meter, Totals(meter), pads
        library = nvml() if meter is not SILENT else None
        self._gpus = Gpus(library) if library else None

    def batch(self, rows: Sequence[int], waited_s: Sequence[float]) -> None:
        """Count a batch as it starts. `rows`: of each request; `waited_s`: how long each has waited."""
        self._meter.observe(m.BATCH_SIZE, len(rows), stage=self._stage)
        if self._pads and (padded := max(rows, default=0) * len(rows)):
            self._meter.observe(m.BATCH_PADDING, 1 - sum(rows) / padded, stage=self._stage)
        for wait in waited_s:
            self._meter.observe(m.BATCH_WAIT, wait, stage=self._stage)

    def count(self, version: str, snapshot: StageSnapshot) -> None:
        """Take over the counts of the backends of one version of the model."""
        for one in snapshot.backends:
            labels = {"stage": self._stage, "backend": one.name}
            for metric, total in (
                (m.BACKEND_REQUESTS, one.calls),
                (m.BACKEND_FAILURES, one.failures),
                (m.BACKEND_FALLBACKS, one.fallbacks),
            ):
                self._totals.count(metric, total, source=version, **labels)
            for figure in KEPT_COUNTERS.keys() & one.kept.keys():  # one that says nothing for a moment has not begun anew
                metric, more = KEPT_COUNTERS[figure]
                self._totals.count(metric, one.kept[figure], source=version, **labels, **more)

    def show(self, snapshot: StageSnapshot, queues: Mapping[str, Mapping[str, float]]) -> None:
        """Set the gauges to the present state of the version that serves."""
        for one in snapshot.backends:
            self._meter.set(m.BACKEND_LOADED, float(one.loaded), stage=self._stage, backend=one.name)
            asked = one.enabled and one.rank is not None  # one that is not asked has no trial either, and would stay half open
            self._meter.set(m.BREAKER, BREAKER_STATES[one.breaker] if asked else 0.0, stage=self._stage, backend=one.name)
            memory = sum(one.kept.get(figure, 0.0) for figure in ("used_bytes", "device_bytes"))  # on a GPU rows take both
            self._set(KEPT_GAUGES, {**one.kept, "used_bytes": memory} if "used_bytes" in one.kept else one.kept, one.name)
        for backend, figures in queues.items():
            self._set(QUEUES, figures, backend)
        if self._gpus:
            self._gpus.show(self._meter)

    def _set(self, named: Mapping[str, Metric], figures: Mapping[str, float], backend: str) -> None:
        for figure in named.keys() & figures.keys():
            self._meter.set(named[figure], figures[figure], stage=self._stage, backend=backend)


def reason_kind(skipped: SkippedBackend) -> str:
    """Why a backend was passed over, as one of three labels: the reasons themselves are of no limited number."""
    if skipped.failed:
        return "broken"
    return "late" if isinstance(skipped, OutOfTime) else "unavailable"


def _said(value: bool) -> str:
    return "true" if value else "false"
