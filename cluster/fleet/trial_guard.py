"""When a trial has to end: the figures of the version on trial beside those of the stable one."""

import math
from dataclasses import dataclass

from pydantic import Field

from cluster.bundle import Record
from cluster.traffic.latency import LatencySummary, merge

FEWEST = 20
"""Of fewer requests no share means anything."""
Z_95 = 1.645
NOTHING = LatencySummary()
MANY_FIRSTS = 10
"""Where each version has given so many times `fewest_requests` first answers, and few others, users do not come back."""
TIMED_FOR_S = 3600.0
"""A trial's latencies are those of the last one to two such windows: long enough for many answers on a small share of few users."""


class Guard(Record):
    """What ends a trial. Shares are compared with those of the stable version over the same time."""

    degraded_margin: float = Field(0.02, ge=0, le=1, description="by how much the share of degraded answers may be higher")
    latency_ratio: float = Field(1.5, ge=1, description="how many times as long the p95 of computed answers may be")
    latency_slack_ms: float = Field(10.0, ge=0, description="and so many milliseconds more")
    fewest_requests: int = Field(200, ge=FEWEST, description="requests of each version, timed of late, before latencies are compared")
    least_overlap: float = Field(0.0, ge=0, le=1, description="shadow: mean share of items that both versions must have in common")


@dataclass(frozen=True, slots=True)
class VersionFigures:
    """The figures of an arm: over all its answers where flags are tried, else over those that were computed. `overlaps`: how many answers
    of a shadow were compared with the stable version's; `overlap`: the sum of their shares of items in common. `firsts`: how long the
    first answer took that each user was given by the arm in a gateway; `latency`: the other answers.
    """

    requests: int = 0
    degraded: int = 0
    latency: LatencySummary = NOTHING
    overlaps: int = 0
    overlap: float = 0.0
    firsts: LatencySummary = NOTHING

    def __add__(self, other: "VersionFigures") -> "VersionFigures":
        return VersionFigures(
            self.requests + other.requests,
            self.degraded + other.degraded,
            merge((self.latency, other.latency)),
            self.overlaps + other.overlaps,
            self.overlap + other.overlap,
            merge((self.firsts, other.firsts)),
        )

    @property
    def timed(self) -> LatencySummary:
        """How long all answers took."""
        return merge((self.latency, self.firsts))


def judge(guard: Guard, stable: VersionFigures, tried: VersionFigures, *, alone: bool = False) -> str:
    """Why the trial has to end, "" where it may go on. `alone`: all users take part, so that there is nothing to compare it with."""
    usual = stable.degraded / stable.requests if stable.requests else 0.0
    enough = tried.requests >= FEWEST and (alone or stable.requests >= FEWEST)
    if enough and (least := least_share(tried.degraded, tried.requests)) > usual + guard.degraded_margin:
        return f"{tried.degraded} of {tried.requests} answers are degraded (at least {least:.1%}), of the stable version {usual:.1%}"
    return _too_slow(guard, stable, tried) or _too_different(guard, tried)


def least_share(count: int, of: int) -> float:
    """The lower end of Wilson's interval for the share `count` / `of`: the true share is lower in one case of twenty."""
    share, z2 = count / of, Z_95**2
    spread = Z_95 * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return max(0.0, (share + z2 / (2 * of) - spread) / (1 + z2 / of))


def _too_slow(guard: Guard, stable: VersionFigures, tried: VersionFigures) -> str:
    """Of a user's first answer a version on trial has kept no state yet, as the stable one has: these are compared only where users ask
    once, so that neither version has given others.
    """
    again = [_timed(one.latency) >= guard.fewest_requests for one in (stable, tried)]
    if all(again):
        ours, usual = tried.latency.p95_ms, stable.latency.p95_ms
    elif not any(again) and min(_timed(stable.firsts), _timed(tried.firsts)) >= MANY_FIRSTS * guard.fewest_requests:
        ours, usual = tried.firsts.p95_ms, stable.firsts.p95_ms
    else:
        return ""
    assert ours is not None
    assert usual is not None
    limit = guard.latency_ratio * usual + guard.latency_slack_ms
    return f"p95 is {ours:.1f} ms, more than {limit:.1f} ms; the stable version's is {usual:.1f} ms" if ours > limit else ""


def _timed(latency: LatencySummary) -> int:
    """How many of the latest calls were timed, of which a percentile is; streams are not."""
    return sum(latency.buckets)


def _too_different(guard: Guard, tried: VersionFigures) -> str:
    if tried.overlaps < FEWEST or (mean := tried.overlap / tried.overlaps) >= guard.least_overlap:
        return ""
    return f"of {tried.overlaps} answers, {mean:.1%} of the items are the stable version's too; {guard.least_overlap:.1%} should be"
