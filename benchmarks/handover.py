"""What does a handed-over state cost and save? Users that come back to a replica with their states, and to one without.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python -m benchmarks.handover [--model a --model b] [--users 24]

Models with random weights (models.py), histories that fill the window, PyTorch, one thread, the process's processor time. One encoder
hands its users' states over: they are copied, sealed, pickled as Ray does with what calls carry, held as the switchboard holds them,
pickled again, checked and kept by a second encoder. Then each user comes with one event more, to that one and to a third that knows none.
What Ray and the network take is not in it. Writes benchmarks/results/handover_cpu_DATE.md.
"""

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from msgspec.structs import replace

from benchmarks.models import MODELS, described
from benchmarks.reporting import Machine, dated, table
from cluster.engines.kept_users import chunk_of, sealed, take_over
from cluster.fleet.erasures import News, Place
from cluster.fleet.held_states import HeldStates
from cluster.values import EncodeRequest
from integrations.hstu.encoder import TorchEncoder
from tests.bundles import make_bundle, random_sequence

STATE_BYTES = 4 << 30


def main(
    *,
    model: Annotated[list[str] | None, typer.Option(help="by default a and b")] = None,
    users: Annotated[int, typer.Option(help="that are handed over")] = 24,
    output: Annotated[Path | None, typer.Option(help="default: a file in benchmarks/results")] = None,
) -> None:
    """Measure, print and file."""
    torch.set_num_threads(1)
    names, load = model or ["a", "b"], os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        rows = [measured(Path(folder) / name, name, users) for name in names]
    columns = [
        "model, events",
        "KB a user",
        "handed over, ms a user",
        "taken over, ms a user",
        "one event more then, ms",
        "all encoded again, ms",
    ]
    heading = ["# States that are handed over, against encoding their users again", "", *described(names)]
    report = "\n".join([*heading, *table(columns, rows), "", *Machine.now("benchmarks.handover", ("torch", "numpy"), load).lines()])
    (output or dated("handover_cpu", "md")).write_text(report + "\n")
    typer.echo(report)


def measured(root: Path, name: str, users: int) -> list[str]:
    sizes: dict[str, Any] = dict(MODELS[name])
    bundle = make_bundle(root, **{**sizes, "max_length": sizes["max_history"] + 11})
    old, heir, stranger = (TorchEncoder(state_bytes=STATE_BYTES) for _ in range(3))
    for encoder in (old, heir, stranger):
        encoder.load(bundle)
    length = sizes["max_history"] - 1
    histories = {f"user {number}": random_sequence(length + 1, items=sizes["items"], seed=number) for number in range(users)}
    before, later = ([request(user, history, until) for user, history in histories.items()] for until in (length, length + 1))
    for one in before:
        old.infer(one)
    carried, given_ms = timed(lambda: [pickle.dumps(chunk) for chunk in chunks(old)])
    held = HeldStates(STATE_BYTES, 600)
    _, taken_ms = timed(lambda: taken(heir, held, carried))
    _, append_ms = timed(lambda: [heir.infer(one) for one in later])
    _, whole_ms = timed(lambda: [stranger.infer(one) for one in later])
    kept = heir.kept()
    assert (kept["adopted"], kept["hits"]) == (users, users), kept
    figures = (given_ms / users, taken_ms / users, append_ms / users, whole_ms / users)
    return [f"{name}, {length}", f"{sum(map(len, carried)) / users / 1000:,.0f}", *(f"{figure:.2f}" for figure in figures)]


def request(user: str, history: Any, length: int) -> EncodeRequest:
    columns = {field: getattr(history, field)[:length] for field in ("items", "timestamps", "actions", "values")}
    return EncodeRequest(replace(history, **columns, request_time=int(columns["timestamps"][-1]) + 60), 10, user_id=user)


def chunks(encoder: TorchEncoder) -> Iterator[list[Any]]:
    states = sealed(encoder, "kind")
    while chunk := chunk_of(states):
        yield chunk


def taken(heir: TorchEncoder, held: HeldStates, carried: list[bytes]) -> None:
    for chunk in carried:
        held.give(pickle.loads(chunk), News(Place()), now=0)  # noqa: S301 - dumped above
    after = 0
    while (found := held.take("heir", {"kind"}, ["heir"], after)).after != after:
        take_over(heir, "kind", pickle.loads(pickle.dumps(found.states)))  # noqa: S301 - dumped here
        after = found.after


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.process_time()
    result = work()
    return result, (time.process_time() - began) * 1e3


if __name__ == "__main__":
    typer.run(main)
