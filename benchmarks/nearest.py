"""How long does it take to find the 100 nearest items of a large catalogue? Every index that is installed, side by side in one run:

    OMP_NUM_THREADS=1 python -m benchmarks.nearest [--rounds 15]

Seeded catalogues of three sizes, with vectors that are random (the hardest to tell apart by direction) or lie in groups of 200 around
random centres; states are items, moved by as much as items of a group differ. The indexes take turns within a round, for 1 and for 32 users
at a time; after two rounds to warm up, medians, with one thread of its processor time, so that waiting for a busy processor does not
count. Recall: the share of the answers' items that are among the true 100, found in fp64. Then where `auto` should change over: exact, bf16
and, where there is a GPU, cuda at growing sizes.
Writes benchmarks/results/nearest_cpu_DATE.md, or nearest_cuda_DATE.md.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from benchmarks.devices import described
from benchmarks.reporting import processor
from cluster.nearest import NearestItems, index_availability, make_index
from cluster.registry import INDEXES
from cluster.values import FloatArray

THREADS = os.environ.get("OMP_NUM_THREADS", "")
now = time.thread_time if THREADS == "1" else time.perf_counter
SIZES = ((100_000, 64), (100_000, 256), (1_000_000, 64))
CHANGE_OVER = (3_000, 5_000, 7_000, 10_000, 20_000, 30_000, 50_000, 75_000, 100_000)
CHANGE_TO = ("exact", "bf16", "cuda")
USERS, TOP_N, WARM_UP, GROUP = (1, 32), 100, 2, 200
SPREAD = 0.5
"""How far the items of a group are from its centre, whose length is 1."""


def main(
    rounds: Annotated[int, typer.Option(help="turns of each index that count")] = 15,
    output: Annotated[Path | None, typer.Option(help="default: a file in benchmarks/results")] = None,
) -> None:
    """Measure, print and file."""
    load_before = os.getloadavg()[0]
    names = [name for name in INDEXES if index_availability(name).ok]
    lines = [line for size in SIZES for kind in CATALOGUES for line in measured(*size, kind, names, rounds)]
    change_over = [change_over_line(items, 64, changing(names), rounds) for items in CHANGE_OVER]
    device = "cuda" if "cuda" in names else "cpu"
    target = output or Path(__file__).parent / "results" / f"nearest_{device}_{datetime.now(UTC):%Y-%m-%d}.md"
    target.write_text(report(lines, change_over, names, rounds, load_before))
    print(target.read_text())


def measured(items: int, dim: int, kind: str, names: Sequence[str], rounds: int) -> Iterator[str]:
    """A line for each number of users: every index's milliseconds, then its recall."""
    vectors, states = CATALOGUES[kind](items, dim)
    indexes = {name: make_index(name, vectors) for name in names}
    truth = [set(best(vectors, state).tolist()) for state in states]
    for users in USERS:
        asked, counts = states[:users], [TOP_N] * users
        ms = medians_ms({name: calls(index, asked, counts) for name, index in indexes.items()}, rounds)
        recall = {name: recall_of(index, states[: USERS[-1]], truth) for name, index in indexes.items()}
        figures = [f"{ms[name]:.2f}" for name in names] + [f"{recall[name]:.3f}" for name in names]
        yield f"| {items:,} x {dim} {kind} | {users} | {' | '.join(figures)} |"


def random_catalogue(items: int, dim: int) -> tuple[FloatArray, FloatArray]:
    rng = np.random.default_rng(0)
    vectors = unit(rng.standard_normal((items + 1, dim), np.float32))
    return padded(vectors), unit(rng.standard_normal((USERS[-1], dim), np.float32))


def grouped_catalogue(items: int, dim: int) -> tuple[FloatArray, FloatArray]:
    rng = np.random.default_rng(0)
    centres = np.repeat(unit(rng.standard_normal((items // GROUP + 1, dim), np.float32)), GROUP, axis=0)[: items + 1]
    vectors = unit(centres + SPREAD / dim**0.5 * rng.standard_normal(centres.shape, np.float32))
    chosen = vectors[1 + rng.choice(items, USERS[-1], replace=False)]
    return padded(vectors), unit(chosen + SPREAD / dim**0.5 * rng.standard_normal(chosen.shape, np.float32))


CATALOGUES: Mapping[str, Callable[[int, int], tuple[FloatArray, FloatArray]]] = {"random": random_catalogue, "grouped": grouped_catalogue}


def unit(vectors: FloatArray) -> FloatArray:
    lengths: FloatArray = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / lengths


def padded(vectors: FloatArray) -> FloatArray:
    """With row 0 for padding."""
    vectors[0] = 0
    return vectors


def best(vectors: FloatArray, state: FloatArray) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """The true nearest items: an fp32 scan finds ten times as many, fp64 orders them."""
    near = np.argpartition(-(vectors[1:] @ state), 10 * TOP_N)[: 10 * TOP_N] + 1
    return near[np.argsort(-(vectors[near].astype(np.float64) @ state), kind="stable")[:TOP_N]]


def recall_of(index: NearestItems, states: FloatArray, truth: Sequence[set[int]]) -> float:
    answers = index.search(states, [TOP_N] * len(states))
    return float(np.mean([len(right & set(answer.items.tolist())) / TOP_N for answer, right in zip(answers, truth, strict=True)]))


def calls(index: NearestItems, states: FloatArray, counts: Sequence[int]) -> Callable[[], object]:
    return lambda: index.search(states, counts)


def medians_ms(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    timed: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_UP + rounds):
        for name, way in ways.items():
            began = now()
            way()
            timed[name].append(1e3 * (now() - began))
    return {name: statistics.median(values[WARM_UP:]) for name, values in timed.items()}


def change_over_line(items: int, dim: int, names: Sequence[str], rounds: int) -> str:
    vectors, states = random_catalogue(items, dim)
    indexes = [make_index(name, vectors) for name in names]
    ways = {f"{place} {users}": calls(index, states[:users], [TOP_N] * users) for place, index in enumerate(indexes) for users in USERS}
    return f"| {items:,} x {dim} | {' | '.join(f'{ms:.3f}' for ms in medians_ms(ways, 3 * rounds).values())} |"


def changing(names: Sequence[str]) -> list[str]:
    """Those of the indexes that `auto` chooses from."""
    return [name for name in CHANGE_TO if name in names]


def report(lines: Sequence[str], change_over: Sequence[str], names: Sequence[str], rounds: int, load_before: float) -> str:
    columns = [f"{name} ms" for name in names] + [f"{name} recall" for name in names]
    packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "torch", *(["faiss-cpu"] if "faiss" in names else [])))
    clock = "processor time of the one thread" if now is time.thread_time else "elapsed time"
    command = f"{f'OMP_NUM_THREADS={THREADS} ' if THREADS else ''}python -m benchmarks.nearest --rounds {rounds}"
    return f"""# The {TOP_N} nearest items of a large catalogue

| items | users | {" | ".join(columns)} |
|---|---|{"---|" * len(columns)}
{chr(10).join(lines)}

Medians of {rounds} calls of each index, in turns, {clock}. Recall@{TOP_N} against fp64, of {USERS[-1]} users.
Random: directions drawn evenly. Grouped: {GROUP} items about {SPREAD} away from each of many centres, and states as far from an item.

## Where `auto` changes over, random

| items | {" | ".join(f"{name} ms, users: {users}" for name in changing(names) for users in USERS)} |
|---|{"---|" * len(changing(names)) * len(USERS)}
{chr(10).join(change_over)}

{processor()}, {os.cpu_count()} virtual CPUs, threads {THREADS or "all"}{f"; {described()}" if "cuda" in names else ""};
load average before the run {load_before:.1f}, after it {os.getloadavg()[0]:.1f}.
Python {platform.python_version()}, {packages}.

Command: `{command}`
"""


if __name__ == "__main__":
    typer.run(main)
