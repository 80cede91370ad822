"""genrec in its placements and profiles beside two naive servers of the same model: requests/s at equal p99, and what one request costs.

    python -m benchmarks.serving                                                  # with the demo's model (run `make demo ONCE=1` before)
    python -m benchmarks.serving --systems colocated-fast --systems naive-chain --rounds 1
    python -m benchmarks.serving --events 200                                     # longer histories than the 3 to 19 events of the others

Every round starts one system after the other, warms it up and measures: p50 of one caller, and what of it no stage accounts for (the
overhead); what 16 callers get who never wait; and the largest rate of Poisson arrivals whose p99 stays below a bound, found by halving.
Requests are retrievals for histories of the catalogue's items, none out of a cache, and genrec keeps no states of users: it encodes each
history whole, as the naive servers do. The figures are medians over rounds.
Writes benchmarks/results/serving_cpu_DATE.md.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from benchmarks.load import Phase, Plan, run
from benchmarks.load_bodies import bodies
from benchmarks.reporting import Machine, dated
from cluster.config_file import read_document
from cluster.profile import ProfileName, free_block, of_one_machine
from cluster.traffic.api_keys import digest, new_key
from deployments.cli.local_serve import LocalServe, is_ready

ROOT = Path(__file__).resolve().parents[1]
SHIPPED = {"split": ROOT / "ray_config.yaml", "colocated": ROOT / "cluster" / "launch" / "one_machine.yaml"}
CLIENTS = 16
WARM_UP_S, ALONE_S, CLOSED_S, STEP_S = 5.0, 5.0, 6.0, 6.0
STEPS, BEYOND = 6, 1.2
"""Rates that are tried, all below so many times what callers get that never wait."""
READY_WITHIN_S = 240.0
KEY = new_key()
"""genrec's systems know no other; the naive ones look for none."""
HEADERS = {"authorization": f"Bearer {KEY}"}


@dataclass(frozen=True)
class Figures:
    """Of one system in one round: milliseconds, and requests/s."""

    p50_alone_ms: float
    overhead_ms: float
    closed_per_s: float
    closed_p99_ms: float
    sustained_per_s: float


@contextmanager
def genrec(
    model_dir: Path, port: int, *, profile: ProfileName, placement: str, changes: Mapping[str, Any] = MappingProxyType({}), key: str = ""
) -> Iterator[str]:
    """As shipped but for `changes`, on this machine. `key`: of an operator, the only one that is taken; by default none is needed."""
    log = Path(f".genrec/serving-{placement}-{profile}.log")
    keys = [{"name": "benchmark", "sha256": digest(key.encode()), "rights": ["read", "operate"]}] if key else []
    changed = {"model_dir": str(model_dir), "gateway": {"api_keys": keys}}
    with served(SHIPPED[placement], merged(changed, changes), port, profile=profile, log=log, key=key) as serve:
        yield serve.url


@contextmanager
def served(config: Path, changes: Mapping[str, Any], port: int, *, profile: ProfileName, log: Path, key: str = "") -> Iterator[LocalServe]:
    """What `config` describes but for `changes`, at every depth, with an event store of its own, once all engines are loaded. `key`: of an
    operator, where keys are asked for.
    """
    shipped = read_document(config)["applications"][0]["args"]
    with tempfile.TemporaryDirectory() as directory:
        changed = merged({**shipped, "events": {"url": f"sqlite:///{directory}/events.db"}}, changes)
        serve = LocalServe(config, changed, port=port, log=log, profile=profile)
        with serve as url:
            settle(url, key)
            yield serve


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of `other` over those of `one`, at every depth."""
    both = {key: merged(one[key], value) if isinstance(value, Mapping) and key in one else value for key, value in other.items()}
    return {**one, **both}


def settle(url: str, key: str = "") -> None:
    """Returns when every engine that can be is loaded: until then one of them may take a core away from the others."""
    deadline, headers = time.monotonic() + READY_WITHIN_S, {"authorization": f"Bearer {key}"} if key else {}
    while waiting := [
        f"{backend['name']}: {'; '.join(backend['reasons'])}"
        for stage in httpx.get(f"{url}/v1/backends", headers=headers, timeout=60).json()["stages"]
        for backend in stage["backends"]
        if backend["rank"] is not None and backend["available_on"] and backend["reasons"]
    ]:
        if time.monotonic() > deadline:
            raise SystemExit(f"not all engines were loaded: {waiting}")
        time.sleep(1)


@contextmanager
def naive(model_dir: Path, port: int, *, kind: str, profile: ProfileName | None = None) -> Iterator[str]:
    """One of the naive servers, in a process of its own; those on Ray Serve at Serve's defaults, or in a profile."""
    command = [sys.executable, "-m", "benchmarks.naive_servers", kind, "--model-dir", str(model_dir), "--port", str(port)]
    log = Path(f".genrec/naive-{kind}.log")
    log.parent.mkdir(exist_ok=True)
    url = f"http://127.0.0.1:{port}"
    environment = {**(of_one_machine(free_block(), profile) if profile else {}), **os.environ}
    with log.open("wb") as output, subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=environment) as process:
        try:
            deadline = time.monotonic() + READY_WITHIN_S
            while not is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"the naive server did not start; see {log}")
                time.sleep(0.3)
            yield url
        finally:
            process.terminate()  # Ray's processes go with it


NOTHING_KEPT = {"encoder": {"options": {engine: {"state_bytes": 0} for engine in ("tensorrt", "onnxruntime", "torch")}}}
"""The naive servers encode every history whole; here users come again with the same one, of which genrec would keep all it computed."""
ALIKE: dict[str, Any] = {"changes": NOTHING_KEPT, "key": KEY}
Start = Callable[[Path, int], AbstractContextManager[str]]
SYSTEMS: dict[str, tuple[str, Start]] = {
    "naive-fastapi": ("FastAPI + PyTorch eager, one process", partial(naive, kind="fastapi")),
    "naive-chain": ("naive Ray Serve chain", partial(naive, kind="chain")),
    "split-default": ("genrec, split, default proxy", partial(genrec, profile="default", placement="split", **ALIKE)),
    "split-fast": ("genrec, split, fast profile", partial(genrec, profile="fast", placement="split", **ALIKE)),
    "colocated-default": ("genrec, colocated, default proxy", partial(genrec, profile="default", placement="colocated", **ALIKE)),
    "colocated-fast": ("genrec, colocated, fast profile", partial(genrec, profile="fast", placement="colocated", **ALIKE)),
}
BASELINE = "naive-fastapi"


def measure(url: str, asked: tuple[str, ...], bound_ms: float, seed: int) -> Figures:
    """One system's figures, once it is warm."""
    run(Plan(url, (Phase("warm-up", 0, WARM_UP_S),), asked, headers=HEADERS, clients=CLIENTS))
    alone = run(Plan(url, (Phase("alone", 0, ALONE_S),), asked, headers=HEADERS, clients=1, examine=True))
    closed = run(Plan(url, (Phase("closed", 0, CLOSED_S),), asked, headers=HEADERS, clients=CLIENTS))
    for results in (alone, closed):
        if results.failed.any() or results.rejected.any():
            raise SystemExit(f"requests failed: {results.statuses()}; see the log under .genrec")
    return Figures(
        p50_alone_ms=alone.percentile(50),
        overhead_ms=float(np.median(alone.latency * 1e3 - alone.model_ms)),
        closed_per_s=closed.throughput(),
        closed_p99_ms=closed.percentile(99),
        sustained_per_s=sustained(url, asked, closed.throughput(), bound_ms, seed),
    )


def sustained(url: str, asked: tuple[str, ...], closed_per_s: float, bound_ms: float, seed: int) -> float:
    """The largest rate tried at which every request is answered and p99 stays within the bound; 0 where none is."""
    seeds = count(seed)

    def within(rate: float) -> bool:
        plan = Plan(url, (Phase("step", rate, STEP_S),), asked, headers=HEADERS, arrivals="poisson", timeout_s=5.0, seed=next(seeds))
        results = run(plan)
        time.sleep(1.0)  # what queued is worked off
        return bool(results.ok.all()) and results.percentile(99) <= bound_ms

    return largest(within, BEYOND * closed_per_s, STEPS)


def largest(holds: Callable[[float], bool], highest: float, steps: int) -> float:
    """The largest value tried for which it holds, found by halving what lies between 0 and `highest`; 0 where it holds for none."""
    lowest = 0.0
    for _ in range(steps):
        value = (lowest + highest) / 2
        lowest, highest = (value, highest) if holds(value) else (lowest, value)
    return lowest


def main(
    *,
    systems: Annotated[list[str], typer.Option(help=f"any of {', '.join(SYSTEMS)}")] = list(SYSTEMS),  # noqa: B006 - typer copies it
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    rounds: Annotated[int, typer.Option()] = 3,
    bound_ms: Annotated[float, typer.Option(help="that p99 must stay within")] = 100.0,
    events: Annotated[int | None, typer.Option(help="of each history (default: 3 to 19)")] = None,
    port: Annotated[int, typer.Option()] = 8021,
    output: Annotated[Path | None, typer.Option(help="default: under benchmarks/results")] = None,
) -> None:
    """Measure, print and file."""
    if strangers := sorted(set(systems) - SYSTEMS.keys()):
        raise typer.BadParameter(f"no system {', '.join(strangers)}; choose from {', '.join(SYSTEMS)}")
    load, asked = os.getloadavg()[0], bodies(model_dir, events=events, strategy="retrieval", cache="bypass")
    found: dict[str, list[Figures]] = {name: [] for name in systems}
    for number in range(rounds):
        for name in systems:
            with SYSTEMS[name][1](model_dir, port) as url:
                found[name].append(measure(url, asked, bound_ms, seed=100 * number))
            print(f"round {number + 1}, {name}: {found[name][-1]}", flush=True)
    machine = Machine.now("benchmarks.serving", ("ray", "torch", "onnxruntime", "fastapi", "uvicorn"), load)
    text = report(found, rounds, bound_ms, events, machine)
    print(text)
    (output or dated("serving_cpu", "md")).write_text(text)


def report(found: dict[str, list[Figures]], rounds: int, bound_ms: float, events: int | None, machine: Machine) -> str:
    """Medians over rounds, with the least and the most of each, as Markdown."""
    base = _median(found[BASELINE], "sustained_per_s") if BASELINE in found else float("nan")
    heading = f"| | p50, 1 caller (ms) | no stage accounts for (ms) | {CLIENTS} callers: requests/s | their p99 (ms) "
    lines = [
        "# Serving, beside naive servers",
        "",
        f"Retrievals of 10 items for histories of {events or '3 to 19'} events, no caches; medians of {rounds} rounds (least to most).",
        "genrec as shipped, with its metrics and limits, and a key that every request sends, but without kept states (`state_bytes: 0`).",
        f"The driver, on the same machine, sends when a request is due. Sustained: the largest Poisson rate with p99 <= {bound_ms:g} ms.",
        "",
        f"{heading}| sustained requests/s | x FastAPI's |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in found.items():
        cells = [_cell(rows, field.name) for field in fields(Figures)]
        ratio = _median(rows, "sustained_per_s") / base if base else float("nan")
        lines.append(f"| {SYSTEMS[name][0]} | {' | '.join(cells)} | {ratio:.1f} |")
    return "\n".join([*lines, "", *machine.lines()])


def _median(rows: list[Figures], name: str) -> float:
    return float(np.median([getattr(row, name) for row in rows]))


def _cell(rows: list[Figures], name: str) -> str:
    values = [getattr(row, name) for row in rows]
    return f"{np.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    typer.run(main)
