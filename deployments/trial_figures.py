"""The figures by which a trial of a version, or of flags, is judged: one gateway's, of one arm."""

from time import monotonic

from cluster.engines.skipped import OutOfTime
from cluster.fleet.trial_guard import TIMED_FOR_S, VersionFigures
from cluster.ranking import Ranking
from cluster.titled_items import item_ids
from cluster.traffic.latency import LatencyRecorder
from cluster.values import Recommendation


class VersionRecorder:
    """Records the figures of one arm, by which a trial is judged."""

    def __init__(self) -> None:
        self._requests = self._degraded = self._overlaps = 0
        self._overlap, self._latency = 0.0, LatencyRecorder(monotonic(), TIMED_FOR_S)

    def answered(self, answer: Recommendation | Ranking, duration_ms: float | None) -> None:
        self._requests += 1
        self._degraded += answer.degraded
        if duration_ms is not None:
            self.took(duration_ms)

    def took(self, duration_ms: float) -> None:
        """An answer took so long or, where its caller left before it was there, at least so long."""
        self._latency.record(duration_ms, monotonic())

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

    @property
    def median_ms(self) -> float | None:
        """What half of the answers took at most; None where none was timed."""
        return self._latency.summary(monotonic()).p50_ms

    def figures(self) -> VersionFigures:
        return VersionFigures(self._requests, self._degraded, self._latency.summary(monotonic()), self._overlaps, self._overlap)


def is_late(answer: Recommendation | Ranking) -> bool:
    """Whether an answer is degraded for want of time alone: nothing that it was to be made of has failed."""
    skipped = [one for stage in answer.stages for one in stage.fallback_from]
    return answer.degraded and any(isinstance(one, OutOfTime) for one in skipped) and not any(one.failed for one in skipped)
