"""Is the next answer there when a user comes back after an event, whichever gateway stored the event and whichever is asked?

    python -m benchmarks.anticipation                       # with the demo's model (run `make demo ONCE=1` before)
    python -m benchmarks.anticipation --gateways 1 --rounds 1

Starts Serve on this machine with several gateways, lets users come and go (benchmarks/visits.py), and counts where the answer comes from
that a user is given first after an event, from the user's second visit on. With anticipation and without it, in turns. What the encoder was
asked is counted by the service itself. Writes benchmarks/results/anticipation_cpu_DATE.md.
"""

import asyncio
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import httpx
import numpy as np
import typer

from benchmarks.kill_caches import with_replicas
from benchmarks.reporting import Machine, dated, table
from benchmarks.serving import settle
from benchmarks.visits import MEDIAN_GAP_S, Step, visits
from cluster.bundle_store import BundleStore
from deployments.cli.local_serve import LocalServe

REPORTED_S = 6.0
"""After the last request, until every replica has told what it was asked."""


@dataclass
class Found:
    """Of one run: where first answers after an event came from, how long they took in ms, how often each user asked, events, and what the
    encoder was asked.
    """

    tiers: Counter[str] = field(default_factory=Counter)
    took: list[float] = field(default_factory=list)
    times_asked: Counter[int] = field(default_factory=Counter)
    events: int = 0
    asked: int = 0
    computed: int = 0

    @property
    def ready(self) -> float:
        """The share of first answers that were there, or on their way."""
        return 1 - self.tiers["computed"] / max(1, self.tiers.total())

    @property
    def computations(self) -> float:
        """Times an event's user was encoded, for whatever reason."""
        return self.asked / max(1, self.events)

    @property
    def used(self) -> float:
        """The share of answers computed ahead of a request that a request was given."""
        ahead = self.asked - self.computed
        return (self.tiers.total() - self.tiers["computed"]) / ahead if ahead > 0 else float("nan")


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    gateways: Annotated[int, typer.Option()] = 4,
    rate: Annotated[float, typer.Option(help="requests/s, of all users together")] = 40.0,
    seconds: Annotated[float, typer.Option(help="of each run")] = 60.0,
    rounds: Annotated[int, typer.Option()] = 2,
    port: Annotated[int, typer.Option()] = 8024,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/anticipation_cpu_DATE.md")] = None,
) -> None:
    """Measure, print and file."""
    load, found = os.getloadavg()[0], {True: list[Found](), False: list[Found]()}
    items = [item.item_id for item in BundleStore(model_dir).open_last_good()[0].catalogue.items]
    for number in range(rounds):
        steps = visits(rate, seconds, len(items), seed=number)
        for anticipate, runs in found.items():
            with tempfile.TemporaryDirectory() as directory:
                changes = {
                    "model_dir": str(model_dir),
                    "events": {"url": f"sqlite:///{directory}/events.db"},
                    "gateway": {"flags": {"anticipate": anticipate}},
                }
                config = with_replicas(Path(directory), gateway=gateways)
                log = Path(".genrec/anticipation.log")
                with LocalServe(config, changes, port=port, log=log) as url:
                    settle(url)
                    runs.append(run(url, steps, items))
            print(f"round {number + 1}: {' | '.join(_row(anticipate, runs))}", flush=True)
    page = report(found, gateways, rate, seconds, Machine.now("benchmarks.anticipation", ("ray", "onnxruntime"), load))
    (out or dated("anticipation_cpu", "md")).write_text(page)
    print(page)


def run(url: str, steps: list[Step], items: list[str], strategy: str = "retrieval") -> Found:
    """Do what the users do, each thing when it is due."""
    before, found = encoder_calls(url), Found()
    asyncio.run(_done(url, steps, items, strategy, found))
    time.sleep(REPORTED_S)
    found.asked = encoder_calls(url) - before
    return found


def visitor(number: int) -> str:
    """The id of a user."""
    return f"visitor-{number}"


def encoder_calls(url: str) -> int:
    """What all encoders were asked so far."""
    stages: list[dict[str, Any]] = httpx.get(f"{url}/v1/backends", timeout=30).raise_for_status().json()["stages"]
    return sum(backend["calls"] for stage in stages if stage["stage"] == "encoder" for backend in stage["backends"])


async def _done(url: str, steps: list[Step], items: list[str], strategy: str, found: Found) -> None:
    began = time.monotonic()
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as http, asyncio.TaskGroup() as group:
        for step in steps:
            await asyncio.sleep(max(0.0, began + step.due - time.monotonic()))
            group.create_task(_step(http, step, items, strategy, found))


async def _step(http: aiohttp.ClientSession, step: Step, items: list[str], strategy: str, found: Found) -> None:
    user = visitor(step.user)
    if step.item is not None:
        async with http.post("/v1/events", json={"user_id": user, "item_id": items[step.item]}) as response:
            response.raise_for_status()
        found.events += 1
        return
    began = time.monotonic()
    async with http.post("/v1/recommend", json={"user_id": user, "k": 10, "strategy": strategy}) as response:
        response.raise_for_status()
        cache = (await response.json())["cache"]
    tier = cache["tier"] if cache else "computed"
    found.computed += tier == "computed"
    found.times_asked[step.user] += 1
    if found.times_asked[step.user] > 1:
        found.tiers[tier] += 1
        found.took.append((time.monotonic() - began) * 1e3)


def report(found: dict[bool, list[Found]], gateways: int, rate: float, seconds: float, machine: Machine) -> str:
    """As Markdown."""
    columns = ["anticipation", "first answers after an event", "there already", "of them l1, l2, joined", "encoded an event"]
    rows = table([*columns, "computed ahead and used", "p50 (ms)", "p99 (ms)"], (_row(on, runs) for on, runs in found.items()))
    title = f"{gateways} gateways, {rate:g} requests/s for {seconds:g} s, users that come back after {MEDIAN_GAP_S:g} s in the median"
    return "\n".join(
        [
            "# Answers that are there before they are asked for",
            "",
            f"Retrieval by stored history; {title}.",
            "",
            *rows,
            "",
            *machine.lines(),
        ]
    )


def _row(on: bool, runs: list[Found]) -> list[str]:
    tiers, took = sum((one.tiers for one in runs), Counter[str]()), [ms for one in runs for ms in one.took]
    return [
        "on" if on else "off",
        str(tiers.total()),
        _spread([one.ready for one in runs], "{:.1%}"),
        ", ".join(str(tiers[name]) for name in ("l1", "l2", "joined")),
        _spread([one.computations for one in runs], "{:.2f}"),
        _spread([one.used for one in runs], "{:.1%}") if on else "",
        f"{np.percentile(took, 50):.1f}",
        f"{np.percentile(took, 99):.1f}",
    ]


def _spread(values: list[float], form: str) -> str:
    said = form.format(float(np.mean(values)))
    return said if len(values) == 1 else f"{said} ({form.format(min(values))} to {form.format(max(values))})"


if __name__ == "__main__":
    typer.run(main)
