"""MLPerf's LoadGen asks the endpoint: samples/s of its Offline scenario, and the largest rate of its Server scenario that it calls VALID.

    pip install mlcommons-loadgen
    OMP_NUM_THREADS=1 python -m benchmarks.loadgen                 # with the demo's model (run `make demo ONCE=1` before)
    OMP_NUM_THREADS=1 python -m benchmarks.loadgen --strategies retrieval --seconds 10 --steps 3 --no-kept

LoadGen draws samples, says when each is due, and judges; this program sends them to genrec on the same machine, as requests over HTTP, and
tells LoadGen of each answer. Offline: all samples at once, some of which are under way at a time, as single requests and as batches.
Server: Poisson arrivals; the rate is found by halving what lies below 1.2 times what single requests gave Offline. A run with a request
that failed, was refused, or was answered degraded does not count as valid, whatever LoadGen says of it.

This is no official MLPerf result: runs are shorter than its 600 s, and model and data are none of its benchmarks'. Its rules also forbid
what engines keep of users between requests; `--no-kept` has them keep nothing. Writes benchmarks/results/loadgen_cpu_DATE.md.
"""

import asyncio
import importlib
import os
import re
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import typer
import uvloop

from benchmarks.load import NO_ANSWER, OUT_OF_TIME, Phase, Plan, run
from benchmarks.load_bodies import bodies
from benchmarks.load_client import Lost, Pool, request_bytes
from benchmarks.reporting import Machine, dated, table
from benchmarks.serving import BEYOND, SHIPPED, genrec, largest, merged

Scenario = Literal["Server", "Offline"]
Sample = tuple[int, int]
"""LoadGen's id of it, and which body it is."""
STRATEGIES = ("retrieval", "unified")
USERS, CLIENTS, WARM_UP_S, PAUSE_S = 1024, 16, 5.0, 1.0
OPEN = {1: 32, 32: 4}
"""Offline, by samples a request: requests under way. A body of 32 stays below what counts as a large one."""
CONNECTIONS, TIMEOUT_S = 4000, 10.0
TRIES, EXPECTED = 3, 1.2
"""Offline: LoadGen must be told before how fast the system is; so many times what was seen, and again where that was too little."""
TOO_SHORT = "Min duration"
DEGRADED, ANSWERED = 1, 200
NAMES = {NO_ANSWER: "no connection", OUT_OF_TIME: "out of time", DEGRADED: "degraded"}
GENERATOR = {"generator": {"order": ["torch_beam"]}}
"""The faster one on a CPU."""
NOTHING_KEPT = {
    "encoder": {"options": {name: {"state_bytes": 0} for name in ("onnxruntime", "torch")}},
    "generator": {"options": {"torch_beam": {"prompt_bytes": 0, "cache_bytes": 0}}},
}


class NoLoadGen(Exception):
    """The package is not installed."""


def library() -> Any:
    """LoadGen. Raises NoLoadGen, which says what to install."""
    try:
        return importlib.import_module("mlperf_loadgen")
    except ImportError as error:
        raise NoLoadGen(f"LoadGen cannot be imported ({error}); run: pip install mlcommons-loadgen") from error


@dataclass(frozen=True)
class Summary:
    """What LoadGen says of a run: its verdict, the conditions that were not met, samples/s, and latencies in ms by percentile."""

    valid: bool
    unmet: tuple[str, ...]
    per_s: float
    percentiles_ms: Mapping[float, float]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Of mlperf_log_summary.txt. Raises ValueError where it holds no result."""
        lines = [(name.strip(), value.strip()) for name, colon, value in (line.partition(":") for line in text.splitlines()) if colon]
        told = dict(lines)
        per_s = told.get("Completed samples per second") or told.get("Samples per second")
        if "Result is" not in told or per_s is None:
            raise ValueError(f"LoadGen's summary holds no result; it says: {text[:500]!r}")
        latencies = {re.match(r"([\d.]+) percentile latency \(ns\)$", name): value for name, value in lines}
        return cls(
            valid=told["Result is"] == "VALID",
            unmet=tuple(name.removesuffix(" satisfied") for name, value in lines if name.endswith(" satisfied") and value != "Yes"),
            per_s=float(per_s),
            percentiles_ms={float(found[1]): int(value) / 1e6 for found, value in latencies.items() if found},
        )


@dataclass(frozen=True)
class Trial:
    """A run at so many samples/s: what LoadGen says, and how many samples came to what."""

    rate: float
    said: Summary
    came_to: Mapping[int, int]

    @property
    def unanswered(self) -> dict[str, int]:
        """Samples without a whole answer, by what they came to."""
        return {NAMES.get(status, f"answered {status}"): number for status, number in self.came_to.items() if status != ANSWERED}

    @property
    def valid(self) -> bool:
        return self.said.valid and not self.unanswered

    def verdict(self) -> str:
        reasons = [f"not met: {', '.join(self.said.unmet)}"] if self.said.unmet else []
        reasons += [f"{number} {name}" for name, number in self.unanswered.items()]
        said = "VALID" if self.said.valid else "INVALID"
        return f"{said} ({'; '.join(reasons)})" if reasons else said


class Endpoint:
    """LoadGen's system under test: an event loop on a thread of its own sends what `issue` is given, `size` samples a request.

    `complete` is given the ids of samples once their request has ended, answered or not, on that thread: LoadGen waits for each of them.
    """

    def __init__(
        self, url: str, bodies: Sequence[str], complete: Callable[[list[int]], None], *, size: int = 1, open_at_most: int = CONNECTIONS
    ) -> None:
        parts = urlsplit(url)
        self._host, self._path = parts.netloc, "/v1/recommend" if size == 1 else "/v1/recommend:batch"
        self._bodies, self._complete, self._size = [body.encode() for body in bodies], complete, size
        self._pool = Pool(parts.hostname or "127.0.0.1", parts.port or 80, asyncio.Semaphore(open_at_most))
        self._waiting, self._open, self._open_at_most = deque[Sample](), set[asyncio.Task[None]](), open_at_most
        self._loop = uvloop.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="endpoint", daemon=True)
        self.came_to = Counter[int]()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def issue(self, samples: Sequence[Any]) -> None:
        """LoadGen's query: QuerySamples, each with an `id` and an `index`. Returns at once, from any thread."""
        self._loop.call_soon_threadsafe(self._begin, [(sample.id, sample.index) for sample in samples])

    def _begin(self, samples: list[Sample]) -> None:
        self._waiting.extend(samples)
        for _ in range(min(self._open_at_most - len(self._open), -(-len(samples) // self._size))):
            task = self._loop.create_task(self._work())
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _work(self) -> None:
        while self._waiting:
            taken = [self._waiting.popleft() for _ in range(min(self._size, len(self._waiting)))]
            self.came_to[await self._asked([index for _, index in taken])] += len(taken)
            self._complete([sample for sample, _ in taken])

    async def _asked(self, indices: list[int]) -> int:
        """What the answer to these bodies comes to: DEGRADED, or its status."""
        one = self._bodies[indices[0]]
        body = one if self._size == 1 else b'{"requests":[' + b",".join(self._bodies[index] for index in indices) + b"]}"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = await self._pool.ask(request_bytes(self._host, self._path, body))
        except TimeoutError:
            return OUT_OF_TIME
        except (OSError, Lost):
            return NO_ANSWER
        return DEGRADED if b'"degraded":true' in answer.body else answer.status

    async def _close(self) -> None:
        for task in self._open:
            task.cancel()
        for connection in self._pool.idle:
            connection.close()
        await asyncio.sleep(0)


def trial(url: str, asked: Sequence[str], scenario: Scenario, rate: float, *, seconds: float, bound_ms: float, size: int = 1) -> Trial:
    """One run of LoadGen's, which takes that long at least where the rate is what the system can do. Raises NoLoadGen."""
    lg = library()

    def complete(samples: list[int]) -> None:
        lg.QuerySamplesComplete([lg.QuerySampleResponse(sample, 0, 0) for sample in samples])

    settings, logs = lg.TestSettings(), lg.LogSettings()
    settings.scenario, settings.mode = getattr(lg.TestScenario, scenario), lg.TestMode.PerformanceOnly
    settings.min_duration_ms, settings.min_query_count = round(seconds * 1e3), 1
    settings.offline_expected_qps = settings.server_target_qps = rate
    settings.server_target_latency_ns, settings.server_target_latency_percentile = round(bound_ms * 1e6), 0.99
    open_at_most = OPEN[size] if scenario == "Offline" else CONNECTIONS
    with tempfile.TemporaryDirectory() as directory, Endpoint(url, asked, complete, size=size, open_at_most=open_at_most) as endpoint:
        logs.log_output.outdir, logs.enable_trace = directory, False
        logs.log_output.copy_summary_to_stdout = False
        sut = lg.ConstructSUT(endpoint.issue, lambda: None)
        samples = lg.ConstructQSL(len(asked), len(asked), lambda _: None, lambda _: None)
        try:
            lg.StartTestWithLogSettings(sut, samples, settings, logs)
        finally:
            lg.DestroyQSL(samples)
            lg.DestroySUT(sut)
        said = Summary.parse((Path(directory) / "mlperf_log_summary.txt").read_text())
        return Trial(rate, said, dict(endpoint.came_to))


@dataclass(frozen=True)
class Found:
    """Of one strategy: Offline by samples a request, the runs at rates of Server, and the largest rate that was valid."""

    offline: Mapping[int, Trial]
    server: Sequence[Trial]
    largest: float


def measure(url: str, asked: tuple[str, ...], *, seconds: float, bound_ms: float, steps: int) -> Found:
    """One strategy's figures, once it is warm."""
    warm = run(Plan(url, (Phase("warm-up", 0, WARM_UP_S),), asked, clients=CLIENTS)).throughput()
    server, ask = list[Trial](), partial(trial, url, asked, seconds=seconds, bound_ms=bound_ms)
    offline = {size: long_enough(partial(ask, "Offline", size=size), warm) for size in OPEN}
    for size in OPEN:
        print(f"Offline, {size} a request: {offline[size].said.per_s:.1f} samples/s, {offline[size].verdict()}", flush=True)

    def valid(rate: float) -> bool:
        server.append(ask("Server", rate))
        print(f"Server, {rate:.1f}/s: p99 {server[-1].said.percentiles_ms[99.0]:.1f} ms, {server[-1].verdict()}", flush=True)
        time.sleep(PAUSE_S)  # what queued is worked off
        return server[-1].valid

    return Found(offline, server, largest(valid, BEYOND * offline[1].said.per_s, steps))


def long_enough(ask: Callable[[float], Trial], per_s: float) -> Trial:
    """A run of enough samples to last for the seconds, beginning with what is known of how fast the system is."""
    for _ in range(TRIES):
        found = ask(EXPECTED * per_s)
        if TOO_SHORT not in found.said.unmet:
            break
        per_s = found.said.per_s
    return found


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    strategies: Annotated[list[str], typer.Option(help=f"any of {', '.join(STRATEGIES)}")] = list(STRATEGIES),  # noqa: B006 - typer copies it
    placement: Annotated[str, typer.Option(help=f"one of {', '.join(SHIPPED)}")] = "colocated",
    seconds: Annotated[float, typer.Option(help="that each run takes at least; MLPerf: 600")] = 30.0,
    bound_ms: Annotated[float, typer.Option(help="that p99 must stay within in Server")] = 100.0,
    steps: Annotated[int, typer.Option(help="rates of Server that are tried")] = 6,
    kept: Annotated[bool, typer.Option(help="engines keep states and prompts of users, as shipped")] = True,
    port: Annotated[int, typer.Option()] = 8031,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/loadgen_cpu_DATE.md")] = None,
) -> None:
    """Measure, print and file."""
    if strangers := set(strategies) - set(STRATEGIES):
        raise typer.BadParameter(f"no strategy {', '.join(sorted(strangers))}; choose from {', '.join(STRATEGIES)}")
    if placement not in SHIPPED:
        raise typer.BadParameter(f"no placement {placement}; choose from {', '.join(SHIPPED)}")
    try:
        library()
    except NoLoadGen as error:
        raise SystemExit(str(error)) from None
    load, found = os.getloadavg()[0], dict[str, Found]()
    changes = GENERATOR if kept else merged(GENERATOR, NOTHING_KEPT)
    for strategy in strategies:
        asked = bodies(model_dir, users=USERS, strategy=strategy, cache="bypass")
        with genrec(model_dir, port, profile="fast", placement=placement, changes=changes) as url:
            found[strategy] = measure(url, asked, seconds=seconds, bound_ms=bound_ms, steps=steps)
    packages = ("mlcommons-loadgen", "ray", "torch", "onnxruntime")
    machine = Machine.now("benchmarks.loadgen", packages, load)
    page = report(found, machine, placement=placement, seconds=seconds, bound_ms=bound_ms, kept=kept)
    (out or dated("loadgen_cpu", "md")).write_text(page)
    print(page)


def report(found: Mapping[str, Found], machine: Machine, *, placement: str, seconds: float, bound_ms: float, kept: bool) -> str:
    """As Markdown."""
    columns = ["strategy", *(f"Offline, {_sent(size)}: samples/s" for size in OPEN), f"Server, p99 <= {bound_ms:g} ms: samples/s"]
    heads = [
        [name, *(f"{one.offline[size].said.per_s:.1f}" for size in OPEN), f"{one.largest:.1f}" if one.largest else "none"]
        for name, one in found.items()
    ]
    memory = "keep states and prompts of users as shipped, which its rules forbid" if kept else "keep nothing of users"
    return "\n".join(
        [
            "# MLPerf LoadGen's Offline and Server scenarios over the endpoint",
            "",
            f"No official MLPerf result: each run takes {seconds:g} s at least where MLPerf asks for 600, model and data are none of its",
            f"benchmarks', and engines {memory}. {placement.capitalize()}, fast profile; no answer comes out of a cache.",
            f"Samples are requests for 10 items of {USERS} users with 3 to 19 events. LoadGen runs on the same machine.",
            "",
            *table(columns, heads),
            "",
            *(line for name, one in found.items() for line in _runs(name, one)),
            *machine.lines(),
        ]
    )


def _runs(strategy: str, found: Found) -> list[str]:
    rows = [["Offline", _sent(size), "", f"{one.said.per_s:.1f}", "", "", one.verdict()] for size, one in found.offline.items()]
    for one in found.server:
        latencies = [f"{one.said.percentiles_ms[percentile]:.1f}" for percentile in (50.0, 99.0)]
        rows.append(["Server", _sent(1), f"{one.rate:.1f}", f"{one.said.per_s:.1f}", *latencies, one.verdict()])
    return [
        f"## {strategy.capitalize()}",
        "",
        *table(["scenario", "sent as", "asked (samples/s)", "completed (samples/s)", "p50 (ms)", "p99 (ms)", "LoadGen says"], rows),
        "",
    ]


def _sent(size: int) -> str:
    return "single requests" if size == 1 else f"batches of {size}"


if __name__ == "__main__":
    typer.run(main)
