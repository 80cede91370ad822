"""What a process and the switchboard tell each other: a Report every few seconds, and Orders as soon as something changes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cluster.cache.layout import Layout
from cluster.engines.snapshots import StageSnapshot
from cluster.fleet.board import FleetNews, Presence
from cluster.fleet.erasures import NO_PLACE, News, Place
from cluster.fleet.switchboard import Switches


@dataclass(frozen=True, slots=True)
class Report:
    """`presences` and `snapshots` are those of the process's members, by role and replica id, as ``encoder/abc``.

    `switches_version` and `switches` are the ones that the process follows; `place` is how far it has carried out erasures.
    """

    presences: Mapping[str, Presence] = field(default_factory=dict)
    snapshots: Mapping[str, StageSnapshot] = field(default_factory=dict)
    switches_version: int = 0
    switches: Switches = field(default_factory=dict)
    place: Place = NO_PLACE

    @property
    def urgent(self) -> tuple[Any, ...]:
        """The part that other processes act upon: a report is sent at once where this differs from the last report. Reasons are left out,
        since they count seconds down.
        """
        held = {name: (one.holds, one.uses, one.period) for name, one in self.presences.items()}
        engines = {
            name: (snapshot.settled, [(one.name, one.available, one.enabled, one.loaded, one.breaker) for one in snapshot.backends])
            for name, snapshot in self.snapshots.items()
        }
        return held, engines, self.switches_version, self.place


@dataclass(frozen=True, slots=True)
class Orders:
    """What a process has to follow: the switches, the backends that broke elsewhere by stage, the versions that others hold and use, what
    to erase, and how many shards the shared cache has (None: not known yet). `mark` tells the state of the switchboard from its earlier
    states; `handed_over` is another number where there may be more states to take over; `ended` names the trial that the guard ended last,
    also where its file does not say so yet.
    """

    mark: int = 0
    switches_version: int = 0
    switches: Switches = field(default_factory=dict)
    suspects: Mapping[str, frozenset[str]] = field(default_factory=dict)
    fleet: FleetNews = field(default_factory=FleetNews)
    erasures: News = field(default_factory=lambda: News(NO_PLACE))
    layout: Layout | None = None
    handed_over: int = 0
    ended: str = ""
