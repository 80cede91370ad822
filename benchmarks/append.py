"""What does keeping users' states save? All events of a history encoded, against the new ones appended to what is kept, in one run.

    python -m benchmarks.append [--model a --model b --model c] [--engine onnxruntime ...] [--threads 1] [--rounds 15]

Models with random weights (models.py), one user at a time, fp32 states in the paged store. "+1" and "+8" are histories of which all but
the last one or eight events were encoded before; an append encodes one row more, the one that was last then. Every contender takes its
turn in every round, and every round has new last events, so the same rows are found kept each time. torch_compiled is compiled for one
user at a time. "graph" is the computation alone
with its inputs at hand; "encoder" is all that a request costs: window, match, gather, run, commit, nearest items.
Writes benchmarks/results/append_DEVICE_DATE.md.
"""
# ruff: noqa: SLF001 - it times the parts behind an encoder's interface

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from msgspec.structs import replace

from benchmarks.models import compiled, described
from benchmarks.reporting import Machine, dated
from cluster.bundle import Bundle
from cluster.values import EncodeRequest
from integrations.hstu.append_inputs import AppendInputs
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder import CompiledTorchEncoder, TorchEncoder
from integrations.hstu.engine_batch import engine_batch
from integrations.hstu.model_parameter_calculator import model_size
from integrations.hstu.stateful import KeptStates
from integrations.onnx.encoder import OnnxRuntimeEncoder
from integrations.openvino.encoder import OpenVinoEncoder
from tests.bundles import random_sequence

LENGTHS = {"a": (200,), "b": (512,), "c": (200, 512, 1024, 2048)}
SHORT = (4, 8, 16, 32, 64, 128)
now = time.perf_counter
"""With one thread the process's processor time, see main: waiting for a busy processor does not count then."""
Turn = Callable[[], object]


class OneUser(CompiledTorchEncoder):
    """Compiled for that."""

    batches = (1,)


ENGINES: Mapping[str, type[Any]] = {
    "onnxruntime": OnnxRuntimeEncoder,
    "openvino": OpenVinoEncoder,
    "torch": TorchEncoder,
    "torch_compiled": OneUser,
}


@dataclass
class Contender:
    """Something to time; `prepare` runs before every turn and is not timed."""

    name: str
    turn: Callable[[Any], object]
    prepare: Turn = lambda: None
    seconds: list[float] = field(default_factory=list)

    def take_turn(self) -> None:
        given = self.prepare()
        began = now()
        self.turn(given)
        self.seconds.append(now() - began)

    @property
    def ms(self) -> float:
        return float(np.median(self.seconds)) * 1e3


class Histories:
    """Histories of `length` events that differ in their last ones only."""

    def __init__(self, length: int, items: int) -> None:
        self.base, self.length, self.items = random_sequence(length, items=items), length, items
        self._rng = np.random.default_rng(length)

    def ending_anew(self, count: int, user: str = "") -> EncodeRequest:
        """The last `count` events are other ones, at other times, than in any call before."""
        items, times = self.base.items.copy(), self.base.timestamps.copy()
        items[-count:] = self._rng.integers(1, self.items + 1, count)
        times[-count:] += int(self._rng.integers(1, 10**6))
        sequence = replace(self.base, items=items, timestamps=times, request_time=int(times[-1]) + 60)
        return EncodeRequest(sequence, 10, user_id=user)


def main(
    *,
    model: Annotated[list[str] | None, typer.Option(help="by default each of " + ", ".join(LENGTHS))] = None,
    engine: Annotated[list[str] | None, typer.Option(help="by default each of " + ", ".join(ENGINES))] = None,
    threads: Annotated[int, typer.Option(help="of torch, of each ONNX Runtime session and of OpenVINO")] = 1,
    rounds: Annotated[int, typer.Option(help="turns of each contender at histories of up to 512 events; fewer above")] = 31,
    bundles: Annotated[
        Path | None, typer.Option(help="keep the compiled models here, and use them again; default: a temporary folder")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="default: a file in benchmarks/results")] = None,
) -> None:
    """Measure, print and file."""
    global now  # noqa: PLW0603 - what the clock counts depends on an option
    now = time.process_time if threads == 1 else time.perf_counter
    torch.set_num_threads(threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target, load, engines = output or dated(f"append_{device}", "md"), os.getloadavg()[0], engine or list(ENGINES)
    tables: dict[str, list[str]] = {name: [] for name in HEADINGS}
    with tempfile.TemporaryDirectory() as folder:
        for name in model or LENGTHS:
            bundle = compiled((bundles or Path(folder)) / name, name)
            for kind in engines:
                for table, line in measured(name, kind, bundle, threads, rounds):
                    tables[table].append(line)
                    target.write_text(report(tables, engines, threads, load))  # what was measured stays, should the next one break
    print(target.read_text())


def measured(name: str, engine: str, bundle: Bundle, threads: int, rounds: int) -> Iterator[tuple[str, str]]:
    """Lines of the tables for this model and engine."""
    whole, keeping = (opened(engine, bundle, threads, state_bytes=size, keep_from=1) for size in (0, 256 << 20))
    for arena in keeping._kept.store.pool._arenas.values():
        arena.fill(0)  # memory is touched for the first time once in a process's life, at 5 ms for 2 MB here: not in what is measured
    config = HSTUConfig.model_validate(bundle.manifest.model.config)
    for length in LENGTHS[name]:
        turns = max(5, rounds * 512 // max(512, length))
        histories = Histories(length, config.items)
        took = race(whole, keeping, config, histories, turns)
        state_mb = (length - 2) * model_size(config).kv_bytes_per_event / 1e6
        yield "graphs", graph_line(f"{name} {length} | {engine}", took, state_mb, layer_bytes(config) / 1e6)
        yield "encoders", encoder_line(f"{name} {length} | {engine}", took)
        yield "parts", parts_line(f"{name} {length} | {engine}", keeping, histories, turns)
    for length in SHORT:
        yield "short", short_line(f"{name} {length} | {engine}", whole, keeping, Histories(length, config.items), rounds)


def opened(engine: str, bundle: Bundle, threads: int, **options: int) -> Any:
    encoder = ENGINES[engine](**options, **({} if issubclass(ENGINES[engine], TorchEncoder) else {"threads": threads}))
    encoder.load(bundle)
    return encoder


def race(whole: Any, keeping: Any, config: HSTUConfig, histories: Histories, turns: int) -> dict[str, Contender]:
    """All contenders at one length, by name, each with its seconds."""
    contenders = [full_graph(whole, histories), encoder_of("full", whole, histories, 1), cold(keeping, histories)]
    for count in (1, 8):
        contenders += [append_graph(keeping, config, histories, count), encoder_of(f"+{count}", keeping, histories, count)]
    return run_in_turns(contenders, turns)


def run_in_turns(contenders: list[Contender], turns: int) -> dict[str, Contender]:
    """Two rounds to warm up, then those that count."""
    for number in range(turns + 2):
        for contender in contenders:
            contender.take_turn()
            if number < 2:
                contender.seconds.clear()
    return {contender.name: contender for contender in contenders}


def full_graph(encoder: Any, histories: Histories) -> Contender:
    run: Callable[[Any], object]
    batch = engine_batch([histories.ending_anew(1)], encoder._window, histories.items)
    if isinstance(encoder, TorchEncoder):
        run = encoder._states
    elif isinstance(encoder, OpenVinoEncoder):
        run = partial(encoder._run, encoder._engine)
    else:
        run = partial(encoder._retrieve, top_n=10)
    return Contender("full graph", run, lambda: batch)


def encoder_of(name: str, encoder: Any, histories: Histories, count: int) -> Contender:
    return Contender(name, encoder.infer, lambda: histories.ending_anew(count, user=name))


def cold(encoder: Any, histories: Histories) -> Contender:
    """A user without kept rows: all rows are encoded and kept, another user's are evicted."""
    users = iter(range(10**9))
    return Contender("cold", encoder.infer, lambda: histories.ending_anew(1, user=f"cold {next(users)}"))


def append_graph(encoder: Any, config: HSTUConfig, histories: Histories, count: int) -> Contender:
    """The append computation on inputs that are at hand."""
    kept: KeptStates = encoder._kept
    user = f"graph +{count}"
    encoder.infer(histories.ending_anew(count, user))
    request = histories.ending_anew(count, user)
    batch = engine_batch([request], encoder._window, histories.items)
    with ExitStack() as held:
        inputs = AppendInputs(config, shapes=kept.inputs.shapes).of([kept._matched(held, 0, request, batch)], batch)
    assert inputs["lengths"].tolist() == [count + 1], inputs["lengths"]
    return Contender(f"+{count} graph", kept.run, lambda: inputs)


def parts_line(name: str, encoder: Any, histories: Histories, turns: int) -> str:
    """Where the time of an append of one event goes."""
    kept: KeptStates = encoder._kept
    user = "parts"
    encoder.infer(histories.ending_anew(1, user))
    laps = []
    for _ in range(turns + 2):
        request = histories.ending_anew(1, user)
        marks = [now()]
        batch = engine_batch([request], encoder._window, histories.items)
        marks.append(now())
        with ExitStack() as held:
            append = kept._matched(held, 0, request, batch)
            marks.append(now())
            inputs = kept.inputs.of([append], batch)
            marks.append(now())
            outputs = kept.run(inputs)
            marks.append(now())
            states = outputs["states"][0, : append.new]
            kept._latest(append, states, kept._prompt_length)
            kept._keep(append, 0, states, outputs)
        marks.append(now())
        laps.append(np.diff(marks))
    gathered = append.kept * model_size(kept.inputs._config).kv_bytes_per_event
    medians = np.median(laps[2:], axis=0)
    return f"| {name} | {' | '.join(f'{ms:.3f}' for ms in medians * 1e3)} | {gathered / medians[2] / 1e9:.1f} |"


def graph_line(name: str, took: Mapping[str, Contender], state_mb: float, weights_mb: float) -> str:
    full, one, eight = (took[key].ms for key in ("full graph", "+1 graph", "+8 graph"))
    times = f"{full:.2f} | {one:.3f} | {eight:.3f} | {full / one:.0f}x"
    return (
        f"| {name} | {times} | {state_mb:.2f} | {one / state_mb:.3f} | {state_mb + weights_mb:.1f} | {one / (state_mb + weights_mb):.3f} |"
    )


def encoder_line(name: str, took: Mapping[str, Contender]) -> str:
    full, one, eight, cold_ms = (took[key].ms for key in ("full", "+1", "+8", "cold"))
    return f"| {name} | {full:.2f} | {cold_ms:.2f} | {one:.3f} | {eight:.3f} | {full / one:.1f}x | {full / eight:.1f}x |"


def short_line(name: str, whole: Any, keeping: Any, histories: Histories, turns: int) -> str:
    took = run_in_turns([encoder_of("full", whole, histories, 1), encoder_of("+1", keeping, histories, 1), cold(keeping, histories)], turns)
    return f"| {name} | {' | '.join(f'{took[key].ms:.3f}' for key in ('full', '+1', 'cold'))} |"


def layer_bytes(config: HSTUConfig) -> int:
    """What an append reads of the weights: every layer's projections, in fp32."""
    inner = config.heads * config.linear_dim
    return 4 * config.layers * config.dim * (2 * config.heads * (config.attention_dim + config.linear_dim) + inner)


HEADINGS = {
    "graphs": (
        "## The computation alone, ms",
        (
            "`state`: bytes of K and V that are read; `read`: with the weights of the layers. Targets at 2,048: +1 at most 1/10 of all, "
            "and a MB read at most 1.5 times what it costs at 200."
        ),
        "| model, events | engine | all events | +1 | +8 | gain at +1 | state MB | ms per MB of state | read MB | ms per MB read |",
    ),
    "encoders": (
        "## The whole encoder, ms",
        "`cold`: a user without kept rows, whose rows are computed, without the shortcut of the last layer, and kept.",
        "| model, events | engine | nothing kept, state off | cold | +1 | +8 | gain at +1 | gain at +8 |",
    ),
    "parts": (
        "## Where the time of +1 goes, ms",
        "Nearest items, which both ways search, are not in it.",
        "| model, events | engine | window | match | gather | run | commit | gather GB/s |",
    ),
    "short": (
        "## Short histories, the whole encoder, ms",
        "Where keeping starts to pay: `keep_from`.",
        "| model, events | engine | nothing kept, state off | +1 | cold |",
    ),
}


def report(tables: Mapping[str, list[str]], engines: Sequence[str], threads: int, load: float) -> str:
    sections = []
    for name, (title, note, columns) in HEADINGS.items():
        if lines := tables[name]:
            sections += [title, "", note, "", columns, "|---" * (columns.count("|") - 1) + "|", *lines, ""]
    clock = "the processor time of a process whose engine has one thread" if threads == 1 else "elapsed time"
    heading = [
        "# Appending to kept states against encoding everything",
        "",
        f"One user at a time, fp32, medians of {clock}.",
        "",
        *described(LENGTHS),
    ]
    packages = ("torch", *(name for name in ("onnxruntime", "openvino") if name in engines), "numpy")
    return "\n".join([*heading, *sections, *Machine.now("benchmarks.append", packages, load).lines()])


if __name__ == "__main__":
    typer.run(main)
