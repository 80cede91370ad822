"""The figures by which a trial of a version, or of flags, is judged: one gateway's, by arm.

    request, to the version of an arm -> an answer: counts, degraded or not
                                      -> one from the cache: counts where flags are on trial
                                      -> one too late for its own deadline: counts where that left the stable version's usual time
                                      -> an error, or the gateway's time is over: counts as a degraded answer
                                      -> its caller leaves: how long it waited, where that is the stable version's usual time

Errors of the caller do not count. Neither do the durations of rankings and streams, which depend on more than the version. Nor does that
of a user's first answer by a version, of which it has kept no state yet, as the stable one has; unless users ask once only.
"""

from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic, perf_counter

from cluster.cache.entry import Key
from cluster.cache.recent import Recent
from cluster.engines.skipped import OutOfTime
from cluster.errors import InvalidRequest
from cluster.fleet.rollout import Arm, Rollout, Trial
from cluster.fleet.trial_guard import NOTHING, TIMED_FOR_S, VersionFigures
from cluster.ranking import Ranking, RankingRequest
from cluster.titled_items import item_ids
from cluster.traffic.latency import LatencyRecorder, LatencySummary, merge
from cluster.values import Recommendation, RecommendRequest
from deployments.http.connection import current
from deployments.served_model import ServedModel

UNTIMED_MS = 100.0
"""Where the stable version was not timed, a late answer counts if its request's own deadline left as long."""


class TrialFigures:
    """The figures of both arms of the present trial. `trial_for`: the trial that a user of a tenant is served under."""

    def __init__(self, trial_for: Callable[[str, str], Trial | None]) -> None:
        self._trial_for, self._rollout = trial_for, Rollout(stable=1)
        self._recorders: dict[Arm, VersionRecorder] = {}

    def update(self, rollout: Rollout) -> None:
        """The figures of another trial, or beside another stable version, begin anew."""
        if rollout.period != self._rollout.period:
            self._recorders = {}
        self._rollout = rollout

    def forget(self, tenant: str | None = None, user_id: str | None = None) -> None:
        """Forget that a user, a tenant's users, or all were answered."""
        for recorder in self._recorders.values():
            recorder.users.forget(tenant, user_id)

    def by_arm(self) -> dict[Arm, VersionFigures]:
        return {arm: recorder.figures() for arm, recorder in self._recorders.items()}

    def recorder(self, model: ServedModel, request: RecommendRequest | RankingRequest) -> "VersionRecorder":
        """The recorder of the arm for which this version's answer to the request counts; one that is never read where nothing is tried."""
        if (trial := self._rollout.trial) is None:
            return VersionRecorder()
        version = model.bundle.manifest.version
        among_them = version != self._rollout.stable or self._trial_for(request.tenant, request.user_id) is not None
        return self._recorders.setdefault(Arm(version, tried=version == trial.version and among_them), VersionRecorder())

    @contextmanager
    def measured(
        self, model: ServedModel, request: RecommendRequest | RankingRequest, *, timed: bool = False
    ) -> Iterator[Callable[[Recommendation | Ranking], None]]:
        """A block in which this version answers the request; it gives a function that takes note of the answer. Errors of the version
        count, and so does the end of the request's time; errors of the caller, and its leaving, do not. `timed`: the answer's duration
        counts, too; of one that its caller did not await, how long that waited, unless the stable version usually takes longer.
        """
        began, left_ms = perf_counter(), _left_ms(request)

        def note(answer: Recommendation | Ranking) -> None:
            if self._counts(answer, left_ms):
                took_ms = (perf_counter() - began) * 1e3
                self.recorder(model, request).answered(answer, request, took_ms if timed else None)

        try:
            yield note
        except InvalidRequest:
            raise
        except Exception:
            self.recorder(model, request).failed()
            raise
        except CancelledError:
            connection, waited_ms = current(), (perf_counter() - began) * 1e3
            if connection is not None and connection.late:
                self.recorder(model, request).failed()
            left = connection is None or connection.gone  # else another entry of its batch has failed
            if timed and left and waited_ms >= self._usual_ms():
                self.recorder(model, request).took(request, waited_ms)
            raise

    def _counts(self, answer: Recommendation | Ranking, left_ms: float) -> bool:
        """Whether an answer counts, to whose request its own deadline left so much. A late one does where that is the time which the stable
        version usually takes: else a caller with short deadlines ends any trial, or hides that a version is bad. A cached one says nothing
        of a version, but may be what flags on trial change. A shadow ranks nothing that rankings could be compared with.
        """
        trial = self._rollout.trial
        if trial is None or (is_late(answer) and left_ms < self._usual_ms()):
            return False
        if isinstance(answer, Ranking):
            return trial.kind != "shadow"
        return bool(trial.flags) or answer.cache is None or answer.cache.tier == "computed"

    def _usual_ms(self) -> float:
        """The median time of the answers outside of the trial here, which no few slow requests lift; UNTIMED_MS where none was timed."""
        median_ms = merge(recorder.figures().timed for arm, recorder in self._recorders.items() if not arm.tried).p50_ms
        return UNTIMED_MS if median_ms is None else median_ms


class VersionRecorder:
    """Records the figures of one arm, by which a trial is judged. `users`: those that were answered, or left, since it began."""

    def __init__(self) -> None:
        self.users = Recent[bool]()
        self._requests = self._degraded = self._overlaps = 0
        self._overlap, self._firsts, self._others = 0.0, _Durations(), _Durations()

    def answered(
        self, answer: Recommendation | Ranking, request: RecommendRequest | RankingRequest, duration_ms: float | None = None
    ) -> None:
        self._requests += 1
        self._degraded += answer.degraded
        if duration_ms is not None:
            self.took(request, duration_ms)

    def took(self, request: RecommendRequest | RankingRequest, duration_ms: float) -> None:
        """An answer took so long or, where its caller left before it was there, at least so long."""
        key = Key(request.tenant, request.user_id, "")
        (self._others if self.users.get(key) else self._firsts).add(duration_ms)
        self.users.put(key, True)

    def failed(self) -> None:
        """A request ended in an error, which is no better than a degraded answer."""
        self._requests += 1
        self._degraded += 1

    def compared(self, answer: Recommendation, with_: Recommendation) -> None:
        """Compare a shadow's answer with the one that was given. Degraded answers are left out: they do not show the models' likeness."""
        if answer.degraded or with_.degraded:
            return
        ours, theirs = set(item_ids(answer.items)), set(item_ids(with_.items))
        self._overlaps += 1
        self._overlap += len(ours & theirs) / len(theirs) if theirs else float(not ours)

    def figures(self) -> VersionFigures:
        counts = self._requests, self._degraded
        return VersionFigures(*counts, self._others.summary(), self._overlaps, self._overlap, self._firsts.summary())


class _Durations:
    """How long answers of one kind took; none once the last is TIMED_FOR_S old: those of the other arm are of another time."""

    def __init__(self) -> None:
        self._last_at = monotonic()
        self._recorder = LatencyRecorder(self._last_at, TIMED_FOR_S)

    def add(self, duration_ms: float) -> None:
        self._last_at = monotonic()
        self._recorder.record(duration_ms, self._last_at)

    def summary(self) -> LatencySummary:
        now = monotonic()
        return self._recorder.summary(now) if now - self._last_at < TIMED_FOR_S else NOTHING


def is_late(answer: Recommendation | Ranking) -> bool:
    """Whether an answer is degraded for want of time alone: nothing that it was to be made of has failed."""
    skipped = [one for stage in answer.stages for one in stage.fallback_from]
    return answer.degraded and any(isinstance(one, OutOfTime) for one in skipped) and not any(one.failed for one in skipped)


def _left_ms(request: RecommendRequest | RankingRequest) -> float:
    """The time that the request's own deadline leaves; infinite where it has none."""
    if request.deadline is not None:
        return (request.deadline - monotonic()) * 1e3
    return inf if request.deadline_ms is None else request.deadline_ms
