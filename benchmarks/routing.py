"""Where users' requests go: how many reach their homes, find kept states, and wait, when the cluster is as it should be and when not.

    python -m benchmarks.routing                              # simulated
    OMP_NUM_THREADS=1 python -m benchmarks.routing --live     # on a real cluster, with the demo's model (run `make demo ONCE=1` before)

Simulated (benchmarks/simulated_routing.py): two tenants with the same user ids, eight gateways, eight encoder replicas, and smaller
clusters, each case from several seeds, of which the worst counts. Live (benchmarks/routing_live.py): four gateways, four encoders, on
this machine.
Writes benchmarks/results/routing_cpu_DATE.md or routing_live_cpu_DATE.md.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.reporting import Machine, dated, table
from benchmarks.simulated_routing import TENANTS, Outcome, Simulation, World, simulate
from cluster.traffic.user_router import in_order_of

SLOWER = 10.0
AT_HOME, MOVED, SLOWED, BUSIEST = 0.95, 1.2, 2.0, 1.5
"""At least so many requests reach their homes; at most so many times 1/(n+1) of the users move; the p99 with a slow replica over that
without; the busiest replica's requests over the mean."""
HOTTEST, ADDED = 0.05, 2
SMALL = ((1, 2), (2, 2), (8, 2), (2, 4), (1, 8))
"""Gateways and replicas of smaller clusters, with as many requests a replica."""


class Slowed:
    """The cases of one seed in which a replica becomes slow, or does not. The second third of the time begins with what happens."""

    def __init__(self, world: World) -> None:
        self.world, self.since_s = world, world.seconds / 3
        self.homes = [f"encoder-{number}" for number in range(world.replicas)]
        self.calm = self._run()
        self.slow = self._run(_slow_down)
        self.waited_for = self._run(_slow_down, options={"slow_times": 0})
        self.gone = self._run(Simulation.remove)

    def at_home(self) -> float:
        return self.calm.home_share(self.homes)

    def _run(self, happens: Callable[[Simulation], None] | None = None, **changes: object) -> Outcome:
        return simulate(replace(self.world, **changes), {self.since_s: happens} if happens else None)  # type: ignore[arg-type]

    def over_calm(self, outcome: Outcome) -> float:
        return outcome.p99_ms(self.since_s) / self.calm.p99_ms(self.since_s)


class Cases(Slowed):
    """All cases of one seed."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.hot = self._run(hottest=HOTTEST)
        self.added = self._run(lambda cluster: cluster.add(ADDED))
        self.random = self._run(home=False)


def _slow_down(cluster: Simulation) -> None:
    cluster.replicas[0].slower = SLOWER


def moved(users: int, replicas: int) -> float:
    """The share of users that have another home once there is one replica more."""
    names = [f"encoder-{number}" for number in range(replicas + 1)]
    everybody = [f"{tenant}/{number}" for tenant in TENANTS for number in range(users)]
    return float(np.mean([in_order_of(user, names)[0] != in_order_of(user, names[:-1])[0] for user in everybody]))


def simulated(world: World, seeds: int) -> list[str]:
    """A table of the cases, as Markdown."""
    cases = [Cases(replace(world, seed=seed)) for seed in range(seeds)]
    since_s, first = world.seconds / 3, cases[0]
    one_more = moved(world.users, world.replicas) * (world.replicas + 1)
    at_home = min(one.at_home() for one in cases)
    rows = [
        ["requests that reach their users' homes", _percent(at_home), f"at least {_percent(AT_HOME)}", _met(at_home >= AT_HOME)],
        [
            f"users that move when a replica is added to {world.replicas}, over 1/{world.replicas + 1} of all",
            f"{one_more:.2f}",
            f"at most {MOVED:g}",
            _met(one_more <= MOVED),
        ],
        _at_most(f"p99 when one replica is {SLOWER:g} times slower, over calm", [one.over_calm(one.slow) for one in cases], SLOWED),
        _told("the same with `slow_times: 0`: no slow replica is left out", [one.over_calm(one.waited_for) for one in cases]),
        _told("the same when that replica is gone instead", [one.over_calm(one.gone) for one in cases]),
        _at_most(f"the busiest replica over the mean, one user {_percent(HOTTEST)} of all", [one.hot.busiest() for one in cases], BUSIEST),
        _told(f"p99 when {ADDED} replicas are added, over calm", [one.over_calm(one.added) for one in cases]),
    ]
    named = {
        "calm": first.calm,
        "one replica slow": first.slow,
        "one replica slow, not left out": first.waited_for,
        "one user hot": first.hot,
        f"{ADDED} replicas added": first.added,
        "calm, no homes (Serve's power of two choices)": first.random,
    }
    small = {(gateways, replicas): _smaller(world, gateways, replicas, seeds) for gateways, replicas in SMALL}
    every = [*cases, *(case for several in small.values() for case in several)]
    failed = sum(one.failed for case in every for one in vars(case).values() if isinstance(one, Outcome))
    return [
        "# Where users' requests go, simulated",
        "",
        f"{len(TENANTS)} tenants of {world.users:,} users with the same ids, {world.gateways} gateways, {world.replicas} encoder replicas,",
        f"{world.rate:g} requests/s for {world.seconds:g} s; what happens does so after {since_s:g} s. The code that routes is the real",
        "one; the engines, the network and the clock are not. A replica has room for the states of four fifths of its users.",
        f"Requests that failed: {failed}.",
        "",
        *table([f"simulated, the worst of {seeds} seeds", "", "wanted", ""], rows),
        "",
        f"The first seed; from {since_s:g} s on:",
        "",
        *table(
            ["simulated", "requests", "kept states found", "p50, ms", "p99, ms"],
            [[name, *_figures(one, since_s)] for name, one in named.items()],
        ),
        "",
        f"Smaller clusters, with as many requests a replica; p99 from {since_s:g} s on, over calm. A replica that is gone shows",
        "how far the others alone keep up with its users:",
        "",
        *table(
            [
                f"gateways x replicas, the worst of {seeds} seeds",
                f"at home (wanted: {_percent(AT_HOME)})",
                f"one replica {SLOWER:g} times slower",
                "not left out",
                "gone",
            ],
            [[f"{gateways} x {replicas}", *_small_figures(several)] for (gateways, replicas), several in small.items()],
        ),
        "",
    ]


def _smaller(world: World, gateways: int, replicas: int, seeds: int) -> list[Slowed]:
    smaller = replace(world, gateways=gateways, replicas=replicas, rate=world.rate * replicas / world.replicas)
    return [Slowed(replace(smaller, seed=seed)) for seed in range(seeds)]


def _small_figures(cases: Sequence[Slowed]) -> list[str]:
    over_calm = ([one.over_calm(outcome) for outcome in (one.slow, one.waited_for, one.gone)] for one in cases)
    return [_percent(min(one.at_home() for one in cases)), *(f"{max(figures):.2f}" for figures in zip(*over_calm, strict=True))]


def _figures(one: Outcome, since_s: float) -> list[str]:
    return [
        f"{sum(began >= since_s for began in one.began_s):,}",
        _percent(one.kept_share(since_s)),
        f"{one.percentile_ms(50, since_s):.1f}",
        f"{one.p99_ms(since_s):.1f}",
    ]


def _at_most(what: str, figures: Sequence[float], wanted: float) -> list[str]:
    return [what, f"{max(figures):.2f}", f"at most {wanted:g}", _met(max(figures) <= wanted)]


def _told(what: str, figures: Sequence[float]) -> list[str]:
    return [what, f"{max(figures):.2f}", "", ""]


def _met(holds: bool) -> str:
    return "met" if holds else "**missed**"


def _percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def main(
    *,
    seeds: Annotated[int, typer.Option(min=1, help="of each simulated case")] = 3,
    seconds: Annotated[float, typer.Option(min=3, help="of each simulated case")] = 30.0,
    rate: Annotated[float, typer.Option(min=1, help="requests/s of each simulated case")] = 480.0,
    live: Annotated[bool, typer.Option("--live", help="a real cluster on this machine instead")] = False,
    model_dir: Annotated[Path, typer.Option(help="for the real cluster")] = Path("models/ml-100k"),
    out: Annotated[Path | None, typer.Option(help="default: a file of today in benchmarks/results")] = None,
) -> None:
    """Simulate or serve, print and write."""
    load = os.getloadavg()[0]
    if live:
        from benchmarks.routing_live import served  # noqa: PLC0415 - what it needs, a simulation does not

        lines = served(model_dir)
    else:
        lines = simulated(World(seconds=seconds, rate=rate), seeds)
    page = "\n".join([*lines, *Machine.now("benchmarks.routing", ("ray", "torch") if live else ("ray",), load).lines()])
    (out or dated("routing_live_cpu" if live else "routing_cpu", "md")).write_text(page)
    print(page)


if __name__ == "__main__":
    typer.run(main)
