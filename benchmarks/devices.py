"""The device that programs for a first run on a GPU find, how far from float64 and how fast something is on it."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # triton heeds it as it is imported, as transformers does: this module is to come first

_KERNEL_ROUNDS, _REP_MS = 5, 20
WARMING = 2
"""Calls of each that do not count, before the timed ones."""
INTERPRETED = "Triton runs in its interpreter here; its speed says nothing of a GPU's"


def described() -> str:
    """The device by its name, with what a driver and a toolkit it has."""
    if not torch.cuda.is_available():
        return f"CPU, torch {torch.__version__}"
    major, minor = torch.cuda.get_device_capability()
    return f"{torch.cuda.get_device_name()} (sm_{major}{minor}), CUDA {torch.version.cuda}, torch {torch.__version__}"


def worst_error(ours: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest error among tensors, relative to the largest magnitude in each, and which tensor has it. NaN is the largest."""
    errors = {name: error_of(ours[name], expected) for name, expected in exact.items()}
    name = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return errors[name], name


def error_of(ours: Tensor, exact: Tensor) -> float:
    difference = (ours.detach().cpu().double() - exact).abs().max() if exact.numel() else torch.zeros(())
    return float(difference / exact.abs().max().clamp(min=torch.finfo(torch.float32).tiny))


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that torch hands out holds NaN: what a kernel leaves unwritten shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # under which torch fills it
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def kernel_ms(*runs: Callable[[], object]) -> list[float]:
    """The median of each on a GPU, its caches cleared between calls; they are measured in turns."""
    from triton.testing import do_bench  # noqa: PLC0415 - once it is known whether triton interprets

    return _in_turns([partial(do_bench, run, rep=_REP_MS, return_mode="median") for run in runs], _KERNEL_ROUNDS)


def wall_ms(*runs: Callable[[], object], rounds: int) -> list[float]:
    """The median of each one's whole calls, the host's part among them; they take turns, the first WARMING of each do not count."""
    for run in runs * WARMING:
        run()
    return _in_turns([partial(_call_ms, run) for run in runs], rounds)


def _in_turns(timed: Sequence[Callable[[], float]], rounds: int) -> list[float]:
    """Medians of so many rounds, each begun by another one."""
    taken: list[list[float]] = [[] for _ in timed]
    for number in range(rounds):
        for place in range(len(timed)):
            at = (number + place) % len(timed)
            taken[at].append(timed[at]())
    return [median(one) for one in taken]


def _call_ms(run: Callable[[], object]) -> float:
    synchronize()
    began = time.perf_counter()
    run()
    synchronize()
    return (time.perf_counter() - began) * 1e3


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
