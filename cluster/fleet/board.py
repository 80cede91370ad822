"""Which process holds which version of the model: a version serves only once every replica of every stage has it.

    replica, gateway -> report(what it holds, which versions it gives answers of)
    news() -> what is ready everywhere, what is in use anywhere

Nothing is kept on disk: after a restart the next reports tell everything again. Times are passed in, in seconds.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from cluster.cache.layout import ShardsSeen
from cluster.fleet.rollout import Arm, Rollout
from cluster.fleet.trial_guard import NOTHING, TIMED_FOR_S, VersionFigures, judge
from cluster.stages import StageName

Role: TypeAlias = StageName | Literal["gateway"]
READY, LOADING = "", "it is being loaded"


@dataclass(frozen=True, slots=True)
class Presence:
    """What a process reports of itself. `holds`: version -> READY, LOADING, or why it cannot serve it; `uses`: the versions by which a
    gateway answers; `figures`: of the arms in that `period` of a trial; `shards`: of the shared cache, where their number may change.
    """

    role: Role
    holds: Mapping[int, str]
    uses: frozenset[int] = frozenset()
    period: str = ""
    figures: Mapping[Arm, VersionFigures] = field(default_factory=dict)
    shards: ShardsSeen | None = None


@dataclass(frozen=True, slots=True)
class FleetNews:
    """`ready`: versions that every live replica of every stage can serve; `common`: stage -> those that each of its replicas can;
    `anywhere`: stage -> those that some replica of it can; `used`: versions by which some gateway answers; `gateways`: how many
    hold a version, and so are given requests; one at least.

    `settled`: the board has existed for long enough to have heard from every process. `replicas`: stage -> the ids of the replicas that
    live and hold a version: no request goes to a replica that still loads its first.
    """

    ready: frozenset[int] = frozenset()
    used: frozenset[int] = frozenset()
    gateways: int = 1
    settled: bool = False
    replicas: Mapping[Role, tuple[str, ...]] = field(default_factory=dict)
    common: Mapping[Role, frozenset[int]] = field(default_factory=dict)
    anywhere: Mapping[Role, frozenset[int]] = field(default_factory=dict)

    @property
    def held(self) -> frozenset[int]:
        """Versions that some replica of every stage can serve."""
        return _of_all(self.anywhere)

    @property
    def generators(self) -> int | None:
        """How many generators can be asked; None while that is not known."""
        return len(self.replicas.get("generator", ())) if self.settled else None


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """`holders`: version -> role -> processes that can serve it, of `processes` by role; `obstacles`: version -> why some cannot."""

    processes: Mapping[str, int]
    holders: Mapping[int, Mapping[str, int]]
    obstacles: Mapping[int, tuple[str, ...]]
    used: Mapping[int, int]
    figures: Mapping[Arm, VersionFigures]


class FleetBoard:
    """Plain Python, for one thread at a time. A process that is silent for `ttl_s` counts as gone. Its figures stay, but for their
    latencies, which are left out once its last report is TIMED_FOR_S old.
    """

    def __init__(self, ttl_s: float = 5.0, *, now: float = 0.0) -> None:
        self._ttl_s, self._made_at = ttl_s, now
        self._present: dict[str, tuple[float, Presence]] = {}
        self._figures: dict[str, tuple[float, Mapping[Arm, VersionFigures]]] = {}
        self._period = ""

    def report(self, name: str, presence: Presence, *, now: float) -> None:
        """Take a process's report."""
        self._present[name] = now, presence
        if presence.period:
            if presence.period != self._period:
                self._period, self._figures = presence.period, {}
            self._figures[name] = now, presence.figures
            for other, (told_at, figures) in self._figures.items():
                if now - told_at >= TIMED_FOR_S:
                    self._figures[other] = told_at, {arm: replace(one, latency=NOTHING) for arm, one in figures.items()}

    def news(self, *, now: float) -> FleetNews:
        """What every process should know of the others. A stage without replicas, as a generator that was scaled to zero, holds up no
        version, nor does a replica that holds nothing yet: no request goes to it. Nor does such a gateway count as one.
        """
        live = self._live(now)
        used = frozenset(version for one in live.values() for version in one.uses)
        settled = now - self._made_at > self._ttl_s
        serving = _serving(live)
        gateways = sum(one.role == "gateway" for one in serving.values())
        stages = dict.fromkeys(one.role for one in serving.values() if one.role != "gateway")
        replicas: dict[Role, tuple[str, ...]] = {role: _ids_of(role, serving) for role in stages}
        able = {role: [_ready_of(one) for one in serving.values() if one.role == role] for role in stages}
        common: dict[Role, frozenset[int]] = {role: frozenset.intersection(*each) for role, each in able.items()}
        anywhere: dict[Role, frozenset[int]] = {role: frozenset(v for one in each for v in one) for role, each in able.items()}
        return FleetNews(_of_all(common), used, max(1, gateways), settled, replicas, common, anywhere)

    def leave(self, name: str) -> None:
        """A process has said that it stops."""
        self._present.pop(name, None)

    def serving(self, role: Role, *, now: float) -> tuple[str, ...]:
        """The ids of the role's live processes that hold a version: those that are given requests."""
        return _ids_of(role, _serving(self._live(now)))

    def judge(self, rollout: Rollout) -> str:
        """Why the trial has to end by what the gateways have measured, "" where it may go on. It is compared with all answers outside of
        it: where replicas lack the stable version, an earlier one gives them.
        """
        trial, figures = rollout.trial, self.figures(rollout)
        if trial is None or not figures:
            return ""
        others = sum((one for arm, one in figures.items() if not arm.tried), VersionFigures())
        return judge(trial.guard, others, figures.get(trial.arm, VersionFigures()), alone=trial.kind != "shadow" and trial.share >= 1)

    def figures(self, rollout: Rollout) -> dict[Arm, VersionFigures]:
        """The figures of each arm, over all gateways that have taken part in the trial beside this stable version."""
        total: dict[Arm, VersionFigures] = {}
        for _, measured in self._figures.values() if rollout.period == self._period else ():
            for arm, figures in measured.items():
                total[arm] = total.get(arm, VersionFigures()) + figures
        return total

    def status(self, rollout: Rollout, *, now: float) -> FleetStatus:
        live = self._live(now).values()
        versions = sorted({version for one in live for version in one.holds})
        roles = sorted({one.role for one in live})
        return FleetStatus(
            processes=Counter(one.role for one in live),
            holders={v: {role: sum(one.role == role and one.holds.get(v) == READY for one in live) for role in roles} for v in versions},
            obstacles={v: tuple(dict.fromkeys(why for one in live if (why := one.holds.get(v)))) for v in versions},
            used={v: sum(v in one.uses for one in live) for v in versions},
            figures=self.figures(rollout),
        )

    def _live(self, now: float) -> dict[str, Presence]:
        self._present = {name: told for name, told in self._present.items() if now - told[0] <= self._ttl_s}
        return {name: presence for name, (_, presence) in self._present.items()}


def _serving(live: Mapping[str, Presence]) -> dict[str, Presence]:
    """The processes that hold a version, and so are given requests."""
    return {name: one for name, one in live.items() if READY in one.holds.values()}


def _ready_of(one: Presence) -> frozenset[int]:
    """The versions that a process can serve."""
    return frozenset(version for version, obstacle in one.holds.items() if obstacle == READY)


def _of_all(stages: Mapping[Role, frozenset[int]]) -> frozenset[int]:
    """The versions that are among those of every stage; empty while there is no encoder."""
    return frozenset.intersection(*stages.values()) if "encoder" in stages else frozenset()


def _ids_of(role: Role, live: Mapping[str, Presence]) -> tuple[str, ...]:
    """The replica ids of a role's processes, which are named by role and id: `encoder/abc`."""
    return tuple(name.partition("/")[2] for name, one in live.items() if one.role == role)
