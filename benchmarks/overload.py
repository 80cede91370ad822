"""More requests than the whole system can serve: how much of what it can do is left, and how soon it says no.

    python -m benchmarks.overload                                   # with the demo's model (run `make demo ONCE=1` before)
    python -m benchmarks.overload --times 2 --times 10 --seconds 60

Starts Serve on this machine, measures what 32 callers get that never wait, then sends so many times that, Poisson, each request when it is
due. The driver shares the processor with the server; `--paced` puts an engine of a known speed in place of the model's, which waits as an
accelerator's would, so that admission is measured, not a race for the processor.
Writes benchmarks/results/overload_cpu_DATE.md.
"""

import os
import platform
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks.load import Phase, Plan, Results, run
from benchmarks.load_bodies import bodies
from deployments.cli.local_serve import LocalServe

ROOT = Path(__file__).resolve().parents[1]
CLIENTS, WARM_UP_S, CLOSED_S, PAUSE_S, FILLING_S = 32, 3.0, 8.0, 5.0, 2.0
PACED = {"order": ["paced"], "backends": {"paced": "tests.chaos.engines:Paced"}, "options": {"paced": {"request_s": 0.02}}}


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    times: Annotated[list[float], typer.Option(help="of what it can do")] = [0.7, 1.0, 2.0, 5.0, 10.0],  # noqa: B006 - typer copies it
    seconds: Annotated[float, typer.Option(help="of each")] = 20.0,
    paced: Annotated[bool, typer.Option(help="an engine that takes 20 ms a request and no processor")] = False,
    port: Annotated[int, typer.Option()] = 8022,
) -> None:
    """Measure, print and file."""
    asked = bodies(model_dir, strategy="retrieval", cache="bypass")
    with tempfile.TemporaryDirectory() as directory:
        changes: dict[str, Any] = {"model_dir": str(model_dir), "events": {"url": f"sqlite:///{directory}/events.db"}}
        os.environ["PYTHONPATH"] = str(ROOT)  # the paced engine's module
        if paced:
            changes["encoder"] = PACED
        with LocalServe(ROOT / "ray_config.yaml", changes, port=port, log=Path(".genrec/overload.log")) as url:
            capacity = closed(url, asked)
            found = {factor: overloaded(url, asked, factor * capacity, seconds) for factor in times}
    text = report(found, capacity, seconds, model_dir, paced=paced)
    print(text)
    name = f"overload{'_paced' if paced else ''}_cpu_{datetime.now(UTC):%Y-%m-%d}.md"
    (ROOT / "benchmarks" / "results" / name).write_text(text)


def closed(url: str, asked: tuple[str, ...]) -> float:
    """Requests/s of callers that never wait."""
    phases = (Phase("warm-up", 0, WARM_UP_S), Phase("measured", 0, CLOSED_S))
    return run(Plan(url, phases, asked, clients=CLIENTS)).phase("measured").throughput()


def overloaded(url: str, asked: tuple[str, ...], rate: float, seconds: float) -> Results:
    """Every request of so many seconds, less the first, in which queues fill."""
    results = run(Plan(url, (Phase("load", rate, seconds),), asked, arrivals="poisson", timeout_s=40, examine=True))
    time.sleep(PAUSE_S)
    return results.between(FILLING_S, seconds)


def report(found: dict[float, Results], capacity: float, seconds: float, model_dir: Path, *, paced: bool) -> str:
    engine = "an engine of 20 ms a request" if paced else f"model {model_dir.name}"
    lines = [
        "# Overload",
        "",
        f"{engine}; {CLIENTS} callers who never wait get {capacity:.1f} requests/s. Poisson arrivals for {seconds:g} s, no caches.",
        "",
        "| x of that | sent/s | whole answers/s | share | degraded | told to come back | failed | p99, answered (ms) | p99, told so (ms) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for factor, results in found.items():
        whole = results.where(results.ok & ~results.degraded)
        rejected = results.where(results.rejected)
        goodput = len(whole) / results.span
        cells = [
            f"{factor:g}",
            f"{len(results) / results.span:.1f}",
            f"{goodput:.1f}",
            f"{goodput / capacity:.0%}",
            f"{np.mean(results.degraded):.1%}",
            f"{np.mean(results.rejected):.1%}",
            f"{int(results.failed.sum())}",
            f"{results.percentile(99):.0f}",
            f"{rejected.percentile_of_all(99):.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    versions = ", ".join(f"{package} {version(package)}" for package in ("ray", "torch", "onnxruntime"))
    load = " ".join(f"{one:.1f}" for one in os.getloadavg())
    command = f"python -m benchmarks.overload --seconds {seconds:g}{' --paced' if paced else ''}"
    command += "".join(f" --times {factor:g}" for factor in found)
    machine = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {load} at the end."
    return "\n".join([*lines, "", machine, f"Python {platform.python_version()}, {versions}.", "", f"`{command}`", ""])


if __name__ == "__main__":
    typer.run(main)
