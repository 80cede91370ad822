"""The cluster-wide switches of backends, and what all replicas have measured, in one place.

    replica -> report(statistics, the switches it follows) ; switches() -> those that every replica should follow
    operator -> set(stage, name, position) -> version; applied(version) once every live replica follows it

It keeps nothing on disk: after a restart it adopts the switches of the replicas, which know them. Times are passed in, in seconds since
1970, and never go back: versions count milliseconds since then, so that a switch set just after a restart is newer than what the replicas
remember.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias

from cluster.engines.snapshots import BackendSnapshot, StageSnapshot
from cluster.errors import BackendUnavailable, UnknownChoice
from cluster.traffic.breaker import BreakerState
from cluster.traffic.latency import LatencySummary, merge

Position: TypeAlias = Literal["on", "off", "first"]
"""`first`: on, and asked before all others of its stage."""
Switches: TypeAlias = Mapping[tuple[str, str], Position]
"""(stage, backend) -> position; what is not named is as the configuration has it."""


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """One backend over all live replicas: `available_on` of `replicas` could run it, `reasons` says why some would not ask it now.

    `kept` is what the backend says it keeps of users, added up.
    """

    name: str
    import_string: str
    enabled: bool
    rank: int | None
    replicas: int
    available_on: int
    reasons: tuple[str, ...]
    breakers: Mapping[str, int]
    last_errors: tuple[str, ...]
    calls: int
    failures: int
    fallbacks: int
    latency: LatencySummary
    kept: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """How it serves; what it keeps of users is shown with the caches."""
        shown = {key: value for key, value in asdict(self).items() if key not in ("latency", "kept")}
        return {**shown, **self.latency.as_json()}


@dataclass(frozen=True, slots=True)
class StageStatus:
    """A stage over all live replicas; `explanations` are the different choices they make (one, unless they differ).

    `settled`: in one of them at least, the first choice that can run there is loaded or has failed.
    """

    stage: str
    replicas: int
    explanations: tuple[str, ...]
    backends: tuple[BackendStatus, ...]
    settled: bool = True


@dataclass(frozen=True, slots=True)
class _Report:
    seen_at: float
    version: int
    snapshot: StageSnapshot


class Switchboard:
    """Plain Python, for one thread at a time. A replica that was silent for `ttl_s` counts as gone."""

    def __init__(self, ttl_s: float = 5.0) -> None:
        self._ttl_s = ttl_s
        self._version = 0
        self._switches: dict[tuple[str, str], Position] = {}
        self._reports: dict[tuple[str, str], _Report] = {}
        self._once_settled: set[str] = set()

    def report(self, stage: str, replica_id: str, snapshot: StageSnapshot, version: int, switches: Switches, *, now: float) -> None:
        """Take a replica's statistics and the switches it follows."""
        self._learn(version, switches)
        self._reports[stage, replica_id] = _Report(now, version, snapshot)
        if snapshot.settled:
            self._once_settled.add(stage)

    @property
    def once_settled(self) -> frozenset[str]:
        """The stages that were settled at any time since the start, those among them that have no replica now."""
        return frozenset(self._once_settled)

    def switches(self) -> tuple[int, dict[tuple[str, str], Position]]:
        """The version and switches that every replica should follow."""
        return self._version, dict(self._switches)

    def suspects(self, stage: str, *, now: float) -> frozenset[str]:
        """The backends that are broken on more than half of the stage's live replicas that have asked them: a replica that has not asked
        them itself should not ask them first.
        """
        votes = [one for snapshot in self._stages(now).get(stage, []) for one in snapshot.backends if _has_asked(one)]
        asked, open_on = Counter(one.name for one in votes), Counter(one.name for one in votes if one.breaker is not BreakerState.CLOSED)
        return frozenset(name for name, count in open_on.items() if 2 * count > asked[name])

    def set(self, stage: str, name: str, position: Position, *, now: float) -> int:
        """Switch a backend on or off everywhere, or have it asked before all others; returns the version to pass to `applied`.

        Raises UnknownChoice for what no live replica has, BackendUnavailable before any has reported.
        """
        self._check_known(stage, name, now)
        self._version = max(self._version + 1, int(now * 1000))
        self._switches = _joined(self._switches, {(stage, name): position})
        return self._version

    def applied(self, version: int, *, now: float) -> bool:
        """Whether every live replica has reported that it follows this version or a later one; not while none has reported."""
        live = self._live(now).values()
        return bool(live) and all(report.version >= version for report in live)

    def status(self, *, now: float) -> tuple[StageStatus, ...]:
        """Every stage that a live replica has reported, its replicas' figures added up."""
        return tuple(_merged_stage(stage, snapshots) for stage, snapshots in self._stages(now).items())

    def _learn(self, version: int, switches: Switches) -> None:
        """Adopt newer switches whole; from older ones, those that this switchboard, having been restarted, knows nothing of."""
        if version > self._version:
            self._version, self._switches = version, dict(switches)
        elif not switches.keys() <= self._switches.keys():
            self._version, self._switches = self._version + 1, _joined(switches, self._switches)

    def _check_known(self, stage: str, name: str, now: float) -> None:
        stages = self._stages(now)
        if not stages:
            raise BackendUnavailable("no replica has reported since the switchboard started; try again in a few seconds")
        if stage not in stages:
            raise UnknownChoice("stage", stage, stages)
        names = {backend.name for snapshot in stages[stage] for backend in snapshot.backends}
        if name not in names:
            raise UnknownChoice(stage, name, names)

    def _stages(self, now: float) -> dict[str, list[StageSnapshot]]:
        stages: dict[str, list[StageSnapshot]] = {}
        for (stage, _), report in sorted(self._live(now).items(), key=lambda item: item[0]):
            stages.setdefault(stage, []).append(report.snapshot)
        return stages

    def _live(self, now: float) -> dict[tuple[str, str], _Report]:
        self._reports = {key: report for key, report in self._reports.items() if now - report.seen_at <= self._ttl_s}
        return self._reports


def _joined(older: Switches, newer: Switches) -> dict[tuple[str, str], Position]:
    """The older positions with the newer ones in their place; of each stage one backend is `first`."""
    taken = {stage for (stage, _), position in newer.items() if position == "first"}
    kept: Switches = {key: "on" if position == "first" and key[0] in taken else position for key, position in older.items()}
    return {**kept, **newer}


def _has_asked(backend: BackendSnapshot) -> bool:
    """Whether the replica has asked the backend, so that its report of it says something."""
    return backend.enabled and (backend.breaker is not BreakerState.CLOSED or backend.calls > backend.failures)


def _merged_stage(stage: str, snapshots: list[StageSnapshot]) -> StageStatus:
    names = dict.fromkeys(backend.name for snapshot in snapshots for backend in snapshot.backends)
    of_name = {name: [backend for snapshot in snapshots for backend in snapshot.backends if backend.name == name] for name in names}
    explanations = _distinct(snapshot.explanation for snapshot in snapshots)
    backends, settled = tuple(_merged_backend(same) for same in of_name.values()), any(snapshot.settled for snapshot in snapshots)
    return StageStatus(stage, len(snapshots), explanations, backends, settled)


def _merged_backend(same: list[BackendSnapshot]) -> BackendStatus:
    first = same[0]
    return BackendStatus(
        name=first.name,
        import_string=first.import_string,
        enabled=all(one.enabled for one in same),
        rank=first.rank,
        replicas=len(same),
        available_on=sum(one.available for one in same),
        reasons=_distinct(one.reason for one in same),
        breakers=dict(Counter(str(one.breaker) for one in same)),
        last_errors=_distinct(one.last_error for one in same),
        calls=sum(one.calls for one in same),
        failures=sum(one.failures for one in same),
        fallbacks=sum(one.fallbacks for one in same),
        latency=merge(one.latency for one in same),
        kept=_summed(one.kept for one in same),
    )


def _summed(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in figures:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total


def _distinct(texts: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for text in texts if text))
