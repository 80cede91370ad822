"""With `selection: fastest`: time the loaded backends of a stage, and exclude those that disagree with the reference.

An excluded one may be fast, but it is not the same model.
"""

import asyncio
from collections.abc import Sequence
from itertools import product
from statistics import median
from typing import Generic, TypeVar

from cluster.engines.managed_backend import ManagedBackend
from cluster.engines.roster import Roster
from cluster.engines.skipped import all_answered
from cluster.engines.stage_rules import StageRules

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
MEASURED_ROUNDS = 5


class Measuring(Generic[RequestT, AnswerT]):
    """The reference is the last backend in the order that can answer; where that changes, everything is measured anew."""

    def __init__(self, rules: StageRules[RequestT, AnswerT], roster: Roster[RequestT, AnswerT]) -> None:
        self._rules, self._roster, self._reference, self._turn = rules, roster, "", asyncio.Lock()

    async def measure(self, samples: Sequence[RequestT]) -> None:
        """Time what has not been timed."""
        async with self._turn:
            if (ready := self._roster.ready()) and ready[-1].name != self._reference:
                for backend in self._roster:
                    backend.measured_ms, backend.exclusion = None, ""
                ready = self._roster.ready()
            if any(backend.measured_ms is None for backend in ready):
                await self._measure(ready, samples)

    async def _measure(self, ready: Sequence[ManagedBackend[RequestT, AnswerT]], samples: Sequence[RequestT]) -> None:
        answers = [(backend, await backend.rehearse(samples)) for backend in ready]
        sound = [(backend, found) for backend, found in answers if all_answered(found)]
        self._reference = sound[-1][0].name if sound else ""
        if not sound:
            return
        expected = sound[-1][1]
        new = [(backend, found) for backend, found in sound if backend.measured_ms is None]
        times = await median_ms([backend for backend, _ in new], samples)
        for (backend, found), measured_ms in zip(new, times, strict=True):
            if backend.loaded:
                problems = map(self._rules.disagreement, expected, found)
                backend.measured_ms = measured_ms
                backend.exclusion = next((f"disagrees with {self._reference}: {problem}" for problem in problems if problem), "")


async def median_ms(backends: Sequence[ManagedBackend[RequestT, AnswerT]], samples: Sequence[RequestT]) -> list[float | None]:
    """Of calls in turns, so that what slows the machine for a while slows them all; None for one that broke while it was timed."""
    durations: dict[str, list[float]] = {backend.name: [] for backend in backends}
    broken = set()
    for _, backend in product(range(MEASURED_ROUNDS), backends):
        if backend.name in broken:
            continue
        if not all_answered(await backend.rehearse(samples)):
            broken.add(backend.name)
        durations[backend.name].append(backend.rehearsed_ms)
    return [None if name in broken else median(times) for name, times in durations.items()]
