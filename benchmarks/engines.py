"""Which engine encodes fastest, and how near is it to what the machine can do? genrec's encoders beside a first implementation, one run.

    OPENBLAS_NUM_THREADS=1 python -m benchmarks.engines [--model a --model b --model c1] [--threads 2] [--seconds 20]

(numpy's threads spin when they are done, and the next engine would be slowed; in a replica Ray gives them no more than one.)
Random weights (models.py), histories that fill the window, the 100 nearest items: from requests to answers. "eager" is HSTU as a first
implementation has it (naive_hstu.py) in PyTorch, "plain ONNX Runtime" the same exported, in a session as it comes. The contenders take
turns, at least MIN_ROUNDS each and as many more as fit in `seconds` for a batch size; medians count. Share: of the fp32 matrix product that
torch reaches in the same rounds, if nothing but the products were computed that this model needs at least (the last layer for the last
row only, no pair that the causal mask hides a block of). "chosen": what the controller picks with `selection: fastest`, warmed up with at
most CHOSEN_BY of the users, among genrec's encoders in fp32. "openvino bf16" is the option `precision: bf16`, with its quality gate.
Writes benchmarks/results/engines_DEVICE_DATE.md, .json and .png.
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import onnxruntime
import torch
import typer

from benchmarks.models import compiled, described
from benchmarks.naive_hstu import NaiveHSTU
from benchmarks.reporting import Machine, dated, table
from cluster.bundle import Bundle
from cluster.engines.controller import FrameworkController
from cluster.engines.roster import Choice
from cluster.engines.stage_rules import encoder_rules
from cluster.protocols import Backend
from cluster.registry import backends
from cluster.values import Encoded, EncodeRequest
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder import CompiledTorchEncoder, TorchEncoder
from integrations.hstu.model import HSTU
from integrations.hstu.model_parameter_calculator import model_size
from integrations.hstu.user_behavior_schema import collate
from integrations.hstu.weights import load_model
from integrations.onnx.encoder import OnnxRuntimeEncoder
from integrations.openvino.encoder import OpenVinoEncoder
from tests.bundles import random_sequence

NAMES = ("a", "b", "c1")
BATCHES = (1, 8, 32)
TOP = 100
MIN_ROUNDS = 3
CHOSEN_BY = 8
SETTLING_S = 0.05
"""Before a turn: the threads of a session as it comes go on spinning for a while, and would slow the next contender."""
EAGER, PLAIN = "eager", "plain ONNX Runtime"
OURS = ("torch", "torch_compiled", "onnxruntime", "openvino")
BF16 = "openvino bf16"
GEMM = 1536
_INPUTS = ("items", "times", "next_times", "lengths")

Encode = Callable[[Sequence[EncodeRequest]], object]


class WholeWindows(CompiledTorchEncoder):
    """Compiled for the one length that is measured."""

    def __init__(self, length: int) -> None:
        super().__init__(state_bytes=0)
        self.shortest = length


@dataclass
class Row:
    """A contender's turns with one batch size."""

    name: str
    encode: Encode
    seconds: list[float] = field(default_factory=list)

    def take_turn(self, requests: Sequence[EncodeRequest]) -> None:
        time.sleep(SETTLING_S)
        began = time.perf_counter()
        self.encode(requests)
        self.seconds.append(time.perf_counter() - began)

    @property
    def ms(self) -> float:
        return median(self.seconds) * 1e3


@dataclass(frozen=True)
class Cell:
    """A model and a batch size: every contender's rows, the machine's fp32 limit then (FLOP/s), and what the controller chose."""

    model: str
    batch: int
    rows: Mapping[str, Row]
    limit: float
    needed_flops: float
    chosen: str

    def share(self, name: str) -> float:
        return self.needed_flops / (self.rows[name].ms / 1e3) / self.limit

    def against_eager(self, name: str) -> float:
        return self.rows[EAGER].ms / self.rows[name].ms

    @property
    def best(self) -> str:
        return min(self.rows, key=lambda name: self.rows[name].ms)


def main(
    model: Annotated[list[str] | None, typer.Option(help="by default each of " + ", ".join(NAMES))] = None,
    threads: Annotated[int, typer.Option(help="of every engine")] = 2,
    seconds: Annotated[float, typer.Option(help="for each model and batch size, all contenders together")] = 20.0,
) -> None:
    """Measure, print and file."""
    torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    cells: list[Cell] = []
    for name in model or NAMES:
        with tempfile.TemporaryDirectory() as directory:
            cells += measured(name, compiled(Path(directory) / name, name), threads, seconds)
    text = "\n".join([*heading(threads, load), *tables(cells)])
    print(text)
    dated("engines_cpu", "md").write_text(text)
    dated("engines_cpu", "json").write_text(json.dumps([as_json(cell) for cell in cells], indent=1) + "\n")
    plot(cells, dated("engines_cpu", "png"))


def measured(name: str, bundle: Bundle, threads: int, seconds: float) -> Iterator[Cell]:
    model = load_model(bundle)
    assert isinstance(model, HSTU)
    contenders = dict(contenders_of(bundle, model, threads))
    length = model.config.max_history
    histories = [random_sequence(length, items=model.config.items, seed=seed) for seed in range(max(BATCHES))]
    for batch in BATCHES:
        requests = [EncodeRequest(sequence, TOP) for sequence in histories[:batch]]
        rows = {key: Row(key, encode) for key, encode in contenders.items()}
        limit = race(list(rows.values()), requests, seconds)
        chosen = chosen_by_controller(bundle, requests[:CHOSEN_BY], threads, length)
        yield Cell(name, batch, rows, limit, needed_flops(model.config, batch), chosen)
        print(f"{name} {batch}: " + ", ".join(f"{row.name} {row.ms:.2f}" for row in rows.values()) + f"; chosen {chosen}", file=sys.stderr)


def race(rows: Sequence[Row], requests: Sequence[EncodeRequest], seconds: float) -> float:
    """Turns, after one that does not count, and the FLOP/s of a large fp32 product between them."""
    products: list[float] = []
    for row in rows:
        row.take_turn(requests)
        row.seconds.clear()
    began = time.monotonic()
    while len(products) < MIN_ROUNDS or time.monotonic() - began < seconds:
        for row in rows:
            row.take_turn(requests)
        products.append(gemm_flops())
    return median(products)


def gemm_flops() -> float:
    x = torch.ones(GEMM, GEMM)
    began = time.perf_counter()
    x @ x
    return 2 * GEMM**3 / (time.perf_counter() - began)


def contenders_of(bundle: Bundle, model: HSTU, threads: int) -> Iterator[tuple[str, Encode]]:
    naive = NaiveHSTU(model).eval()
    vectors = torch.from_numpy(np.array(bundle.item_vectors[1:]))

    @torch.inference_mode()
    def eager(requests: Sequence[EncodeRequest]) -> object:
        return torch.topk(naive(*inputs(requests, model.config)) @ vectors.T, TOP)

    yield EAGER, eager
    yield PLAIN, plain_session(naive, vectors, model.config, threads)
    encoders: dict[str, Backend[EncodeRequest, Encoded]] = {
        "torch": TorchEncoder(state_bytes=0),
        "torch_compiled": WholeWindows(model.config.max_history),
        "onnxruntime": OnnxRuntimeEncoder(threads=threads, state_bytes=0),
        "openvino": OpenVinoEncoder(threads=threads, state_bytes=0),
        BF16: OpenVinoEncoder(threads=threads, precision="bf16", state_bytes=0),
    }
    for name, backend in encoders.items():
        backend.load(bundle)
        yield name, backend.batch_infer


def inputs(requests: Sequence[EncodeRequest], config: HSTUConfig) -> tuple[torch.Tensor, ...]:
    tensors = collate([request.sequence for request in requests], config.max_history).tensors()
    return tuple(tensors[name] for name in _INPUTS)


def plain_session(naive: NaiveHSTU, vectors: torch.Tensor, config: HSTUConfig, threads: int) -> Encode:
    batch, length = torch.export.Dim("batch", min=1), torch.export.Dim("length", min=2, max=config.max_length)
    example = inputs([EncodeRequest(random_sequence(16, items=config.items, seed=seed), TOP) for seed in range(2)], config)
    shapes = tuple({0: batch, 1: length} if tensor.dim() == 2 else {0: batch} for tensor in example)
    program = torch.onnx.export(naive, example, dynamo=True, dynamic_shapes=shapes, input_names=list(_INPUTS), verbose=False)
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    with tempfile.TemporaryDirectory() as directory:
        program.save(f"{directory}/plain.onnx")
        session = onnxruntime.InferenceSession(f"{directory}/plain.onnx", options, providers=["CPUExecutionProvider"])
    table = vectors.numpy().T

    def encode(requests: Sequence[EncodeRequest]) -> object:
        given = {name: tensor.numpy() for name, tensor in zip(_INPUTS, inputs(requests, config), strict=True)}
        return torch.topk(torch.from_numpy(session.run(None, given)[0] @ table), TOP)

    return encode


def chosen_by_controller(bundle: Bundle, requests: Sequence[EncodeRequest], threads: int, length: int) -> str:
    table = {**backends("encoder"), "torch_compiled": f"{WholeWindows.__module__}:WholeWindows"}
    order = [*(name for name in OURS if name != "torch"), "torch"]  # the others must agree with the last one
    rules = encoder_rules(len(bundle.item_vectors) - 1)
    options: dict[str, dict[str, Any]] = {
        "torch": {"state_bytes": 0},
        "torch_compiled": {"length": length},
        "onnxruntime": {"threads": threads, "state_bytes": 0},
        "openvino": {"threads": threads, "state_bytes": 0},
    }
    controller = FrameworkController("encoder", Choice(table, order, selection="fastest", options=options), bundle, rules)
    asyncio.run(controller.warm_up(requests))
    chosen = controller.snapshot().backends[0].name
    controller.close()
    return chosen


def needed_flops(config: HSTUConfig, batch: int) -> float:
    """Matrix products from histories that fill the window to scores: all rows in all layers but the last, of which one row is wanted."""
    rows = config.max_history
    size = model_size(config, batch=batch)
    below = size.encode_flops * (config.layers - 1) / config.layers
    kept = config.heads * (config.attention_dim + config.linear_dim)
    last = 2 * batch * (rows * config.dim * kept + config.dim * kept + rows * kept + config.heads * config.linear_dim * config.dim)
    return below + last + 2 * batch * config.dim * config.items


def tables(cells: Sequence[Cell]) -> Iterator[str]:
    names = list(cells[0].rows)
    yield from ("## Milliseconds a batch (and times as fast as eager)", "")
    yield from table(("", "users", *names, "chosen"), map(times, cells))
    yield from ("", "## Users a second, and the share of the fp32 limit", "")
    yield from table(("", "users", "limit (GFLOP/s)", *names), map(rates, cells))
    yield ""


def times(cell: Cell) -> list[str]:
    figures = {name: f"{row.ms:.2f} ({cell.against_eager(name):.1f})" for name, row in cell.rows.items()}
    figures[cell.best] = f"**{figures[cell.best]}**"
    behind = cell.rows[cell.chosen].ms / cell.rows[cell.best].ms
    return [cell.model, str(cell.batch), *figures.values(), f"{cell.chosen} ({behind:.2f} of the best)"]


def rates(cell: Cell) -> list[str]:
    figures = [f"{cell.batch / row.ms * 1e3:.1f} ({cell.share(name):.0%})" for name, row in cell.rows.items()]
    return [cell.model, str(cell.batch), f"{cell.limit / 1e9:.0f}", *figures]


def as_json(cell: Cell) -> dict[str, Any]:
    return {
        "model": cell.model,
        "users": cell.batch,
        "limit_gflops": cell.limit / 1e9,
        "needed_gflop": cell.needed_flops / 1e9,
        "chosen": cell.chosen,
        "ms": {name: row.seconds for name, row in cell.rows.items()},
    }


def plot(cells: Sequence[Cell], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - an optional package, and slow to import

    mpl.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415

    names = [name for name in cells[0].rows if name != EAGER]
    figure, axes = plt.subplots(figsize=(10, 4))
    for offset, name in enumerate(names):
        places = np.arange(len(cells)) + (offset - len(names) / 2) * 0.13
        axes.bar(places, [cell.against_eager(name) for cell in cells], 0.13, label=name)
    axes.set_xticks(np.arange(len(cells)), [f"{cell.model}, {cell.batch}" for cell in cells])
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set_xlabel("model, users at a time")
    axes.set_ylabel("times as fast as eager PyTorch")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def heading(threads: int, load: float) -> list[str]:
    return [
        "# Encoding: every engine, and what one would write first",
        "",
        f"From requests to the {TOP} nearest items, histories that fill the window, {threads} threads; medians of turns in one run.",
        "",
        *described(NAMES),
        *Machine.now("benchmarks.engines", ("torch", "onnxruntime", "openvino"), load).lines(),
    ]


if __name__ == "__main__":
    typer.run(main)
