"""Live: from 1 to 4 replicas at a step of load, by our policy and, in the same run, by Serve's default one.

    python -m benchmarks.autoscaling_live

Starts Ray and Serve on this machine with two deployments that only sleep, since what is measured is Serve's control loop and the policy,
not a model: a replica of genrec takes as much longer as its engines take to load. Clients call each of them all the time; at the step, they
become as many as four replicas should have. "wanted" is when the controller had decided on that many, "serving" when they took requests.
Writes benchmarks/results/autoscaling_live_DATE.md.
"""

import asyncio
import os
import platform
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import numpy as np
import ray
import typer
from ray import serve
from ray.serve.handle import DeploymentHandle

WORK_S, TARGET, BEFORE, AFTER = 0.5, 4, 2, 15
"""A call's seconds, calls a replica should have at once, and calls at once before and after the step."""
POLL_S = 0.05
COMMON = {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": TARGET}
OURS = {
    **COMMON,
    "upscale_delay_s": 0,
    "downscale_delay_s": 0,
    "look_back_period_s": 0.5,
    "metrics_interval_s": 0.2,
    "policy": {"policy_function": "cluster.autoscaling:QueuePolicy", "policy_kwargs": {"down_after_s": 15}},
}
DEPLOYMENTS: dict[str, dict[str, Any]] = {"QueuePolicy": OURS, "Serve's default": COMMON}


class Sleeper:
    async def __call__(self) -> None:
        await asyncio.sleep(WORK_S)


@dataclass(frozen=True)
class Seen:
    """Replicas of one deployment at the time `at`."""

    at: float
    wanted: int
    serving: int


class Watch:
    """What Serve's status says, each `POLL_S`, until it is cancelled."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Seen]] = defaultdict(list)

    async def watch(self) -> None:
        while True:
            status, now = await asyncio.to_thread(serve.status), monotonic()
            for name in DEPLOYMENTS:
                (one,) = status.applications[_slug(name)].deployments.values()
                states = {str(getattr(state, "value", state)): count for state, count in one.replica_states.items()}
                serving = states.get("RUNNING", 0)
                self.seen[name].append(Seen(now, serving + states.get("STARTING", 0), serving))
            await asyncio.sleep(POLL_S)

    def after(self, name: str, began: float, wanted: int = 0, serving: int = 0) -> float:
        """Seconds from `began` until there were so many; NaN where there never were."""
        found = (one.at - began for one in self.seen[name] if one.at >= began and one.wanted >= wanted and one.serving >= serving)
        return next(found, float("nan"))

    def turns(self, name: str, began: float, ended: float) -> int:
        """Changes of direction of what was wanted."""
        wanted = [one.wanted for one in self.seen[name] if began <= one.at <= ended]
        ups = [after > before for before, after in pairwise(wanted) if before != after]
        return sum(one != other for one, other in pairwise(ups))


def _slug(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalpha())


class Load:
    """So many calls at once, all the time. `late_s`: (when a call came, how much longer than its work it took)."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self.handle, self.clients, self.late_s = handle, BEFORE, list[tuple[float, float]]()
        self.calls: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        while True:
            more = [asyncio.create_task(self._call()) for _ in range(self.clients - len(self.calls))]
            self.calls.update(more)
            for call in more:
                call.add_done_callback(self.calls.discard)
            await asyncio.sleep(0.005)

    async def _call(self) -> None:
        began = monotonic()
        await self.handle.remote()
        self.late_s.append((began, monotonic() - began - WORK_S))

    def p99_s(self, began: float, ended: float) -> float:
        return float(np.percentile([late for at, late in self.late_s if began <= at <= ended], 99))


@dataclass(frozen=True)
class Round:
    """By policy: seconds from the step until replicas were wanted, and served; changes of direction and waits while the load was high."""

    wanted: Mapping[str, float]
    second: Mapping[str, float]
    serving: Mapping[str, float]
    turns: Mapping[str, int]
    p99_s: Mapping[str, float]
    back_s: float


async def one_round(watch: Watch, loads: Mapping[str, Load], high_s: float, low_s: float) -> Round:
    began = monotonic()
    for load in loads.values():
        load.clients = AFTER
    await asyncio.sleep(high_s)
    fell = monotonic()
    for load in loads.values():
        load.clients = BEFORE
    await asyncio.sleep(low_s)
    back = next((one.at - fell for one in watch.seen["QueuePolicy"] if one.at > fell and one.wanted == 1), float("nan"))
    return Round(
        wanted={name: watch.after(name, began, wanted=4) for name in loads},
        second={name: watch.after(name, began, serving=2) for name in loads},
        serving={name: watch.after(name, began, serving=4) for name in loads},
        turns={name: watch.turns(name, began, fell) for name in loads},
        p99_s={name: load.p99_s(began, fell) for name, load in loads.items()},
        back_s=back,
    )


async def measure(rounds: int) -> list[Round]:
    """The first round lasts until Serve's default policy has followed too; the others are of ours alone, which has come back by then."""
    loads = {name: Load(serve.get_app_handle(_slug(name))) for name in DEPLOYMENTS}
    watch = Watch()
    tasks = [asyncio.create_task(one.run()) for one in loads.values()] + [asyncio.create_task(watch.watch())]
    await asyncio.sleep(5)
    measured = [await one_round(watch, loads, high_s=80, low_s=30)]
    tasks[1].cancel()
    ours = {"QueuePolicy": loads["QueuePolicy"]}
    measured += [await one_round(watch, ours, high_s=20, low_s=30) for _ in range(rounds - 1)]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, *(call for load in loads.values() for call in load.calls), return_exceptions=True)
    return measured


def report(measured: list[Round], busy: tuple[float, float]) -> str:
    rows = []
    for name in DEPLOYMENTS:
        of = [one for one in measured if name in one.wanted]
        times = [[getattr(one, figure)[name] for one in of] for figure in ("wanted", "second", "serving")]
        cells = " | ".join(f"{np.median(each):.1f} ({min(each):.1f}-{max(each):.1f})" for each in times)
        waits = f"{np.median([one.p99_s[name] for one in of]):.2f}"
        rows.append(f"| {name} | {len(of)} | {cells} | {waits} | {max(one.turns[name] for one in of)} |")
    head = "| policy | steps | 4 wanted (s) | 2 serving (s) | 4 serving (s) | p99 beyond its sleep (s) | changes of direction |"
    return "\n".join(
        [
            "# From 1 to 4 replicas at a step of load, on a live Serve",
            "",
            f"Calls that sleep {WORK_S:g} s, {BEFORE} at once, then {AFTER}; target_ongoing_requests {TARGET}, 1 to 4 replicas.",
            "Seconds from the step, median (least-most); waits and changes of direction while the load was high (80 s, then 20 s).",
            "",
            head,
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"QueuePolicy was back at 1 replica {np.median([one.back_s for one in measured]):.1f} s after the load fell (down_after_s 15).",
            "Serve's default policy: upscale_delay_s 30, downscale_delay_s 600, look_back_period_s 30, metrics_interval_s 10. QueuePolicy:",
            "0, 0, 0.5, 0.2. Deployments that sleep have no engine to load: the time that takes in a real one comes on top.",
            "",
            f"{platform.machine()}, {os.cpu_count()} cores, load average before the run {busy[0]:.1f}, after it {busy[1]:.1f}.",
            f"Python {platform.python_version()}, ray {version('ray')}.",
            "Command: `python -m benchmarks.autoscaling_live`",
            "",
        ]
    )


def main(
    *,
    rounds: Annotated[int, typer.Option(help="steps of load")] = 5,
    temp_dir: Annotated[str, typer.Option(help="of Ray; default: one of its own")] = "",
    results: Annotated[Path, typer.Option()] = Path(__file__).parent / "results",
) -> None:
    """Drive, print and file."""
    before = os.getloadavg()[0]
    ray.init(
        address="local", num_cpus=8, include_dashboard=False, _temp_dir=temp_dir or tempfile.mkdtemp(prefix="ray-"), log_to_driver=False
    )
    try:
        serve.start(proxy_location="Disabled")
        for name, config in DEPLOYMENTS.items():
            sleeper = serve.deployment(max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1}, autoscaling_config=config)(Sleeper)
            serve.run(sleeper.bind(), name=_slug(name), route_prefix=f"/{_slug(name)}")
        measured = asyncio.run(measure(rounds))
        text = report(measured, (before, os.getloadavg()[0]))
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call]
        ray.shutdown()
    (results / f"autoscaling_live_{datetime.now(UTC):%Y-%m-%d}.md").write_text(text)
    print(text)


if __name__ == "__main__":
    typer.run(main)
