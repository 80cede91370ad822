"""One log for each replica: Serve's, as text or JSON (`logging_config`); lines about a request have its id and route.

The id is the caller's `X-Request-ID`, or made by Serve; the response has it in a header of that name, and every replica that works on the
request logs it too.
"""

import logging
from collections.abc import Callable
from time import monotonic

from cluster.few_lines import FewLines
from cluster.ranking import Ranking
from cluster.values import Recommendation, StageReport
from deployments.telemetry.metrics import in_a_replica

PACKAGES = ("cluster", "deployments", "integrations", "pipelines")
KEPT = ("l1", "l2")
"""Tiers of kept answers: the time of their stages is no part of this one's. A joined one did wait for its stages, and has their times."""
logger = logging.getLogger("ray.serve")


def join_serves_log() -> None:
    """Have our own modules log into the replica's log. They share its list of handlers, so that later changes hold for both. Outside of a
    replica this does nothing.
    """
    if not in_a_replica():
        return
    for name in PACKAGES:
        ours = logging.getLogger(name)
        ours.handlers, ours.propagate = logger.handlers, False
        ours.setLevel(logger.level)


class SlowAnswers:
    """Logs a line for each answer that took long: each stage's backend and time or, where it had been kept, its tier and no times.
    Beyond MOST_PER_S lines a second, answers are only counted.
    """

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._lines = FewLines(clock)

    def note(self, answer: Recommendation | Ranking, duration_s: float, slow_ms: float | None) -> None:
        if slow_ms is None or duration_s * 1e3 < slow_ms or (more := self._lines.more()) is None:
            return
        tier = answer.cache.tier if isinstance(answer, Recommendation) and answer.cache else "none"
        stages = [_told(report, timed=tier not in KEPT) for report in answer.stages]
        fields = {
            "duration_ms": round(duration_s * 1e3, 1),
            "tier": tier,
            "stages": stages,
            "degraded": answer.degraded,
            "model_version": answer.model_version,
        }
        source = f" ({tier})" if tier in (*KEPT, "joined") else ""
        logger.warning("an answer%s took %.0f ms%s: %s", source, duration_s * 1e3, more, ", ".join(stages), extra=fields)


def _told(report: StageReport, *, timed: bool) -> str:
    passed = "".join(f", not {one.backend}" for one in report.fallback_from)
    took = f" in {report.duration_ms:.1f} ms" if timed else ""
    return f"{report.stage} by {report.backend}{took}{passed}"
