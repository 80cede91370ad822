"""Contenders that do the same work in turns, so that the machine's other work falls on all of them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.allocations import minor_faults
from cluster.engines.buffers import BufferPool

Turn: TypeAlias = Callable[[int], int]
"""Does what the round of this number asks for, and says how many requests that was."""


class FreshMemory(BufferPool):
    """The naive way: an array of its own for each call."""

    def array(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Any:  # noqa: ARG002 - the pool's interface
        return np.empty(shape, dtype)

    def zeros(self, name: str, shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> Any:  # noqa: ARG002
        return np.zeros(shape, dtype)


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


def run_in_turns(contenders: Sequence[Contender], rounds: int) -> None:
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            contender.take_turn(number)
