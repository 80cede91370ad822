"""What hostile callers cost honest ones: the honest callers' p99, calm and beside each kind of hostile caller in turns.

    python -m benchmarks.hostile                                    # with the demo's model (run `make demo ONCE=1` before)
    python -m benchmarks.hostile --kinds "slow headers" --rounds 1

Honest requests come as Poisson arrivals at a share of what 32 callers that never wait are answered. The system has the machine's first
cores; the honest driver and the hostile callers (benchmarks/hostile_callers.py) share the last one. One round is calm, hostile, calm for
every kind; the figures are of all rounds together. Writes benchmarks/results/hostile_cpu_DATE.md.
"""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.hostile_callers import KINDS
from benchmarks.load import Load, Phase, Plan, Results
from benchmarks.load_bodies import bodies
from benchmarks.overload import closed
from benchmarks.reporting import Machine, dated, table
from benchmarks.serving import genrec
from cluster.profile import ProfileName

SETTLING_S = 2.0
"""After hostile callers, which is not counted: what they left is thrown away."""


@dataclass
class Found:
    """Of one kind of hostile caller: honest requests of all rounds, and what became of the hostile connections."""

    calm: list[Results] = field(default_factory=list)
    hostile: list[Results] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    kinds: Annotated[list[str], typer.Option(help=f"any of {', '.join(KINDS)}")] = list(KINDS),  # noqa: B006 - typer copies it
    profile: Annotated[ProfileName, typer.Option(help="fast: HAProxy before the gateways; default: Serve's own proxy")] = "fast",
    share: Annotated[float, typer.Option(help="honest requests, of what the closed loop is answered")] = 0.3,
    rounds: Annotated[int, typer.Option()] = 3,
    seconds: Annotated[float, typer.Option(help="of each phase")] = 10.0,
    port: Annotated[int, typer.Option()] = 8023,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/hostile_cpu_DATE.md")] = None,
) -> None:
    """Measure, print and file."""
    load, cores = os.getloadavg()[0], sorted(os.sched_getaffinity(0))
    asked, found = bodies(model_dir, strategy="retrieval", cache="bypass"), {kind: Found() for kind in kinds}
    os.sched_setaffinity(0, cores[:-1] or cores)  # what is started from here on inherits it
    with genrec(model_dir, port, profile=profile, placement="colocated") as url:
        os.sched_setaffinity(0, cores[-1:])
        rate = share * closed(url, asked)
        for number in range(rounds):
            for kind in kinds:
                one_round(found[kind], Plan(url, _phases(rate, seconds), asked, arrivals="poisson", seed=number), kind)
                print(f"round {number + 1}: {' | '.join(_row(kind, found[kind]))}", flush=True)
    page = report(found, rate, profile, Machine.now("benchmarks.hostile", ("ray", "onnxruntime"), load))
    (out or dated("hostile_cpu", "md")).write_text(page)
    print(page)


def one_round(found: Found, plan: Plan, kind: str) -> None:
    """Honest requests by the plan, beside which hostile callers call in its second phase."""
    seconds = plan.phases[1].seconds - 1
    command = [sys.executable, "-m", "benchmarks.hostile_callers", "--url", plan.url, "--kind", kind, "--seconds", str(seconds)]
    with Load(plan) as load:
        time.sleep(load.until("hostile"))
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        results = load.results()
    found.ends.update(json.loads(ended.stdout))
    found.hostile.append(results.phase("hostile"))
    found.calm += [results.phase("calm"), results.phase("calm again")]


def _phases(rate: float, seconds: float) -> tuple[Phase, ...]:
    named = {"calm": seconds, "hostile": seconds, "settling": SETTLING_S, "calm again": seconds}
    return tuple(Phase(name, rate, long) for name, long in named.items())


def report(found: dict[str, Found], rate: float, profile: str, machine: Machine) -> str:
    """As Markdown."""
    columns = [
        "hostile callers",
        "at a time",
        "p50, calm (ms)",
        "beside them",
        "p99, calm (ms)",
        "beside them",
        "ratio",
        "honest unanswered",
    ]
    rows = table([*columns, "how their connections ended"], (_row(kind, one) for kind, one in found.items()))
    way = "HAProxy before the gateway" if profile == "fast" else "Serve's own proxy"
    lines = ["# Honest callers beside hostile ones", "", f"Retrievals, {rate:.0f} requests/s, none out of a cache; {way}.", "", *rows, ""]
    return "\n".join([*lines, *machine.lines()])


def _row(kind: str, found: Found) -> list[str]:
    calm, hostile = _latencies(found.calm), _latencies(found.hostile)
    ends = ", ".join(f"{count} x {end}" for end, count in sorted(found.ends.items())) or "none ended"
    missed = sum(int((~results.ok).sum()) for results in found.hostile)
    cells = [f"{np.percentile(one, q):.1f}" for q in (50, 99) for one in (calm, hostile)]
    ratio = np.percentile(hostile, 99) / np.percentile(calm, 99)
    return [kind, str(KINDS[kind].connections), *cells, f"{ratio:.2f}", str(missed), ends]


def _latencies(phases: list[Results]) -> np.ndarray:
    """Milliseconds of all requests, those too that were not answered."""
    return np.concatenate([results.latency for results in phases]) * 1e3


if __name__ == "__main__":
    typer.run(main)
