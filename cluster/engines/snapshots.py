"""A stage and its backends as a replica sees them: what is reported, shown and counted."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from cluster.traffic.breaker import BreakerState
from cluster.traffic.latency import LatencySummary


@dataclass(frozen=True, slots=True)
class BackendSnapshot:
    """One backend as its replica sees it.

    `calls` counts requests, `failures` those it broke on, `fallbacks` those it answered after a preferred backend was passed over.
    `rank` is its place in the order (0 is asked first), None where the order leaves it out. `reason` says why it would not be asked now,
    and whether its predecessor is asked in its place.
    `kept` is what it says it keeps of users, empty where it says nothing. `probing`: its probe takes long and goes on.
    """

    name: str
    import_string: str
    available: bool
    reason: str
    enabled: bool
    rank: int | None
    loaded: bool
    breaker: BreakerState
    last_error: str
    calls: int
    failures: int
    fallbacks: int
    latency: LatencySummary
    kept: Mapping[str, float] = field(default_factory=dict)
    probing: bool = False

    def answered_by(self, predecessor: Self) -> Self:
        """As this backend is told while its predecessor, of the same name, answers in its place: it can be asked, and the figures are
        those of the engine that answers; breaker, last error and reason tell how far its own load has come.
        """
        return replace(
            self,
            available=True,
            reason=f"{self.reason}; its predecessor with the old settings answers",
            loaded=True,
            calls=predecessor.calls,
            failures=predecessor.failures,
            fallbacks=predecessor.fallbacks,
            latency=predecessor.latency,
            kept=predecessor.kept,
        )


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """A stage as the operator sees it; the backends stand in the order they are asked, those left out of it at the end."""

    stage: str
    explanation: str
    backends: tuple[BackendSnapshot, ...]

    @property
    def settled(self) -> bool:
        """Whether the first choice that can run here is loaded or has failed: what serves now will serve until something changes. While
        none is loaded, a probe that goes on may change it.
        """
        asked = [one for one in self.backends if one.rank is not None and one.enabled]
        able = [one for one in asked if one.available]
        if any(one.probing for one in asked) and not any(one.loaded for one in able):
            return False
        return not able or able[0].loaded or able[0].breaker is not BreakerState.CLOSED
