"""What a request costs a gateway in processor time, over an application that computes nothing behind the same Serve.

    python -m benchmarks.processor_time                     # with the demo's model (run `make demo ONCE=1` before)

In every round each system is started, warmed up and asked by 16 callers that never wait, with histories of 50 and of 200 events, strategy
retrieval, no answer kept. The processor time of the gateway's process, user and system, is that of the kernel's accounts, divided by the
requests. The constant application reads the same bodies and sends as many bytes. Colocated, the engine is in the figure; split, it is not.
Writes benchmarks/results/processor_time_cpu_DATE.md.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import typer

from benchmarks.load import Phase, Plan, run
from benchmarks.load_bodies import bodies
from benchmarks.reporting import Machine, dated, table
from benchmarks.serving import Start, genrec, naive

CALLERS = 16
WARM_UP_S, MEASURED_S = 5.0, 6.0
EVENTS = (50, 200)
CONSTANT = "an application that computes nothing"
SYSTEMS: dict[str, Start] = {
    CONSTANT: partial(naive, kind="constant", profile="fast"),
    "genrec, colocated": partial(genrec, profile="fast", placement="colocated"),
    "genrec, split": partial(genrec, profile="fast", placement="split"),
}


def gateway() -> psutil.Process:
    """The process of the only gateway on this machine."""
    found = [one for one in psutil.process_iter() if any("ServeReplica" in part and "gateway" in part for part in _command(one))]
    if len(found) != 1:
        raise SystemExit(f"{len(found)} gateways run on this machine; stop every other one")
    return found[0]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def cost_ms(url: str, asked: tuple[str, ...]) -> float:
    """Processor time of the gateway, in milliseconds a request."""
    run(Plan(url, (Phase("warm-up", 0, WARM_UP_S),), asked, clients=CALLERS))
    with counted(gateway()) as spent_s:
        results = run(Plan(url, (Phase("measured", 0, MEASURED_S),), asked, clients=CALLERS))
    if not results.ok.all():
        raise SystemExit(f"requests failed: {results.statuses()}; see the log under .genrec")
    return sum(spent_s) / len(results.ok) * 1e3


@contextmanager
def counted(process: psutil.Process) -> Iterator[list[float]]:
    """Seconds of the processor that it used in the block, once that has ended."""
    spent, before = list[float](), process.cpu_times()
    yield spent
    after = process.cpu_times()
    spent.append(after.user + after.system - before.user - before.system)


def report(found: dict[tuple[str, int], list[float]], rounds: int, machine: Machine) -> str:
    """As Markdown."""
    rows = []
    for system in SYSTEMS:
        cells = [system]
        for events in EVENTS:
            over = [mine - constant for mine, constant in zip(found[system, events], found[CONSTANT, events], strict=True)]
            cells += [_cell(found[system, events]), "" if system == CONSTANT else _cell(over)]
        rows.append(cells)
    return "\n".join(
        [
            "# Processor time of a gateway",
            "",
            f"{CALLERS} callers that never wait, fast profile, retrievals of 10 items. No answer is kept. 64 users ask again and",
            "again with one history, and the engine keeps their states, as shipped: it computes the last event.",
            f"Milliseconds of processor time a request: medians of {rounds} rounds in turns (least to most).",
            "",
            *table(["", *(heading for events in EVENTS for heading in (f"{events} events", "over the first row"))], rows),
            "",
            *machine.lines(),
        ]
    )


def _cell(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    port: Annotated[int, typer.Option()] = 8021,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/processor_time_cpu_DATE.md")] = None,
) -> None:
    """Measure, print and file."""
    load = os.getloadavg()[0]
    asked = {events: bodies(model_dir, events=events, strategy="retrieval", cache="bypass") for events in EVENTS}
    found: dict[tuple[str, int], list[float]] = {(system, events): [] for system in SYSTEMS for events in EVENTS}
    for _ in range(rounds):
        for system, start in SYSTEMS.items():
            with start(model_dir, port) as url:
                for events in EVENTS:
                    found[system, events].append(cost_ms(url, asked[events]))
                    print(f"{system}, {events} events: {found[system, events][-1]:.3f} ms", flush=True)
    page = report(found, rounds, Machine.now("benchmarks.processor_time", ("ray", "torch", "onnxruntime", "uvicorn"), load))
    (out or dated("processor_time_cpu", "md")).write_text(page)
    print(page)


if __name__ == "__main__":
    typer.run(main)
