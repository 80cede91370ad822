"""What does memory that is used again save? Pools and batches of like length against fresh arrays and first come, in one run.

    python -m benchmarks.buffers [--data PATH] [--rounds 300]

Each case is the code that serves, in turns within every round with a BufferPool and with FreshMemory in its place, which makes an array
of exactly the size at each call. The sizes are those of the model b of benchmarks.models. The engines are left out: what they would
answer lies ready. Batches are of users whose lengths are those of a data set's, or else geometric. Each case has a process of its own,
in whose one engine thread it runs, as in deployments/stage_model.py, so that no case finds the heap that another has left. All is
measured twice: glibc as it comes raises the size from which it maps memory, up to 32 MiB, and so keeps most of what is freed; and with
that size fixed where it begins, at 128 KiB, so that larger arrays come from the system each time.

Times are the thread's processor time, faults and `munmap` of what a call gives up included; page faults are the minor ones of this
thread (getrusage). Allocations are counted in rounds of their own, in which nothing is timed: a memory handler (NEP 49) sees each
request of numpy for an array's data, also for those that are gone when the call returns, which a snapshot of tracemalloc would not show
(that both see the same where all stays alive is checked first). numpy serves those below 1 KiB from a cache of its own, so that only
the others reach the system's allocator. Not counted: Python's objects, torch's own memory, and numpy's buffers within a ufunc.
Writes benchmarks/results/buffers_cpu_DATE.md, .json and .png.
"""
# ruff: noqa: SLF001 - it times the parts behind an engine's interface

import ctypes
import json
import multiprocessing
import os
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import typer

from benchmarks.models import MODELS
from benchmarks.reporting import Machine, dated, table
from benchmarks.sampling import ROWS, TOP_K, TOP_P, VOCABULARIES, intermediate
from cluster.buffers import BufferPool
from cluster.config import BatchingSettings
from cluster.errors import DataError
from cluster.ranking import RankRequest, Task
from cluster.registry import DATASETS, choose
from cluster.values import EncodeRequest, Int64Array, SamplingOptions
from cluster.window import default_step, window_start
from deployments.batching import alike
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
LIMITS = BatchingSettings()
WAITING = (32, 128)
"""How many requests wait whenever a batch is formed."""
KEPT_USERS, FULL_USERS = 128, 4
STATE_BYTES = 512 << 20
LEAST, MEAN = 20, 106
"""Events of a user, as in MovieLens-100K."""
CACHED_BELOW = 1024
POOL, FRESH = "pool", "fresh arrays"
AS_IT_COMES = "glibc as it comes"
ALLOCATORS: Mapping[str, Mapping[str, str]] = {
    AS_IT_COMES: {},
    "glibc, 128 KiB and more from the system each time": {"MALLOC_MMAP_THRESHOLD_": str(128 << 10)},
}
Turn: TypeAlias = Callable[[int], int]
"""Does what the round of this number asks for, and says how many requests that was."""


class FreshMemory(BufferPool):
    """The naive way: an array of its own for each call."""

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Any:  # noqa: ARG002 - the pool's interface
        return np.empty(shape, dtype)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Any:  # noqa: ARG002
        return np.zeros(shape, dtype)


MEMORIES: dict[str, type[BufferPool]] = {POOL: BufferPool, FRESH: FreshMemory}


@dataclass
class Contender:
    """A way to serve requests; figures are totals of the rounds, `us` each round's per request."""

    name: str
    turn: Turn
    memory: BufferPool = field(default_factory=FreshMemory)
    us: list[float] = field(default_factory=list)
    requests: int = 0
    faults: int = 0

    def take_turn(self, number: int) -> None:
        faults, began = minor_faults(), time.thread_time()
        requests = self.turn(number)
        self.us.append((time.thread_time() - began) * 1e6 / requests)
        self.faults += minor_faults() - faults
        self.requests += requests

    def forget(self) -> None:
        self.us.clear()
        self.requests = self.faults = 0


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


@dataclass(frozen=True, slots=True)
class Padding:
    """How full batches are: `wasted` is the share of their rows that is padding, `choosing_us` the time to choose it, per request."""

    batching: str
    waiting: int
    requests_per_batch: float
    wasted: float
    choosing_us: float


def minor_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def main(
    data: Annotated[
        Path | None, typer.Option(envvar="GENREC_TEST_DATA", help="MovieLens-100K or -1M, whose lengths are taken; default: geometric")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="turns of each contender, after one pass over all its batches")] = 300,
) -> None:
    """Measure, print and file."""
    load_before = os.getloadavg()[0]
    mix, lengths = mix_of(data)
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


def mix_of(data: Path | None) -> tuple[str, list[int]]:
    """What the mix of lengths is, and how many events of each user an engine is given, in random order."""
    name, events = lengths_of(data) if data else ("geometric", geometric())
    step = default_step(HISTORY)
    lengths = [count - window_start(count, HISTORY, step) for count in np.random.default_rng(0).permutation(events).tolist()]
    least, median, mean, most = min(lengths), np.median(lengths), np.mean(lengths), max(lengths)
    text = f"{name}: {len(lengths)} users of {least} to {most} events (median {median:.0f}, mean {mean:.0f}) in a window of {HISTORY}"
    return text, lengths


def lengths_of(data: Path) -> tuple[str, Int64Array]:
    """Raises DataError where it holds neither data set."""
    refusals = []
    for name in ("ml-100k", "ml-1m"):
        try:
            return f"{name}, users' lengths", choose("dataset", DATASETS, name)(data).interactions.lengths
        except DataError as error:
            refusals.append(str(error))
    raise DataError("; ".join(refusals))


def geometric() -> Int64Array:
    return LEAST - 1 + np.random.default_rng(1).geometric(1 / (MEAN - LEAST + 1), 1000).astype(np.int64)


def asked(user: int, length: int) -> EncodeRequest:
    return EncodeRequest(random_sequence(length, items=ITEMS, seed=user), 10, user=str(user))


def assembly(lengths: Sequence[int]) -> Case:
    """Requests -> BehaviourBatch."""
    lists = in_batches(lengths, WAITING[-1])

    def into(pool: BufferPool | None) -> Turn:
        return lambda number: len(engine_batch(lists[number % len(lists)], HISTORY, ITEMS, pool))

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
        batch = engine_batch(requests, HISTORY, ITEMS)
        users = [append_request(store, config, index, request, batch) for index, request in enumerate(requests)]
        given += [(group, batch) for group in groups(users, row_bytes)]

    def into(pool: BufferPool) -> Turn:
        inputs = AppendInputs(config, pool)
        return lambda number: len(inputs.of(*given[number % len(given)])["lengths"])

    return Case(name, [Contender(name, into(memory), memory) for name, memory in made()], len(given))


def append_request(store: StateStore, config: HSTUConfig, index: int, request: EncodeRequest, batch: BehaviourBatch) -> AppendRequest:
    length = int(batch.lengths[index])
    rows = identities(batch.items[index, :length], batch.times[index, :length])
    return AppendRequest(index, kept(store, config, Owner("benchmark", request.user), rows, len(rows) - 1), rows, length)


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


def run_in_turns(contenders: Sequence[Contender], rounds: int) -> None:
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            contender.take_turn(number)


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


Chooses: TypeAlias = Callable[[Sequence[int]], list[int]]
"""Lengths of the waiting requests -> positions of those that form the next batch."""


def first_come(tokens: Sequence[int]) -> list[int]:
    """In the order of their arrival, as many as the batch's number and padded size allow."""
    longest = np.maximum.accumulate(tokens[: LIMITS.max_requests])
    fits = longest * np.arange(1, len(longest) + 1) <= LIMITS.max_tokens
    return list(range(max(1, int(fits.sum()))))


def chosen_alike(tokens: Sequence[int]) -> list[int]:
    return alike(tokens, LIMITS)


def nearest_in_length(tokens: Sequence[int]) -> list[int]:
    """However much padding they need."""
    return alike(tokens, LIMITS.model_copy(update={"max_padding": 1.0}))


BATCHINGS: dict[str, Chooses] = {
    "first come": first_come,
    "alike, any padding": nearest_in_length,
    f"alike, max_padding {LIMITS.max_padding:g}": chosen_alike,
}


def batches(lengths: Sequence[int], choice: Chooses, waiting: int) -> list[list[int]]:
    """Users in batches, while so many wait as there are users left."""
    queue, rest, formed = list(range(len(lengths)))[:waiting], iter(range(waiting, len(lengths))), []
    while queue:
        positions = set(choice([lengths[user] for user in queue]))
        formed.append([queue[position] for position in sorted(positions)])
        queue = [user for position, user in enumerate(queue) if position not in positions]
        queue += [user for _, user in zip(formed[-1], rest, strict=False)]
    return formed


def padded(lengths: Sequence[int], waiting: int, rounds: int) -> Iterator[Padding]:
    def into(choice: Chooses) -> Turn:
        return lambda _: sum(map(len, batches(lengths, choice, waiting)))

    contenders = [Contender(name, into(choice)) for name, choice in BATCHINGS.items()]
    run_in_turns(contenders, max(3, rounds // 10))
    for contender, choice in zip(contenders, BATCHINGS.values(), strict=True):
        formed = batches(lengths, choice, waiting)
        rows = sum(len(batch) * max(lengths[user] for user in batch) for batch in formed)
        per_batch, wasted = len(lengths) / len(formed), 1 - sum(lengths) / rows
        yield Padding(contender.name, waiting, per_batch, wasted, float(np.median(contender.us)))


_pointer = ctypes.c_void_p
_size = ctypes.c_size_t
_libc, _python = ctypes.CDLL(None), ctypes.pythonapi
_Malloc = ctypes.CFUNCTYPE(_pointer, _pointer, _size)
_TwoSizes = ctypes.CFUNCTYPE(_pointer, _pointer, _size, _size)
_Realloc = ctypes.CFUNCTYPE(_pointer, _pointer, _pointer, _size)
_Free = ctypes.CFUNCTYPE(None, _pointer, _pointer, _size)
SET_HANDLER = 304
"""Where numpy's table of C functions has PyDataMem_SetHandler, since 1.22 (numpy/__multiarray_api.h)."""


class _Handler(ctypes.Structure):
    """PyDataMem_Handler of numpy/ndarraytypes.h."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", _pointer),
        ("malloc", _Malloc),
        ("calloc", _TwoSizes),
        ("realloc", _Realloc),
        ("free", _Free),
    )


class AllocationCounter:
    """Sees every request of numpy for an array's data, in bytes, and serves it by the C library. One for the life of the process."""

    def __init__(self) -> None:
        for name, result, takes in (
            ("malloc", _pointer, [_size]),
            ("calloc", _pointer, [_size, _size]),
            ("realloc", _pointer, [_pointer, _size]),
            ("free", None, [_pointer]),
        ):
            function = getattr(_libc, name)
            function.restype, function.argtypes = result, takes
        self._sizes: list[int] = []
        self._alive = 0
        self._handler = _Handler(
            b"counting", 1, None, _Malloc(self._malloc), _TwoSizes(self._calloc), _Realloc(self._realloc), _Free(self._free)
        )
        self._capsule, self._set = self._capsule_of(self._handler), self._setter()

    @contextmanager
    def counting(self) -> Iterator[list[int]]:
        """The sizes, which are there at the end of the block.

        Raises RuntimeError where something that was allocated within it is alive then: it would not be work of the calls alone.
        """
        self._sizes = []
        before = self._set(self._capsule)
        try:
            yield self._sizes
        finally:
            self._set(before)
        if self._alive:
            raise RuntimeError(f"{self._alive} of {len(self._sizes)} arrays are still alive; a pool has grown, so warm up for longer")

    def check(self) -> None:
        """Raises RuntimeError unless tracemalloc, which only knows what is alive, sees the same arrays."""
        tracemalloc.start()
        with self.counting() as sizes:
            arrays = [np.zeros((100, 100)), np.empty(5000, np.int8), np.arange(3000)]
            taken = tracemalloc.take_snapshot()
            arrays.clear()
        tracemalloc.stop()
        numpys = tracemalloc.DomainFilter(inclusive=True, domain=np.lib.tracemalloc_domain)
        traced = sorted(trace.size for trace in taken.filter_traces([numpys]).traces if trace.size >= CACHED_BELOW)
        if traced != sorted(size for size in sizes if size >= CACHED_BELOW):
            raise RuntimeError(f"numpy {np.__version__} asked for {sorted(sizes)} bytes and tracemalloc saw {traced}: counting is broken")

    def _malloc(self, _: object, size: int) -> int | None:
        return self._counted(size, _libc.malloc(size))

    def _calloc(self, _: object, count: int, size: int) -> int | None:
        return self._counted(count * size, _libc.calloc(count, size))

    def _realloc(self, _: object, memory: int | None, size: int) -> int | None:
        self._alive -= memory is not None
        return self._counted(size, _libc.realloc(memory, size))

    def _free(self, _: object, memory: int | None, _size: int) -> None:
        self._alive -= memory is not None
        _libc.free(memory)

    def _counted(self, size: int, memory: int | None) -> int | None:
        self._sizes.append(size)
        self._alive += 1
        return memory

    def _capsule_of(self, handler: _Handler) -> object:
        _python.PyCapsule_New.restype, _python.PyCapsule_New.argtypes = ctypes.py_object, [_pointer, ctypes.c_char_p, _pointer]
        self._name = ctypes.c_char_p(b"mem_handler")  # the capsule points to it
        return _python.PyCapsule_New(ctypes.addressof(handler), self._name, None)

    def _setter(self) -> Callable[[object], object]:
        _python.PyCapsule_GetPointer.restype, _python.PyCapsule_GetPointer.argtypes = _pointer, [ctypes.py_object, ctypes.c_char_p]
        api: Any = import_module("numpy._core._multiarray_umath")._ARRAY_API
        functions = ctypes.cast(_python.PyCapsule_GetPointer(api, None), ctypes.POINTER(_pointer))
        return ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object)(functions[SET_HANDLER] or 0)


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
BATCHING_COLUMNS = ("waiting", "batching", "requests a batch", "padding", "choosing (us a request)")


def memory_row(one: Figures) -> list[str]:
    cells = [f"{one.p50_us:.1f}", f"{one.allocations:.2f}", f"{one.small_allocations:.1f}", f"{one.allocated_bytes / 1024:,.1f}"]
    pool = ["-"] * 3
    if one.pool_peak_bytes is not None:
        pool = [f"{one.pool_hits:,}", f"{one.pool_misses}", f"{one.pool_peak_bytes / 2**20:.2f}"]
    return [one.case, one.memory, *cells, f"{one.page_faults:.2f}", *pool]


def batching_row(one: Padding) -> list[str]:
    return [str(one.waiting), one.batching, f"{one.requests_per_batch:.1f}", f"{one.wasted:.1%}", f"{one.choosing_us:.1f}"]


if __name__ == "__main__":
    typer.run(main)
