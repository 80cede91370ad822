"""Cases of first_gpu.py: torch_beam and vLLM on the device, against the decoder in float64 on the CPU.

How fast they are is told beside Hugging Face's beam search, in turns.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from msgspec.structs import replace

from benchmarks.devices import DEVICE, WARMING, wall_ms
from benchmarks.first_gpu_bundles import exact_decoder, exact_states, example, history
from benchmarks.guarded import Case, Finding, Label, NotHere
from benchmarks.naive_transformers import NaiveTransformers
from cluster.bundle import Bundle
from cluster.protocols import Backend
from cluster.values import Generated, GenerateRequest, UserState
from integrations.decoder.model import SemanticIdDecoder
from integrations.torch_beam.generator import TorchBeamGenerator
from integrations.vllm import library
from integrations.vllm.generator import VllmGenerator
from tests.bundles import make_generative_bundle

LIMITS = {"fp32": 1e-4, "bf16": 0.15}
"""Of an item's log-probability, absolute."""
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
TOP = 10
USERS = (1, 8, 32)
WIDE, WIDE_ITEMS = (1100, 4), 3000
"""Codes of the first two levels, more than the 1,024 that some of vLLM's samplers can tell apart, and the items that they name."""

Generator: TypeAlias = Backend[GenerateRequest, Generated]
Load: TypeAlias = Callable[[Bundle], Generator]


def cases(*, quick: bool) -> Iterator[Case]:
    lengths = (1, 12, 40) if quick else (1, 31, 64, 65, 200)
    sizes = f"ml-100k, {', '.join(map(str, lengths))} events"
    vllm = "fp32" if DEVICE == "cpu" else "bf16"
    kinds: Sequence[tuple[str, str, Load]] = ("torch_beam", "fp32", _torch_beam), ("vllm", vllm, partial(_vllm, DTYPES[vllm]))
    for name, dtype, load in kinds:
        yield Case(Label(name, sizes, dtype), partial(_generated, load, example, lengths, LIMITS[dtype]))
        if quick and name == "vllm":  # each case starts its engine anew
            continue
        label = Label(f"{name}, wide", f"{WIDE_ITEMS} items, {WIDE[0]} codes of the first level", dtype)
        yield Case(label, partial(_generated, load, _wide, lengths, LIMITS[dtype]))
        for users in USERS[:1] if quick else USERS:
            label = Label(f"{name}, time", f"ml-100k, {users} users", dtype)
            yield Case(label, partial(_speed, load, DEVICE, users, 3 if quick else 31))


def _torch_beam(bundle: Bundle) -> Generator:
    generator = TorchBeamGenerator()
    generator.load(bundle)
    return generator


def _vllm(dtype: str, bundle: Bundle) -> Generator:
    if obstacle := library.obstacle():
        raise NotHere(obstacle)
    generator = VllmGenerator(dtype)
    generator.load(bundle)
    return generator


@contextmanager
def _wide() -> Iterator[Bundle]:
    """Random weights, and as many codes as WIDE says."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            bundle = make_generative_bundle(Path(folder) / "wide", items=WIDE_ITEMS, sizes=WIDE)
        except ImportError as error:
            raise NotHere(f"a catalogue cannot be written: {error}") from None
        yield bundle


def _prompts(bundle: Bundle, lengths: Sequence[int]) -> list[UserState]:
    """As the encoder gives them: the states after the latest events, and those events."""
    prompts = []
    for seed, length in enumerate(lengths):
        whole, count = history(length, len(bundle.item_vectors) - 1, seed), min(length, bundle.prompt_length)
        columns = {name: getattr(whole, name)[-count:] for name in ("items", "timestamps", "actions", "values")}
        prompts.append(UserState(exact_states(bundle, [whole], count)[0].float().numpy(), replace(whole, **columns)))
    return prompts


def _asked(prompts: Sequence[UserState]) -> list[GenerateRequest]:
    return [GenerateRequest(prompt, TOP, 2 * TOP, blocked=np.empty(0, np.int32)) for prompt in prompts]


def _generated(load: Load, bundles: Callable[[], AbstractContextManager[Bundle]], lengths: Sequence[int], limit: float) -> Finding:
    """The log-probability of every item that was found, against the decoder's own in float64."""
    with bundles() as bundle, closing(load(bundle)) as generator:
        prompts = _prompts(bundle, lengths)
        answers = generator.batch_infer(_asked(prompts))
        decoder = exact_decoder(bundle)
        errors = [
            abs(float(log_prob) + _loss_of(decoder, prompt, int(item)))
            for prompt, answer in zip(prompts, answers, strict=True)
            for item, log_prob in zip(answer.items, answer.log_probs, strict=True)
        ]
    return Finding(float(np.max(errors)), limit, note=f"absolute, in the log-probabilities of {len(errors)} items")


def _loss_of(decoder: SemanticIdDecoder, prompt: UserState, item: int) -> float:
    targets = torch.zeros(len(prompt), dtype=torch.int64)
    targets[-1] = item
    states = torch.from_numpy(prompt.states).double()
    with torch.inference_mode():
        return float(decoder.loss(decoder.batch([decoder.columns(prompt.sequence, states, targets)])))


def _speed(load: Load, device: str, users: int, rounds: int) -> Finding:
    """Other users in every round, so that nothing is known of their prompts."""
    with example() as bundle, closing(load(bundle)) as generator:
        prompts = _prompts(bundle, [100 + number % 64 for number in range(users * (WARMING + rounds))])
        groups = [_asked(prompts[start : start + users]) for start in range(0, len(prompts), users)]
        naive = NaiveTransformers(bundle, device)
        ours, theirs = (map(one.batch_infer, groups) for one in (generator, naive))
        ms, eager_ms = wall_ms(partial(next, ours), partial(next, theirs), rounds=rounds)
        same = _alike(generator.batch_infer(groups[0]), naive.batch_infer(groups[0]))
    return Finding(ms=ms, eager_ms=eager_ms, note=f"eager: Hugging Face's beam search; {same} of {users} users have its items")


def _alike(ours: Sequence[Generated], theirs: Sequence[Generated]) -> int:
    return sum(set(one.items.tolist()) == set(other.items.tolist()) for one, other in zip(ours, theirs, strict=True))
