"""Backends of a stage that doubles numbers. Each behaves as its class's attributes say at the time, so it can break and be repaired."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from cluster.bundle import CATALOGUE, POPULARITY, WEIGHTS, Bundle, BundleStore, ModelRecord
from cluster.stage_rules import StageRules
from cluster.values import Availability

RULES: StageRules[int, float] = StageRules(
    nonsense=lambda request, answer: "answered with NaN" if math.isnan(answer) else "",
    disagreement=lambda reference, answer: "" if abs(reference - answer) < 0.01 else f"{answer} is not {reference}",
)


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


CLOCK = FakeClock()


class Scripted:
    missing: ClassVar[str] = ""
    load_error: ClassVar[Exception | None] = None
    error: ClassVar[Exception | None] = None
    poison: ClassVar[frozenset[int]] = frozenset()
    largest_batch: ClassVar[int] = 10**9
    answers: ClassVar[list[float] | None] = None
    offset: ClassVar[float] = 0.0
    seconds: ClassVar[float] = 0.0
    log: ClassVar[list[str]] = []

    def get_availability(self, bundle: Bundle) -> Availability:
        return Availability.no(self.missing) if self.missing else Availability.yes()

    def load(self, bundle: Bundle) -> None:
        self.log.append("load")
        if self.load_error:
            raise self.load_error

    def infer(self, request: int) -> float:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[int]) -> list[float]:
        self.log.append(f"batch of {len(requests)}")
        CLOCK.advance(self.seconds)
        if self.error:
            raise self.error
        if self.poison & set(requests) or len(requests) > self.largest_batch:
            raise RuntimeError("cannot digest it")
        return [2.0 * request + self.offset for request in requests] if self.answers is None else self.answers

    def close(self) -> None:
        self.log.append("close")


class First(Scripted):
    log: ClassVar[list[str]] = []


class Second(Scripted):
    log: ClassVar[list[str]] = []


class Third(Scripted):
    log: ClassVar[list[str]] = []


ALL = (First, Second, Third)
TABLE = {cls.__name__.lower(): f"{__name__}:{cls.__name__}" for cls in ALL}
_PRISTINE = {name: getattr(Scripted, name) for name in Scripted.__annotations__ if name != "log"}


def reset() -> None:
    """Make every backend work again, and forget what was called."""
    for cls in ALL:
        cls.log.clear()
        for name, value in _PRISTINE.items():
            setattr(cls, name, value)


def opaque_bundle(root: Path) -> Bundle:
    """A published bundle whose files nobody can read: enough for whoever only passes it on."""
    with BundleStore(root).publish(ModelRecord(family="none", config={})) as draft:
        (draft.path / WEIGHTS).write_bytes(b"weights")
        (draft.path / CATALOGUE).write_bytes(b"catalogue")
        np.save(draft.path / POPULARITY, np.zeros(1, np.int64))
    return BundleStore(root).open()
