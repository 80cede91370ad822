"""Cases of first_gpu.py: the encoders with examples/ml-100k's model on the device, against float64 on the CPU.

How fast they are is told beside the same in eager PyTorch, in turns.
"""

import dataclasses
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from threading import Event
from typing import Any, TypeAlias

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks import first_gpu_training
from benchmarks.devices import DEVICE, INTERPRETED, WARMING, error_of, wall_ms
from benchmarks.first_gpu_bundles import beginning, exact_states, example, history, published
from benchmarks.guarded import Case, Finding, Label, NotHere
from benchmarks.models import MODELS, with_graphs
from benchmarks.naive_hstu import NaiveHSTU
from cluster.bundle import Bundle, ModelRecord
from cluster.bundle_store import BundleStore
from cluster.values import EncodeRequest, UserSequence
from integrations.hstu.encoder import CompiledTorchEncoder, TorchEncoder
from integrations.hstu.kernels.buckets import Record
from integrations.hstu.kernels.encoder import TritonEncoder
from integrations.hstu.model import HSTU
from integrations.hstu.user_behavior_schema import collate
from integrations.hstu.weights import load_model
from integrations.onnx.encoder import OnnxRuntimeEncoder
from integrations.onnx.files import compiled_graph
from integrations.onnx.session import open_session
from tests.kernel_examples import InterpretedEncoder

COMPILED, ONNXRUNTIME, CUDA = "torch_compiled", "onnxruntime", "CUDAExecutionProvider"
STATE_LIMIT, LOG_PROB_LIMIT = 1e-4, 1e-4
TOP = 10
USERS = (1, 8, 32)
SIZES: Mapping[str, Sequence[int]] = {"a": USERS, "b": USERS, "c1": USERS, "c": (1,)}
"""How many users ask an encoder of each size at once."""
KEPT_BYTES = 2 << 30
MANY_ITEMS = 1_000_000


class _TwoShapes(CompiledTorchEncoder):
    """Compiled for one user and for eight, with the longest history."""

    batches, shortest = (1, 8), sys.maxsize


class _Launched(TritonEncoder):
    """The kernels are launched one by one, where the encoder would replay the graphs it recorded."""

    def _recorder(self) -> Record:
        return lambda encode, inputs: lambda: encode(*inputs)


Encoder: TypeAlias = TorchEncoder | OnnxRuntimeEncoder
ENCODERS: Mapping[str, Callable[..., Encoder]] = {
    "torch": TorchEncoder,
    "triton": TritonEncoder,
    COMPILED: _TwoShapes,
    ONNXRUNTIME: OnnxRuntimeEncoder,
}


def cases(*, quick: bool) -> Iterator[Case]:
    lengths = (1, 12, 40) if quick else (1, 31, 64, 65, 200)
    names = [name for name in ENCODERS if not (quick and name == COMPILED)]  # it compiles for a minute
    yield from _encoder_cases(DEVICE, names, lengths, rounds=3 if quick else 31, speeds={"a": (1,)} if quick else SIZES)
    yield from first_gpu_training.cases(quick=quick)


def _encoder_cases(
    device: str, names: Sequence[str], lengths: Sequence[int], *, rounds: int, speeds: Mapping[str, Sequence[int]]
) -> Iterator[Case]:
    sizes, longest = f"ml-100k, {', '.join(map(str, lengths))} events", f"ml-100k, {lengths[-1]} events"
    for name in names:
        yield Case(Label(f"encoder {name}", sizes, "fp32"), partial(_encoded, device, name, lengths))
        label = Label(f"encoder {name}, what it kept continued", longest, "fp32")
        yield Case(label, partial(_kept, device, name, lengths[-1]))
        label = Label(f"encoder {name}, loaded and asked while another one serves", sizes, "fp32")
        yield Case(label, partial(_beside, device, name, lengths, rounds))
    for model, counts in speeds.items():
        for users in counts:
            for name in names:
                label = Label(f"encoder {name}, time", f"model {model}, {users} users", "fp32")
                yield Case(label, partial(_encoder_speed, device, name, model, users, rounds))
        label = Label("encoder triton, its graphs replayed, time", f"model {model}, 1 user", "fp32")
        yield Case(label, partial(_replay_speed, device, model, rounds))
    for users in (USERS[0], USERS[-1]):
        label = Label("encoder triton, nearest on the GPU, time", f"model b, {MANY_ITEMS:,} items, {users} users", "fp32")
        yield Case(label, partial(_index_speed, device, users, rounds))


@contextmanager
def _ready(name: str, bundles: AbstractContextManager[Bundle]) -> Iterator[Bundle]:
    """The bundle with what this encoder needs of it: ONNX Runtime its graphs, which are compared with PyTorch's as they are made."""
    if name == ONNXRUNTIME and find_spec(name) is None:
        raise NotHere(f"{name} is not installed")
    with bundles as bundle:
        if name != ONNXRUNTIME:
            yield bundle
            return
        made = with_graphs(BundleStore(bundle.path.parent))
        if DEVICE == "cuda" and CUDA not in open_session(compiled_graph(made, "retrieve")).get_providers():
            raise NotHere(f"this ONNX Runtime cannot start its {CUDA}")
        yield made


def _loaded(device: str, name: str, bundle: Bundle, **options: Any) -> Encoder:
    encoder = InterpretedEncoder(**options) if (device, name) == ("cpu", "triton") else ENCODERS[name](**options)
    encoder.load(bundle)
    return encoder


def _compared(bundle: Bundle, answers: Sequence[Any], histories: Sequence[UserSequence]) -> Finding:
    exact = exact_states(bundle, histories)[:, 0]
    vectors = torch.from_numpy(np.array(bundle.item_vectors[1:])).double()
    nearest = torch.topk(exact @ vectors.T, TOP).indices + 1
    same = sum(set(answer.items.tolist()) == set(row) for answer, row in zip(answers, nearest.tolist(), strict=True))
    states = torch.from_numpy(np.stack([answer.state for answer in answers]))
    return Finding(error_of(states, exact), STATE_LIMIT, note=f"{same} of {len(answers)} users have the same {TOP} items")


def _encoded(device: str, name: str, lengths: Sequence[int]) -> Finding:
    with _ready(name, example()) as bundle:
        histories = [history(length, len(bundle.item_vectors) - 1, seed) for seed, length in enumerate(lengths)]
        return _asked_of(_loaded(device, name, bundle, state_bytes=0), bundle, histories)


def _kept(device: str, name: str, length: int) -> Finding:
    with _ready(name, example()) as bundle:
        whole = history(length, len(bundle.item_vectors) - 1, 0)
        encoder = _loaded(device, name, bundle, keep_from=1)
        for known in (length // 2, length):
            answer = encoder.infer(EncodeRequest(beginning(whole, known), TOP, user_id="ann"))
        kept, found = encoder.kept(), _compared(bundle, [answer], [whole])
    if kept["hit_rows"] != length // 2 - 1 or kept["failures"]:
        return dataclasses.replace(found, error=float("nan"), note=f"not continued: {kept}")
    return found


def _beside(device: str, name: str, lengths: Sequence[int], rounds: int) -> Finding:
    """The states of both. On a GPU the triton encoders record their CUDA graphs and replay them on one device, from two threads."""
    if (device, name) == ("cpu", "triton"):
        raise NotHere("CUDA graphs are recorded and replayed on a GPU only")
    with _ready(name, example()) as bundle, ThreadPoolExecutor(1) as thread:
        histories = [history(length, len(bundle.item_vectors) - 1, seed) for seed, length in enumerate(lengths)]
        serving, began, over = _loaded(device, name, bundle, state_bytes=0), Event(), Event()

        def serve() -> list[Finding]:
            findings = []
            try:
                while not over.is_set():
                    findings.append(_asked_of(serving, bundle, histories))
                    began.set()
            finally:
                began.set()
            return findings

        meanwhile = thread.submit(serve)
        try:
            began.wait()
            late = _loaded(device, name, bundle, state_bytes=0)
            found = [_asked_of(late, bundle, histories[: number % len(histories) + 1]) for number in range(rounds)]
        finally:
            over.set()
        served = meanwhile.result()
    error = np.max([one.error for one in (*found, *served)])
    return Finding(float(error), STATE_LIMIT, note=f"{len(served)} batches answered by the other one meanwhile")


def _asked_of(encoder: Encoder, bundle: Bundle, histories: Sequence[UserSequence]) -> Finding:
    return _compared(bundle, encoder.batch_infer([EncodeRequest(one, TOP) for one in histories]), histories)


def _encoder_speed(device: str, name: str, model: str, users: int, rounds: int) -> Finding:
    """From requests to the nearest items: beside eager HSTU and topk there, and of known users, each with a new event. One user's are
    compared.
    """
    if (device, name) == ("cpu", "triton"):
        raise NotHere(INTERPRETED)
    with _ready(name, _of_size(model)) as bundle:
        length, items = MODELS[model]["max_history"], MODELS[model]["items"]
        histories = [history(length, items, seed) for seed in range(users)]
        cold = [EncodeRequest(one, TOP) for one in histories]
        off, keeping = (_loaded(device, name, bundle, state_bytes=size, keep_from=1) for size in (0, KEPT_BYTES))
        known = [replace(one, user_id=f"user {number}") for number, one in enumerate(cold)]
        growing = (
            [replace(one, sequence=beginning(one.sequence, events)) for one in known]
            for events in range(length - rounds - WARMING - 1, length)
        )
        keeping.batch_infer(next(growing))
        runs = partial(off.batch_infer, cold), _eager(device, bundle, histories), lambda: keeping.batch_infer(next(growing))
        ms, eager_ms, kept_ms = wall_ms(*runs, rounds=rounds)
        found = _compared(bundle, off.batch_infer(cold), histories) if users == 1 else Finding()
        keeping.close()
    return dataclasses.replace(found, ms=ms, eager_ms=eager_ms, note=f"of known users with a new event each: {kept_ms:.3f} ms")


def _replay_speed(device: str, model: str, rounds: int) -> Finding:
    if device == "cpu":
        raise NotHere(INTERPRETED)
    with _of_size(model) as bundle:
        request = EncodeRequest(history(MODELS[model]["max_history"], MODELS[model]["items"], 0), TOP)
        replaying, launching = TritonEncoder(state_bytes=0), _Launched(state_bytes=0)
        for encoder in (replaying, launching):
            encoder.load(bundle)
        ms, launched_ms = wall_ms(partial(replaying.infer, request), partial(launching.infer, request), rounds=rounds)
    return Finding(ms=ms, eager_ms=launched_ms, note="eager: the same kernels, launched one by one")


def _index_speed(device: str, users: int, rounds: int) -> Finding:
    """From requests to the nearest of many items, searched on the GPU and on the CPU."""
    if device == "cpu":
        raise NotHere(INTERPRETED)
    with _of_size("b", items=MANY_ITEMS) as bundle:
        asked = [EncodeRequest(history(MODELS["b"]["max_history"], MANY_ITEMS, seed), TOP) for seed in range(users)]
        encoders = [_loaded(device, "triton", bundle, state_bytes=0, index=index) for index in ("cuda", "exact")]
        ms, exact_ms = wall_ms(*(partial(encoder.batch_infer, asked) for encoder in encoders), rounds=rounds)
        answers = [[one.items.tolist() for one in encoder.batch_infer(asked)] for encoder in encoders]
    same = sum(one == other for one, other in zip(*answers, strict=True))
    return Finding(ms=ms, eager_ms=exact_ms, note=f"eager: nearest on the CPU; {same} of {users} users have the same {TOP} items in order")


@contextmanager
def _of_size(model: str, **changed: int) -> Iterator[Bundle]:
    sizes = {**MODELS[model], **changed}
    record = ModelRecord(family="hstu", config={**sizes, "max_length": sizes["max_history"] + 11})
    with tempfile.TemporaryDirectory() as folder, published(Path(folder), record) as bundle:
        yield bundle


def _eager(device: str, bundle: Bundle, histories: Sequence[UserSequence]) -> Callable[[], object]:
    model = load_model(bundle)
    assert isinstance(model, HSTU)
    naive, vectors = NaiveHSTU(model).eval().to(device), torch.from_numpy(np.array(bundle.item_vectors[1:])).to(device)

    @torch.inference_mode()
    def encode() -> object:
        columns = collate(histories, model.config.max_history).tensors()
        states = naive(*(columns[name].to(device) for name in ("items", "times", "next_times", "lengths")))
        return [found.cpu() for found in torch.topk(states @ vectors.T, TOP)]

    return encode
