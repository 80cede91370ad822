"""How fast tokens are drawn on a CPU: `OMP_NUM_THREADS=1 python -m benchmarks.sampling [--repeats 25]`.

Seeded logits of 32 rows: flat (all equal), intermediate (normal, standard deviation 3), peaked (one token has .99), at two vocabularies of
language models and at one of a semantic-ID codebook. Each is drawn from by a full sort (torch.sort, softmax, cumsum, multinomial, for
the whole batch at once), by torch.topk in its place where top_k is set, by the sampler, and by the sampler's own fallback. All take turns
within a repeat, on one thread, and what is measured is that thread's processor time, so that waiting for a busy processor does not
count. After three repeats to warm up, the medians are printed and written to benchmarks/results/sampling_cpu_DATE.md.
"""

import argparse
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.reporting import processor
from cluster.values import SamplingOptions
from integrations.torch_beam.sampling import RandomStream, Sampler

ROWS, TOP_P, TOP_K = 32, 0.9, 50
VOCABULARIES = {"codebook": 256, "32k": 32_000, "150k": 150_000}
WARM_UP = 3
Timed = dict[str, list[float]]


def main() -> None:
    arguments = argparse.ArgumentParser(description="Measure how fast tokens are drawn on a CPU.")
    arguments.add_argument("--repeats", type=int, default=25)
    repeats = arguments.parse_args().repeats
    torch.set_num_threads(1)
    load_before = os.getloadavg()
    lines = [line for name, vocabulary in VOCABULARIES.items() for shape in SHAPES for line in measure(name, vocabulary, shape, repeats)]
    text = report(lines, repeats, load_before)
    target = Path(__file__).parent / "results" / f"sampling_cpu_{datetime.now(UTC):%Y-%m-%d}.md"
    target.write_text(text)
    print(text)


def flat(vocabulary: int) -> Tensor:
    return torch.zeros(ROWS, vocabulary)


def intermediate(vocabulary: int) -> Tensor:
    return torch.randn(ROWS, vocabulary, generator=torch.Generator().manual_seed(0)) * 3


def peaked(vocabulary: int) -> Tensor:
    """One token, another in each row, with .99 of the mass; the rest share .01 unevenly."""
    rest: Tensor = intermediate(vocabulary)
    rest[torch.arange(ROWS), torch.arange(ROWS)] = -torch.inf
    rest = rest.log_softmax(dim=1) + math.log(0.01)
    rest[torch.arange(ROWS), torch.arange(ROWS)] = math.log(0.99)
    return rest


SHAPES: dict[str, Callable[[int], Tensor]] = {"flat": flat, "intermediate": intermediate, "peaked": peaked}


def measure(name: str, vocabulary: int, shape: str, repeats: int) -> list[str]:
    """Lines of the table: top_p alone, and the top_k before it."""
    logits = SHAPES[shape](vocabulary)
    return [line(f"{name} ({vocabulary:,})", shape, logits, top_k, repeats) for top_k in (0, TOP_K)]


def line(vocabulary: str, shape: str, logits: Tensor, top_k: int, repeats: int) -> str:
    options = [SamplingOptions(top_k=top_k, top_p=TOP_P)] * ROWS
    streams = [RandomStream(seed) for seed in range(ROWS)]
    ours, fallback = Sampler(), Sampler(pivot=False)
    ways: dict[str, Callable[[], object]] = {
        "sort": lambda: draw_from(*logits.sort(dim=1, descending=True), top_k or logits.shape[1]),
        "topk": (lambda: draw_from(*logits.topk(top_k), top_k)) if top_k else lambda: None,
        "ours": lambda: ours.draw(logits, options, streams),
        "fallback": lambda: fallback.draw(logits, options, streams),
    }
    ms = medians_ms(ways, repeats)
    path = ", ".join(sorted(ours.paths))
    cuts = f"top_k {top_k}, top_p {TOP_P}" if top_k else f"top_p {TOP_P}"
    times, topk = f"{ms['sort'] / ms['ours']:.1f}", "-"
    if top_k:
        times, topk = f"{times}, {ms['topk'] / ms['ours']:.1f}", f"{ms['topk']:.2f}"
    drawn = f"{topk} | {ms['ours']:.2f} ({path}) | {ms['fallback']:.2f}"
    return f"| {vocabulary} | {shape} | {cuts} | {ms['sort']:.2f} | {drawn} | {times} | {fastest(ms, top_k)} |"


def fastest(ms: dict[str, float], top_k: int) -> str:
    """By name; within a tenth of each other counts as even."""
    names = {"sort": "full sort", "topk": "torch.topk", "ours": "sampler"}
    took = {name: ms[way] for way, name in names.items() if top_k or way != "topk"}
    return ", ".join(name for name, one in took.items() if one <= 1.1 * min(took.values()))


def draw_from(ranked_BV: Tensor, order_BV: Tensor, top_k: int) -> Tensor:
    """The baselines' second half: one set of options for the batch, one generator, tokens only."""
    probabilities_BV = ranked_BV[:, :top_k].softmax(dim=1)
    before_BV = probabilities_BV.cumsum(dim=1) - probabilities_BV
    probabilities_BV[before_BV >= TOP_P] = 0
    return order_BV.gather(1, probabilities_BV.multinomial(1)).squeeze(1)


def medians_ms(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    timed: Timed = {name: [] for name in ways}
    for _ in range(WARM_UP + repeats):
        for name, way in ways.items():
            began = time.thread_time()
            way()
            timed[name].append(1000 * (time.thread_time() - began))
    return {name: statistics.median(values[WARM_UP:]) for name, values in timed.items()}


def report(lines: list[str], repeats: int, load_before: tuple[float, float, float]) -> str:
    load = " to ".join(f"{one:.1f}" for one in (load_before[0], os.getloadavg()[0]))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "numba", "numpy"))
    return f"""# Drawing {ROWS} tokens on a CPU

| vocabulary | logits | cuts | full sort | torch.topk | sampler (path) | without numba | sort, topk / sampler | fastest |
|---|---|---|---|---|---|---|---|---|
{chr(10).join(lines)}

Milliseconds of processor time of one thread; medians of {repeats} calls a way, in turns, after {WARM_UP} to warm up. Full sort: torch.sort,
softmax, cumsum, multinomial for the batch at once, with one set of options and one generator for all rows, and tokens only; torch.topk: the
same with torch.topk. The sampler's rows each have their own options and random stream, and come with their log-probabilities; without numba
it sorts as well, stably, and sums in whole numbers. Fastest: within a tenth of each other counts as even.

The machine was shared with other work (load average {load} on {os.cpu_count()} CPUs), which processor time leaves out but for the caches
that were shared: compare the columns, not the milliseconds.

{processor()}, {os.cpu_count()} virtual CPUs, {platform.system()}; Python {platform.python_version()}, {versions}.

Command: `OMP_NUM_THREADS=1 python -m benchmarks.sampling --repeats {repeats}`
"""


if __name__ == "__main__":
    main()
