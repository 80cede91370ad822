"""Backends of a stage that doubles numbers. Each behaves as its class's attributes say at the time, so it can break and be repaired."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from cluster.bundle import CATALOGUE, FIRST_SEEN, ITEM_VECTORS, POPULARITY, WEIGHTS, Bundle, ModelRecord
from cluster.bundle_store import BundleStore
from cluster.engines.stage_rules import StageRules
from cluster.values import Availability
from tests.fakes.clock import Clock

RULES: StageRules[int, float] = StageRules(
    nonsense=lambda request, answer: "answered with NaN" if math.isnan(answer) else "",
    disagreement=lambda reference, answer: "" if abs(reference - answer) < 0.01 else f"{answer} is not {reference}",
)


CLOCK = Clock()


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


class Keeping(Scripted):
    """Knows users: requests of 1000 and more. All but the first time it answers them in `again_s`."""

    log: ClassVar[list[str]] = []
    again_s: ClassVar[float] = 0.0
    hits: ClassVar[float] = 0
    misses: ClassVar[float] = 0
    not_looked_up: ClassVar[float] = 0

    def batch_infer(self, requests: Sequence[int]) -> list[float]:
        known = max(requests) >= 1000 and self.log[-1] == "user"
        answers = super().batch_infer(requests)
        CLOCK.advance(self.again_s - self.seconds if known else 0)
        self.log.append("user" if max(requests) >= 1000 else "none")
        return answers

    def forget(self, tenant: str, user: str) -> int:
        self.log.append(f"forget {user} of {tenant}")
        return 1

    def kept(self) -> dict[str, float]:
        return {"hits": self.hits, "misses": self.misses, "not_looked_up": self.not_looked_up}


class Queued(Scripted):
    """An engine with a queue of its own. `poison` breaks a request, `pieces` bounds what a stream yields before it breaks."""

    log: ClassVar[list[str]] = []
    dead: ClassVar[bool] = False
    pieces: ClassVar[int] = 10**9
    most: ClassVar[int] = 0
    running: ClassVar[int] = 0

    def declines(self, request: int) -> str:
        return "does not take odd tenants" if request == 77 else ""

    def alive(self) -> bool:
        return not self.dead

    def queue(self) -> dict[str, float]:
        return {"waiting": 3.0}

    async def ainfer(self, request: int) -> float:
        cls = type(self)
        cls.running += 1
        cls.most = max(cls.most, cls.running)
        try:
            await asyncio.sleep(0)
            return self.batch_infer([request])[0]
        finally:
            cls.running -= 1

    async def astream(self, request: int) -> AsyncIterator[float]:
        for number in range(3):
            if number >= self.pieces:
                raise self.error or RuntimeError("broke midway")
            yield 2.0 * request + number


ALL = (First, Second, Third, Queued, Keeping)
TABLE = {cls.__name__.lower(): f"{__name__}:{cls.__name__}" for cls in (First, Second, Third)}
QUEUED_TABLE = {**TABLE, "queued": f"{__name__}:Queued"}
_PRISTINE = {name: getattr(cls, name) for cls in (Scripted, Queued, Keeping) for name in cls.__annotations__ if name != "log"}


def reset() -> None:
    """Make every backend work again, and forget what was called."""
    for cls in ALL:
        cls.log.clear()
        for name, value in _PRISTINE.items():
            setattr(cls, name, value)


def opaque_bundle(root: Path) -> Bundle:
    """A published bundle with files that cannot be read: enough for code that only passes it on."""
    with BundleStore(root).publish(ModelRecord(family="none", config={})) as draft:
        (draft.path / WEIGHTS).write_bytes(b"weights")
        (draft.path / CATALOGUE).write_bytes(b"catalogue")
        for name in (POPULARITY, FIRST_SEEN, ITEM_VECTORS):
            np.save(draft.path / name, np.zeros(1, np.int64))
    return BundleStore(root).open()
