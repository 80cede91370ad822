"""What each optimisation is worth: the service as it is shipped, beside itself with one thing switched otherwise.

    python -m benchmarks.ablation                                       # with the demo's model (run `make demo ONCE=1` before)
    python -m benchmarks.ablation --only "no answer cache" --rounds 1

Users with long histories come and go (benchmarks/visits.py) on genrec colocated with the fast profile. In each round every service is
started in turn, given the users' histories, and asked by the same trace; afterwards callers that never wait ask for answers that no cache
holds. A figure of the table is the median over rounds of its ratio to the service as shipped in the same round. Processor time is that of
all processes of the service, Ray's and HAProxy's among them. Writes benchmarks/results/ablation_cpu_DATE.md.

Not here, since no key switches them: single flight (`joined` in benchmarks.anticipation), pools (benchmarks.buffers); nor hedging, which
takes a second encoder. Which policy keeps what users ask for again: `genrec bench cache`.
"""

import asyncio
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import aiohttp
import numpy as np
import psutil
import typer

from benchmarks.anticipation import run as visited
from benchmarks.anticipation import visitor
from benchmarks.load import Phase, Plan, run
from benchmarks.load_bodies import bodies
from benchmarks.reporting import Machine, dated, table
from benchmarks.serving import SHIPPED, settle
from benchmarks.visits import Step, visits
from cluster.bundle import BundleStore
from cluster.config import read_document
from deployments.cli.local_serve import LocalServe

AS_SHIPPED = "as shipped"
HISTORY = 150
"""Events of each user when the trace begins."""
CLOSED_S, WARM_UP_S = 6.0, 4.0
Changes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Trace:
    """Requests of one strategy, so many a second, then `callers` that never wait; `otherwise`: what is switched, and how."""

    strategy: str
    rate: float
    callers: int
    otherwise: Mapping[str, Changes]


ENGINES = {"encoder": {"order": ["onnxruntime", "torch"]}, "generator": {"order": ["torch_beam"]}}
"""Those that serve, in the service as shipped and in every other."""
TRACES = (
    Trace(
        "retrieval",
        rate=40.0,
        callers=16,
        otherwise={
            "no answer cache": {"cache": {"enabled": False}},
            "no anticipation": {"events": {"anticipate": False}},
            "no kept states": {"encoder": {"options": {"onnxruntime": {"state_bytes": 0}}}},
            "kept states in a radix tree, not pages": {"encoder": {"options": {"onnxruntime": {"state_store": "radix"}}}},
            "one request a batch": {"encoder": {"batching": {"max_requests": 1}}},
            "selection: fastest": {"encoder": {"selection": "fastest"}},
            "answers also kept by cache actors (l2)": {"cache": {"l2": "actors"}},
        },
    ),
    Trace(
        "unified",
        rate=4.0,
        callers=4,
        otherwise={
            "unified: no kept prompts": {"generator": {"options": {"torch_beam": {"prompt_bytes": 0}}}},
            "unified: no LogitsCache": {"generator": {"options": {"torch_beam": {"cache_bytes": 0}}}},
            "unified: one request a batch": {"generator": {"batching": {"max_requests": 1}}},
        },
    ),
)


@dataclass(frozen=True)
class Figures:
    """Of one service in one round: ms from request to answer on the trace, processor time a request (ms), what callers that never wait get
    a second, and resident memory (MiB) at the end.
    """

    p50: float
    p99: float
    processor: float
    closed: float
    memory: float


COLUMNS = {
    "p50": "p50 of the trace",
    "p99": "p99 of the trace",
    "processor": "processor time a request",
    "closed": "requests/s, nothing cached",
    "memory": "resident memory",
}


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `other` over those of `one`, at every depth."""
    both = {key: merged(one[key], value) if isinstance(value, Mapping) and key in one else value for key, value in other.items()}
    return {**one, **both}


@contextmanager
def serving(changes: Mapping[str, Any], port: int) -> Iterator[LocalServe]:
    """Colocated, with the fast profile, once all engines are loaded: what is shipped, but for `changes`."""
    config = SHIPPED["colocated"]
    shipped = merged(read_document(config)["applications"][0]["args"], ENGINES)
    with tempfile.TemporaryDirectory() as directory:
        changed = merged({**shipped, "events": {"url": f"sqlite:///{directory}/events.db"}}, changes)
        serve = LocalServe(config, changed, port=port, log=Path(".genrec/ablation.log"), profile="fast")
        with serve as url:
            settle(url)
            yield serve


async def give_histories(url: str, users: int, items: list[str]) -> None:
    """Each user `HISTORY` events of before the trace, as a shop's log would be loaded."""
    rng = np.random.default_rng(0)
    async with aiohttp.ClientSession(url) as http:
        for user in range(users):
            chosen = rng.integers(len(items), size=HISTORY)
            events = [
                {"user_id": visitor(user), "item_id": items[item], "timestamp": 1_700_000_000 + 60 * step, "action": "view"}
                for step, item in enumerate(chosen)
            ]
            async with http.post("/v1/events", json={"events": events}) as response:
                response.raise_for_status()


def spent(pid: int) -> tuple[float, float]:
    """Seconds of the processor and MiB of a process and all its descendants."""
    seconds, memory = 0.0, 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds, memory = seconds + times.user + times.system, memory + process.memory_info().rss
    return seconds, memory / 2**20


def measure(serve: LocalServe, trace: Trace, steps: list[Step], items: list[str], closed: tuple[str, ...]) -> Figures:
    """One service's figures."""
    asyncio.run(give_histories(serve.url, max(step.user for step in steps) + 1, items))
    before, _ = spent(serve.pid)
    found = visited(serve.url, steps, items, trace.strategy)
    after, _ = spent(serve.pid)
    phases = (Phase("warm-up", 0, WARM_UP_S), Phase("closed", 0, CLOSED_S))
    results = run(Plan(serve.url, phases, closed, clients=trace.callers)).phase("closed")
    if results.failed.any() or results.rejected.any():
        raise SystemExit(f"requests failed: {results.statuses()}; see .genrec/ablation.log")
    requests = sum(step.item is None for step in steps)
    p50, p99 = np.percentile(found.took, [50, 99])
    return Figures(float(p50), float(p99), (after - before) / requests * 1e3, results.throughput(), spent(serve.pid)[1])


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    seconds: Annotated[float, typer.Option(help="of each trace")] = 40.0,
    rounds: Annotated[int, typer.Option()] = 2,
    only: Annotated[list[str], typer.Option(help="of the things that are switched otherwise; default: all")] = [],  # noqa: B006 - typer copies it
    port: Annotated[int, typer.Option()] = 8027,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/ablation_cpu_DATE.md")] = None,
) -> None:
    """Measure, print and file."""
    if strangers := set(only) - {name for trace in TRACES for name in trace.otherwise}:
        raise typer.BadParameter(f"nothing is called {', '.join(sorted(strangers))}")
    load, items = os.getloadavg()[0], [item.item_id for item in BundleStore(model_dir).open_last_good()[0].catalogue.items]
    found: dict[str, list[Figures]] = {}
    bases: dict[str, list[Figures]] = {}
    for trace in TRACES:
        switched = {name: changes for name, changes in trace.otherwise.items() if not only or name in only}
        closed = bodies(model_dir, events=HISTORY, strategy=trace.strategy, cache="bypass")
        for number in range(rounds if switched else 0):
            steps = visits(trace.rate, seconds, len(items), seed=number)
            for name, changes in {f"{trace.strategy}: {AS_SHIPPED}": {}, **switched}.items():
                with serving({"model_dir": str(model_dir), **changes}, port) as serve:
                    found.setdefault(name, []).append(measure(serve, trace, steps, items, closed))
                print(f"round {number + 1}, {name}: {found[name][-1]}", flush=True)
        bases |= dict.fromkeys(switched, found.get(f"{trace.strategy}: {AS_SHIPPED}", []))
    page = report(found, bases, seconds, rounds, Machine.now("benchmarks.ablation", ("ray", "torch", "onnxruntime"), load))
    (out or dated("ablation_cpu", "md")).write_text(page)
    print(page)


def report(found: Mapping[str, list[Figures]], bases: Mapping[str, list[Figures]], seconds: float, rounds: int, machine: Machine) -> str:
    """As Markdown."""
    rates = ", ".join(f"{trace.rate:g} {trace.strategy} requests/s" for trace in TRACES)
    rows = [[name, *(_cell(runs, bases.get(name), column) for column in COLUMNS)] for name, runs in found.items()]
    return "\n".join(
        [
            "# What each optimisation is worth",
            "",
            f"Colocated, fast profile, users of {HISTORY} events come back with a new one, {rates} for {seconds:g} s, {rounds} rounds.",
            "Rows as shipped: medians (ms; requests/s; MiB). Other rows: times that, medians of the rounds (least to most).",
            "",
            *table(["", *COLUMNS.values()], rows),
            "",
            *machine.lines(),
        ]
    )


def _cell(runs: list[Figures], base: list[Figures] | None, column: str) -> str:
    values = [getattr(one, column) for one in runs]
    if base is None:
        return f"{median(values):.1f}"
    ratios = [value / getattr(one, column) for value, one in zip(values, base, strict=True)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    typer.run(main)
