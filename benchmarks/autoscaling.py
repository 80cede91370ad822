"""Simulated: how replicas follow a load, by Serve's default policy and by ours with each of its options.

    python -m benchmarks.autoscaling --data DIR          # DIR holds ml-1m/ and traces/, the recorded loads; without it, only synthetic ones

Requests arrive at random (Poisson, seeded) as a curve of load says, or at the times of recorded events; `benchmarks.simulated_serve` is
what they come to.
Writes benchmarks/results/autoscaling_simulated_DATE.md and .png (pip install '.[bench]' for the plot).
"""

import gzip
import json
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import typer
from ray.serve.autoscaling_policy import _core_replica_queue_length_policy
from ray.serve.config import AutoscalingConfig

from benchmarks.simulated_serve import LANES, SERVICE_S, START_S, TICK_S, Outcome, Policy, Simulation
from cluster.autoscaling import QueuePolicy

MOST_REPLICAS = 20
DEADLINE_S = 5.0
"""Of the generator, by default: a request that has waited so long in the load `rare` is answered without it."""
Curve: TypeAlias = Callable[[float], float]


def arrivals(curve: Curve, until_s: float, seed: int = 0) -> np.ndarray[Any, Any]:
    """A Poisson process of the rate `curve(t)` requests a second, by thinning."""
    rng = np.random.default_rng(seed)
    most = max(curve(at) for at in np.arange(0.0, until_s, 0.5).tolist())
    times = np.sort(rng.uniform(0.0, until_s, rng.poisson(most * until_s)))
    kept: np.ndarray[Any, Any] = times[rng.uniform(0.0, most, len(times)) < np.vectorize(curve)(times)]
    return kept


def step(at: float) -> float:
    return 100.0 if 120 <= at < 420 else 20.0


def ramp(at: float) -> float:
    return 10.0 + 150.0 * max(0.0, 1 - abs(at - 300) / 300)


def daily(at: float) -> float:
    """A day in 24 minutes: quiet at night, one peak at noon and a higher one in the evening."""
    hour = at / 60
    return 8.0 + 60.0 * float(np.exp(-(((hour - 12) / 3) ** 2))) + 110.0 * float(np.exp(-(((hour - 20) / 2) ** 2)))


def spike(at: float) -> float:
    return 200.0 if at % 300 >= 280 else 30.0


def rare(at: float) -> float:
    """Two minutes of a few requests, then eight of none."""
    return 3.0 if at % 600 < 120 else 0.0


SYNTHETIC: Mapping[str, tuple[Curve, float]] = {
    "step": (step, 900.0),
    "ramp": (ramp, 900.0),
    "daily": (daily, 1440.0),
    "spike": (spike, 1500.0),
    "rare": (rare, 1800.0),
}


def recorded(data: Path) -> Iterator[tuple[str, np.ndarray[Any, Any], float]]:
    """(name, arrivals, length): the busiest day of MovieLens-1M's users in 24 minutes, and Mooncake's conversations ten times as fast."""
    if (ratings := data / "ml-1m" / "ratings.dat.gz").exists():
        with gzip.open(ratings, "rt") as lines:
            stamps = np.sort(np.array([int(line.rsplit("::", 1)[1]) for line in lines]))
        first = stamps[int(np.argmax(np.searchsorted(stamps, stamps + 86_400) - np.arange(len(stamps))))]
        yield "ml-1m", (stamps[(stamps >= first) & (stamps < first + 86_400)] - first) / 60.0, 1440.0
    if (trace := data / "traces" / "mooncake_conversation.jsonl.gz").exists():
        with gzip.open(trace, "rt") as lines:
            times = np.sort(np.array([json.loads(line)["timestamp"] for line in lines])) / 10_000.0
        yield "mooncake", times, float(times[-1]) + 60.0


QUICK = {"upscale_delay_s": 0.0, "look_back_period_s": 2.0, "metrics_interval_s": 0.5}


def settings(**changes: Any) -> AutoscalingConfig:
    return AutoscalingConfig(**{"min_replicas": 1, "max_replicas": MOST_REPLICAS, "target_ongoing_requests": 4, **changes})


def ours(**options: Any) -> tuple[Policy, AutoscalingConfig]:
    return QueuePolicy(**options), settings(downscale_delay_s=0.0, **QUICK)


def to_zero(policy: Policy) -> tuple[Policy, AutoscalingConfig]:
    return policy, settings(min_replicas=0, downscale_delay_s=0.0, **QUICK)


TO_ZERO = "+ scale to zero"
POLICIES: Mapping[str, Callable[[], tuple[Policy, AutoscalingConfig]]] = {
    "Serve's default": lambda: (_core_replica_queue_length_policy, settings()),
    "Serve's default, quick": lambda: (_core_replica_queue_length_policy, settings(downscale_delay_s=60.0, **QUICK)),
    "QueuePolicy": ours,
    "+ utilisation 0.7": partial(ours, target_utilisation=0.7),
    "+ latency 700 ms": partial(ours, target_latency_ms=700.0),
    "+ forecast 30 s": partial(ours, forecast_s=START_S),
    "+ all three": partial(ours, target_utilisation=0.7, target_latency_ms=700.0, forecast_s=START_S),
    TO_ZERO: lambda: to_zero(QueuePolicy(idle_s=60.0)),
}
PLOTTED = ("Serve's default", "QueuePolicy", "+ forecast 30 s")


@dataclass(frozen=True)
class Run:
    name: str
    arrivals: np.ndarray[Any, Any]
    until_s: float
    outcomes: Mapping[str, Outcome]

    def rows(self) -> Iterator[str]:
        for policy, one in self.outcomes.items():
            p50, p99 = np.percentile(one.waits_s, [50, 99])
            late, left = np.mean(np.array(one.waits_s) > 1.0), one.left / len(one.waits_s)
            waits = f"{p50 * 1e3:,.0f} | {p99:,.2f} | {late:.1%} | {left:.1%}"
            yield f"| {self.name} | {policy} | {waits} | {one.replica_s:,.0f} | {max(one.serving)} | {one.turns} |"


def simulate(name: str, times: np.ndarray[Any, Any], until_s: float) -> Run:
    rare = name == "rare"
    made = {policy: make() for policy, make in POLICIES.items() if rare or policy != TO_ZERO}
    patience_s = DEADLINE_S if rare else float("inf")
    return Run(name, times, until_s, {policy: Simulation(times, *one, patience_s).run(until_s) for policy, one in made.items()})


def plot(runs: list[Run], to: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - the table needs none

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    figure, rows = plt.subplots(len(runs), 3, figsize=(15, 2.6 * len(runs)), squeeze=False, layout="constrained")
    for (load, queue, replicas), run in zip(rows, runs, strict=True):
        seconds = np.arange(0.0, run.until_s, 5.0)
        load.plot(seconds[:-1], np.histogram(run.arrivals, seconds)[0] / 5.0, color="black", lw=0.8)
        load.set_ylabel(run.name)
        for policy in PLOTTED:
            one = run.outcomes[policy]
            times = np.arange(len(one.waiting)) * TICK_S
            queue.plot(times, np.array(one.waiting) + 1, lw=0.8, label=policy)
            replicas.plot(times, one.serving, lw=1.0, label=policy)
        queue.set_yscale("log")
    for axis, title in zip(rows[0], ("requests/s", "waiting requests + 1", "replicas serving"), strict=True):
        axis.set_title(title)
    rows[0][2].legend(fontsize=8)
    figure.savefig(to, dpi=80)


def report(runs: list[Run], command: str, picture: str, skipped: str) -> str:
    head = (
        "| load | policy | p50 wait (ms) | p99 wait (s) | waited > 1 s | gave up | replica-seconds | most replicas | changes of direction |"
    )
    return "\n".join(
        [
            "# Replicas that follow a load, simulated",
            "",
            f"A replica computes {LANES} requests at a time, {SERVICE_S:g} s each (gamma, shape 4), and takes {START_S:g} s to start.",
            f"1 to {MOST_REPLICAS} replicas, at first as many as the first minute needs; target_ongoing_requests 4.",
            "A wait ends when computing begins.",
            "",
            "- Serve's default: delays of 30 and 600 s, metrics each 10 s over 30 s; quick: none up, 60 s down, each 0.5 s over 2 s.",
            "- QueuePolicy: the quick metrics, none of Serve's delays, down_after_s 60. The options below it are added one at a time.",
            f"- Scale to zero: min_replicas 0, idle_s 60. In the load `rare`, a request that has waited {DEADLINE_S:g} s gives up.",
            "",
            head,
            "|---|---|---|---|---|---|---|---|---|",
            *(row for run in runs for row in run.rows()),
            "",
            f"![load, waiting requests and replicas]({picture})",
            "",
            *([skipped, ""] if skipped else []),
            f"Simulated with a fake clock, seed 0; {platform.machine()}. Python {platform.python_version()}, ray {version('ray')}.",
            f"Command: `{command}`",
            "",
        ]
    )


def main(
    *,
    data: Annotated[Path | None, typer.Option(help="holds ml-1m/ratings.dat.gz and traces/mooncake_conversation.jsonl.gz")] = None,
    only: Annotated[str, typer.Option(help="one curve")] = "",
    results: Annotated[Path, typer.Option()] = Path(__file__).parent / "results",
) -> None:
    """Simulate, print and file."""
    loads = [(name, arrivals(curve, until_s), until_s) for name, (curve, until_s) in SYNTHETIC.items()] + list(
        recorded(data) if data else []
    )
    runs = [simulate(*one) for one in loads if only in ("", one[0])]
    skipped = "" if len(loads) == len(SYNTHETIC) + 2 else "Recorded loads were left out: their files were not given (--data)."
    stem = f"autoscaling_simulated_{datetime.now(UTC):%Y-%m-%d}"
    plot(runs, results / f"{stem}.png")
    text = report(runs, "python -m benchmarks.autoscaling" + (" --data DIR" if data else ""), f"{stem}.png", skipped)
    (results / f"{stem}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    typer.run(main)
