"""What does memory that is used again save? Pools and batches of like length against fresh arrays and first come, in one run.

    python -m benchmarks.buffers [--data PATH] [--rounds 300]

Each case is the code that serves, in turns within every round with a BufferPool and with FreshMemory in its place, which makes an array
of exactly the size at each call. The sizes are those of the model b of benchmarks.models. The engines are left out: what they would
answer lies ready. Batches are of users whose lengths are those of a data set's, or else geometric. Each case has a process of its own,
in whose one engine thread it runs, as in deployments/replicas/stage_model.py, so that no case finds the heap that another has left. All is
measured twice: glibc as it comes raises the size from which it maps memory, up to 32 MiB, and so keeps most of what is freed; and with
that size fixed where it begins, at 128 KiB, so that larger arrays come from the system each time.

Times are the thread's processor time, faults and `munmap` of what a call gives up included; page faults are the minor ones of this
thread (getrusage). Allocations are counted (benchmarks/allocations.py) in rounds of their own, in which nothing is timed.
Writes benchmarks/results/buffers_cpu_DATE.md, .json and .png.
"""
# ruff: noqa: SLF001 - it times the parts behind an engine's interface

import json
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from benchmarks.allocations import CACHED_BELOW, AllocationCounter
from benchmarks.models import MODELS
from benchmarks.padding import BATCHING_COLUMNS, LIMITS, WAITING, Padding, batches, batching_row, chosen_alike, mix_of, padded
from benchmarks.reporting import Machine, dated, table
from benchmarks.sampling import ROWS, TOP_K, TOP_P, VOCABULARIES, intermediate
from benchmarks.turns import Contender, FreshMemory, Turn, run_in_turns
from cluster.engines.buffers import BufferPool
from cluster.ranking import RankRequest, Task
from cluster.values import EncodeRequest, Int64Array, SamplingOptions
from cluster.window import Window
from integrations.hstu.append_inputs import AppendInputs, AppendRequest, groups
from integrations.hstu.config import HSTUConfig, RankerConfig
from integrations.hstu.engine_batch import engine_batch
from integrations.hstu.model_parameter_calculator import model_size
from integrations.hstu.ranking_engine import MICRO_BATCH, RankingEngine, _Events
from integrations.hstu.state.rows import identities
from integrations.hstu.state.store import Held, Owner, Rows, StateStore
from integrations.hstu.state_options import StateOptions, make_store
from integrations.hstu.user_behavior_schema import BehaviourBatch
from integrations.torch_beam.sampling import RandomStream, Sampler
from tests.bundles import random_sequence

MODEL = {**MODELS["b"], "max_length": MODELS["b"]["max_history"] + 11}
HISTORY, ITEMS = MODEL["max_history"], MODEL["items"]
KEPT_USERS, FULL_USERS = 128, 4
STATE_BYTES = 512 << 20
POOL, FRESH = "pool", "fresh arrays"
AS_IT_COMES = "glibc as it comes"
ALLOCATORS: Mapping[str, Mapping[str, str]] = {
    AS_IT_COMES: {},
    "glibc, 128 KiB and more from the system each time": {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)},
}
MEMORIES: dict[str, type[BufferPool]] = {POOL: BufferPool, FRESH: FreshMemory}


@dataclass(frozen=True)
class Case:
    """Contenders for the same work, which repeats itself after `period` rounds."""

    name: str
    contenders: list[Contender]
    period: int = 1
    per: str = "request"


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one contender, per request but for the pool's: these are of all its calls."""

    case: str
    memory: str
    p50_us: float
    allocations: float
    """Of `CACHED_BELOW` bytes and more."""
    small_allocations: float
    allocated_bytes: float
    page_faults: float
    pool_hits: int | None
    pool_misses: int | None
    pool_peak_bytes: int | None


def main(
    data: Annotated[
        Path | None, typer.Option(envvar="GENREC_TEST_DATA", help="MovieLens-100K or -1M, whose lengths are taken; default: geometric")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each contender, after one pass over all its batches")] = 300,
) -> None:
    """Measure, print and file."""
    load_before = os.getloadavg()[0]
    mix, lengths = mix_of(data, HISTORY)
    memory = {
        allocator: [figures for case in CASES for figures in in_own_process(case, lengths, rounds, environment)]
        for allocator, environment in ALLOCATORS.items()
    }
    padding = [one for waiting in WAITING for one in padded(lengths, waiting, rounds)]
    run = Run(mix, rounds, memory, padding, Machine.now("benchmarks.buffers", ("numpy", "torch", "numba"), load_before))
    picture = dated("buffers_cpu", "png")
    plot(memory[AS_IT_COMES], picture)
    text = "\n".join(run.report(picture.name))
    dated("buffers_cpu", "md").write_text(text)
    dated("buffers_cpu", "json").write_text(json.dumps(asdict(run), indent=2) + "\n")
    print(text)


def in_own_process(case: str, lengths: Sequence[int], rounds: int, environment: Mapping[str, str]) -> "list[Figures]":
    os.environ.update(environment)  # glibc reads it as a process begins
    try:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            return pool.apply(_in_engine_thread, (case, lengths, rounds))
    finally:
        for name in environment:
            del os.environ[name]


def _in_engine_thread(case: str, lengths: Sequence[int], rounds: int) -> "list[Figures]":
    torch.set_num_threads(1)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: list(measured(CASES[case](lengths), rounds))).result()


def asked(user: int, length: int) -> EncodeRequest:
    return EncodeRequest(random_sequence(length, items=ITEMS, seed=user), 10, user_id=str(user))


def assembly(lengths: Sequence[int]) -> Case:
    """Requests -> BehaviourBatch."""
    lists = in_batches(lengths, WAITING[-1])

    def into(pool: BufferPool | None) -> Turn:
        return lambda number: len(engine_batch(lists[number % len(lists)], Window.of(HISTORY), ITEMS, pool))

    contenders = [Contender(name, into(memory), memory) for name, memory in made()]
    return Case("batch assembly", [*contenders, Contender("a pool a call", into(None))], len(lists))


def in_batches(lengths: Sequence[int], waiting: int) -> list[list[EncodeRequest]]:
    requests = [asked(user, length) for user, length in enumerate(lengths)]
    return [[requests[user] for user in batch] for batch in batches(lengths, chosen_alike, waiting)]


def made() -> Iterator[tuple[str, BufferPool]]:
    return ((name, memory()) for name, memory in MEMORIES.items())


def append_inputs(name: str, lists: Sequence[Sequence[EncodeRequest]]) -> Case:
    """Users of whom all but the last event is kept -> inputs of the append."""
    config = HSTUConfig.model_validate(MODEL)
    store = make_store(config, StateOptions(bytes=STATE_BYTES), with_states=False)
    row_bytes = model_size(config).kv_bytes_per_event
    given = []
    for requests in lists:
        batch = engine_batch(requests, Window.of(HISTORY), ITEMS)
        users = [append_request(store, config, index, request, batch) for index, request in enumerate(requests)]
        given += [(group, batch) for group in groups(users, row_bytes)]

    def into(pool: BufferPool) -> Turn:
        inputs = AppendInputs(config, pool)
        return lambda number: len(inputs.of(*given[number % len(given)])["lengths"])

    return Case(name, [Contender(name, into(memory), memory) for name, memory in made()], len(given))


def append_request(store: StateStore, config: HSTUConfig, index: int, request: EncodeRequest, batch: BehaviourBatch) -> AppendRequest:
    length = int(batch.lengths[index])
    rows = identities(batch.items[index, :length], batch.times[index, :length])
    return AppendRequest(index, kept(store, config, Owner("benchmark", request.user_id), rows, len(rows) - 1), rows, length)


def kept(store: StateStore, config: HSTUConfig, owner: Owner, rows: Int64Array, count: int) -> Held:
    """The first `count` rows of this history, which are random numbers."""
    with store.matched(owner, rows) as held:
        store.commit(held, rows[:count], 0, random_rows(config, count))
    held = store.match(owner, rows)
    assert held.rows == count, (held.rows, count)
    return held


def random_rows(config: HSTUConfig, count: int) -> Rows:
    rng = np.random.default_rng(count)
    per_head = config.layers, config.heads
    return {
        "kt": rng.random((*per_head, config.attention_dim, count), np.float32),
        "v": rng.random((*per_head, count, config.linear_dim), np.float32),
    }


def ranking(name: str, new: int) -> Case:
    """A user's events, of whom the last `new` are not kept -> K and V of all; what the engine would answer for the new lies ready."""
    config = RankerConfig.model_validate({**MODEL, "tasks": (Task.CLICK,)})
    store, computed = make_store(config, StateOptions(bytes=STATE_BYTES), with_states=False), random_rows(config, new)
    users = []
    for user in range(FULL_USERS):
        events = _Events(RankRequest(asked(user, HISTORY).sequence, np.ones(1, np.int32), str(user)), config)
        users.append((events, kept(store, config, Owner("benchmark", str(user)), events.identities, len(events) - new)))

    def into(pool: BufferPool) -> Turn:
        functions = (lambda _: (computed["kt"], computed["v"])), (lambda _: np.empty((0, 1), np.float32))
        engine = RankingEngine(functions, config, None, pool, MICRO_BATCH)

        def turn(number: int) -> int:
            events, held = users[number % len(users)]
            engine._computed(events, held.rows, held)
            return 1

        return turn

    return Case(name, [Contender(name, into(memory), memory) for name, memory in made()], len(users))


def sampling(vocabulary: int) -> Case:
    """One token for each of the rows, as benchmarks.sampling has them."""
    logits, options = intermediate(vocabulary), [SamplingOptions(top_k=TOP_K, top_p=TOP_P)] * ROWS

    def into(pool: BufferPool) -> Turn:
        sampler, streams = Sampler(), [RandomStream(seed) for seed in range(ROWS)]
        sampler.buffers = pool

        def turn(_: int) -> int:
            sampler.draw(logits, options, streams)
            return 1

        return turn

    contenders = [Contender(name, into(memory), memory) for name, memory in made()]
    return Case(f"sampler, {ROWS} tokens of {vocabulary:,}", contenders, per="token batch")


CASES: Mapping[str, Callable[[Sequence[int]], Case]] = {
    "assembly": assembly,
    "append, batches": lambda lengths: append_inputs("kept rows of a batch", in_batches(lengths[:KEPT_USERS], WAITING[0])),
    "append, one user": lambda _: append_inputs("kept rows of a user", [[asked(user, HISTORY)] for user in range(FULL_USERS)]),
    "ranking, none new": lambda _: ranking("ranking, no event new", new=0),
    "ranking, one new": lambda _: ranking("ranking, one event new", new=1),
    "sampling, codebook": lambda _: sampling(VOCABULARIES["codebook"]),
    "sampling, 32k": lambda _: sampling(VOCABULARIES["32k"]),
}


def measured(case: Case, rounds: int) -> Iterator[Figures]:
    """One pass over everything to warm up, the rounds that count, each begun by another contender, and the rounds that are counted in."""
    counter = AllocationCounter()
    counter.check()
    run_in_turns(case.contenders, case.period + 2)
    for contender in case.contenders:
        contender.forget()
    run_in_turns(case.contenders, rounds)
    for contender in case.contenders:
        with counter.counting() as sizes:
            requests = sum(contender.turn(number) for number in range(case.period))
        yield figures_of(case, contender, np.array(sizes, np.int64), requests)


def figures_of(case: Case, contender: Contender, sizes: Int64Array, requests: int) -> Figures:
    large = int((sizes >= CACHED_BELOW).sum())
    pool = contender.memory.statistics() if contender.name == POOL else {}
    hits, misses, peak = (int(pool[f"buffer_{name}"]) if pool else None for name in ("hits", "misses", "peak_bytes"))
    return Figures(
        case=f"{case.name}, per {case.per}",
        memory=contender.name,
        p50_us=float(np.median(contender.us)),
        allocations=large / requests,
        small_allocations=(len(sizes) - large) / requests,
        allocated_bytes=int(sizes.sum()) / requests,
        page_faults=contender.faults / contender.requests,
        pool_hits=hits,
        pool_misses=misses,
        pool_peak_bytes=peak,
    )


def plot(found: Sequence[Figures], to: Path) -> None:
    """Allocations and KiB per request with fresh arrays and with the pool, a pair of bars a case."""
    import matplotlib as mpl  # noqa: PLC0415 - the tables need none

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    names = list(dict.fromkeys(one.case for one in found))
    figure, (counts, kib) = plt.subplots(1, 2, figsize=(13, 0.5 * len(names) + 1.5), sharey=True, layout="constrained")
    for memory, offset in ((FRESH, -0.2), (POOL, 0.2)):
        mine = [one for one in found if one.memory == memory]
        places = np.arange(len(mine)) + offset
        for axis, values in ((counts, [one.allocations for one in mine]), (kib, [one.allocated_bytes / 1024 for one in mine])):
            bars = axis.barh(places, values, 0.4, label=memory)
            axis.bar_label(bars, [f"{one:,.1f}" for one in values], fontsize=7, padding=2)
    counts.set_yticks(np.arange(len(names)), names)
    counts.invert_yaxis()
    counts.set_title("allocations of 1 KiB and more")
    kib.set_title("KiB allocated")
    kib.set_xscale("symlog")
    kib.margins(x=0.15)
    kib.legend(fontsize=8)
    figure.savefig(to, dpi=90)
    plt.close(figure)


@dataclass(frozen=True, slots=True)
class Run:
    """All that was measured; `memory` by allocator."""

    lengths: str
    rounds: int
    memory: Mapping[str, Sequence[Figures]]
    padding: Sequence[Padding]
    machine: Machine

    def report(self, picture: str) -> list[str]:
        sizes = ", ".join(f"{name} {value}" for name, value in MODEL.items())
        return [
            "# Memory that is used again, and batches of like length",
            "",
            f"Model b of benchmarks.ranking: {sizes}.",
            f"Lengths: {self.lengths}.",
            f"Times: medians of {self.rounds} rounds, in which the contenders take turns, of one thread's processor time; else means.",
            "Engines are left out, and what they allocate: fresh arrays find the heap as they left it. Fresh arrays: the same code with",
            "np.zeros and np.empty in the pool's place; a pool a call: `engine_batch` where it is given none.",
            "",
            *self.machine.lines(),
            *(line for allocator, figures in self.memory.items() for line in memory_section(allocator, figures)),
            f"Allocations: numpy's, of arrays' data, counted one by one; those below {CACHED_BELOW:,} bytes (small) it serves from a",
            "cache of its own. KiB: of both. Hits and misses of the pool from its first call on, all else once it is warm.",
            f"Kept rows of a batch: {KEPT_USERS} users of the mix, in batches of those alike, all but the last event kept; of a user and",
            f"ranking: one of {FULL_USERS} users at a time, whose window is full.",
            "",
            f"![allocations per request, {AS_IT_COMES}]({picture})",
            "",
            "## Batching",
            "",
            *table(BATCHING_COLUMNS, map(batching_row, self.padding)),
            "",
            f"All users of the mix once, in random order, while `waiting` of them wait; at most {LIMITS.max_requests} requests and",
            f"{LIMITS.max_tokens:,} padded rows a batch. Padding: its share of all rows that an engine is given.",
            "",
        ]


def memory_section(allocator: str, figures: Sequence[Figures]) -> list[str]:
    return [f"## Memory: {allocator}", "", *table(MEMORY_COLUMNS, map(memory_row, figures)), ""]


MEMORY_COLUMNS = (
    *("", "memory", "p50 (us)", "allocations", "small ones", "KiB", "page faults"),
    *("pool hits", "pool misses", "pool peak (MiB)"),
)


def memory_row(one: Figures) -> list[str]:
    cells = [f"{one.p50_us:.1f}", f"{one.allocations:.2f}", f"{one.small_allocations:.1f}", f"{one.allocated_bytes / 1024:,.1f}"]
    pool = ["-"] * 3
    if one.pool_peak_bytes is not None:
        pool = [f"{one.pool_hits:,}", f"{one.pool_misses}", f"{one.pool_peak_bytes / 2**20:.2f}"]
    return [one.case, one.memory, *cells, f"{one.page_faults:.2f}", *pool]


if __name__ == "__main__":
    typer.run(main)
