"""More requests than the whole system can serve: how much of what it can do is left, and how soon it says no.

    python -m benchmarks.overload                                   # with the demo's model (run `make demo ONCE=1` before)
    python -m benchmarks.overload --times 2 --times 10 --seconds 60

Starts each system on the machine's first cores. For each multiple it measures what 32 callers (`--clients`) get that never wait, then
sends so many times that, Poisson, each request when it is due: a share is of what the system can do just then, as a virtual machine's
speed changes by a fifth within minutes. The driver has the last core to itself. The engine is the model's own.
Writes benchmarks/results/overload_cpu_DATE.md.
"""

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.load import Phase, Plan, Results, run
from benchmarks.load_bodies import bodies
from benchmarks.reporting import Machine, dated, table
from benchmarks.serving import Start, genrec, naive

CLIENTS, WARM_UP_S, CLOSED_S, PAUSE_S, FILLING_S = 32, 5.0, 8.0, 5.0, 2.0
SYSTEMS: dict[str, Start] = {
    "genrec, colocated": partial(genrec, profile="fast", placement="colocated"),
    "genrec, split": partial(genrec, profile="fast", placement="split"),
    "FastAPI + PyTorch eager": partial(naive, kind="fastapi"),
}


@dataclass(frozen=True)
class Overloaded:
    """`factor` times the `capacity`, the requests/s of callers that never wait, and what became of all of them.

    `filled`: those due after the first `FILLING_S`, in which queues fill.
    """

    factor: float
    capacity: float
    results: Results
    filled: Results


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    systems: Annotated[list[str], typer.Option(help=f"any of {', '.join(SYSTEMS)}")] = list(SYSTEMS),  # noqa: B006 - typer copies it
    strategy: Annotated[str, typer.Option(help="retrieval, or unified")] = "retrieval",
    times: Annotated[list[float], typer.Option(help="of what it can do")] = [0.7, 1.0, 2.0, 5.0, 10.0],  # noqa: B006 - typer copies it
    seconds: Annotated[float, typer.Option(help="of each")] = 20.0,
    clients: Annotated[int, typer.Option(help="callers that never wait, fewer than the gateway's places")] = CLIENTS,
    port: Annotated[int, typer.Option()] = 8022,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/overload_cpu_DATE.md")] = None,
) -> None:
    """Measure, print and file."""
    load, cores = os.getloadavg()[0], sorted(os.sched_getaffinity(0))
    asked, found = bodies(model_dir, strategy=strategy, cache="bypass"), dict[str, list[Overloaded]]()
    for system in systems:
        os.sched_setaffinity(0, cores[:-1] or cores)  # what is started from here on inherits it
        with SYSTEMS[system](model_dir, port) as url:
            os.sched_setaffinity(0, cores[-1:])
            found[system] = [overloaded(url, asked, factor, seconds, clients) for factor in times]
        print("\n".join(rows(found[system])), flush=True)
    page = report(found, strategy, seconds, Machine.now("benchmarks.overload", ("ray", "torch", "onnxruntime", "fastapi"), load))
    (out or dated("overload_cpu", "md")).write_text(page)
    print(page)


def closed(url: str, asked: tuple[str, ...], headers: dict[str, str] | None = None, clients: int = CLIENTS) -> float:
    """Requests/s of callers that never wait. Ends the program where one is not answered: the time it took is not the system's."""
    phases = (Phase("warm-up", 0, WARM_UP_S), Phase("measured", 0, CLOSED_S))
    results = run(Plan(url, phases, asked, clients=clients, headers=headers or {})).phase("measured")
    if not len(results) or not results.ok.all():
        raise SystemExit(f"{clients} callers are more than the system takes, send fewer: {results.statuses()}")
    return results.throughput()


def overloaded(url: str, asked: tuple[str, ...], factor: float, seconds: float, clients: int) -> Overloaded:
    """A flood of so many seconds, after what the system can do just then."""
    capacity = closed(url, asked, clients=clients)
    time.sleep(PAUSE_S)
    results = run(Plan(url, (Phase("load", factor * capacity, seconds),), asked, arrivals="poisson", timeout_s=40, examine=True))
    time.sleep(PAUSE_S)
    return Overloaded(factor, capacity, results, results.between(FILLING_S, seconds))


def rows(found: list[Overloaded]) -> list[str]:
    """A table as Markdown."""
    columns = [
        "callers that never wait: requests/s",
        "x of that",
        "sent/s",
        "whole answers/s",
        "share",
        "degraded",
        "told to come back",
        "failed, of all",
    ]
    columns += ["p99, answered (ms)", "p99, told so (ms)"]
    return table(columns, map(_row, found))


def _row(found: Overloaded) -> list[str]:
    results = found.filled
    whole, rejected = results.where(results.ok & ~results.degraded), results.where(results.rejected)
    goodput = len(whole) / results.span
    return [
        f"{found.capacity:.1f}",
        f"{found.factor:g}",
        f"{len(results) / results.span:.1f}",
        f"{goodput:.1f}",
        f"{goodput / found.capacity:.0%}",
        f"{np.mean(results.degraded):.1%}",
        f"{np.mean(results.rejected):.1%}",
        f"{int(found.results.failed.sum()):,} of {len(found.results):,}",
        f"{results.percentile(99):.0f}",
        f"{rejected.percentile_of_all(99):.0f}",
    ]


def report(found: dict[str, list[Overloaded]], strategy: str, seconds: float, machine: Machine) -> str:
    """As Markdown."""
    lines = ["# Overload", "", f"Poisson arrivals for {seconds:g} s, strategy {strategy}, no caches; the driver on a core of its own."]
    lines += [f"Failures are of all requests, the other figures of those due after the first {FILLING_S:g} s, in which queues fill.", ""]
    for system, measured in found.items():
        lines += [f"## {system}", "", *rows(measured), ""]
    return "\n".join([*lines, *machine.lines()])


if __name__ == "__main__":
    typer.run(main)
