"""With `selection: fastest`: time the loaded backends of a stage, and exclude those that disagree with the reference.

An excluded backend may be fast, but it does not compute the same model. Where a stage's engines may keep users' states, samples are timed
one by one, and the last also as that of a user that returns with a new last event; these times count by the share of such users.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf
from statistics import fmean, median
from typing import Generic, TypeVar

from cluster.engines.managed_backend import ManagedBackend
from cluster.engines.roster import Roster
from cluster.engines.skipped import all_answered
from cluster.engines.stage_rules import REHEARSING, StageRules

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
logger = logging.getLogger(__name__)
MEASURED_ROUNDS = 5
UNSEEN_SHARE = 0.5
SEEN = ("hits", "misses", "not_looked_up")
TIMES_HOLD_S = 600.0
"""Times of all backends that are younger than this are compared with those of one that appears: each of its loads would cost all others."""
SEEN_FROM = 1000
"""Once engines that keep users' states have had so many requests, the share of hits among these counts, in tenths, not UNSEEN_SHARE."""


@dataclass(frozen=True, slots=True)
class Times:
    """A backend's times: for the samples as histories that it never met, and for the last as that of a returning user: it may keep the
    states of all but its last event. Both are of one request where a stage tells them apart.
    """

    new_ms: float
    returning_ms: float

    def mean(self, returning: float) -> float:
        """The mean time, with this share of returning users."""
        return (1 - returning) * self.new_ms + returning * self.returning_ms


class Measuring(Generic[RequestT, AnswerT]):
    """The reference is the last backend of the order that answers and is not excluded; if all that answer are excluded, the last of them.
    Where that changes, or is loaded anew, perhaps with other options, everything is measured anew.
    """

    def __init__(
        self, stage: str, rules: StageRules[RequestT, AnswerT], roster: Roster[RequestT, AnswerT], clock: Callable[[], float]
    ) -> None:
        self._clock, self._all_timed_at = clock, -inf
        self._stage, self._rules, self._roster, self._turn = stage, rules, roster, asyncio.Lock()
        # for which last backend, and which of its loads, all were measured anew; it is the reference unless it fails a sample
        self._last: tuple[ManagedBackend[RequestT, AnswerT], int] | None = None
        self._times: dict[ManagedBackend[RequestT, AnswerT], Times] = {}
        self._share: float | None = None

    async def measure(self, samples: Sequence[RequestT]) -> None:
        """Time the backends where one has not been timed, and weigh all times by the present share of returning users."""
        async with self._turn:
            usable = self._roster.ready()
            fit = [backend for backend in usable if not backend.exclusion] or usable  # the one that they disagree with is gone
            if fit and (last := (fit[-1], fit[-1].loads)) != self._last:
                self._last = last
                for backend in self._roster:
                    backend.measured_ms = None
            ready = [backend for backend in usable if not backend.exclusion or backend.measured_ms is None]
            share, anew = self._returning(), any(backend.measured_ms is None for backend in ready)
            if anew:
                await self._measure(ready, fit, samples)
                for backend in ready:
                    if backend.measured_ms is None:
                        backend.exclusion = ""  # not before: what is excluded is not asked while it is measured
            if anew or share != self._share:
                self._weigh(share)

    def _returning(self) -> float:
        """The configured share of returning users or, rounded to tenths, the share that engines have seen."""
        if (configured := self._roster.choice.returning) is not None:
            return configured
        figures = [backend.kept() for backend in self._roster]
        hits, seen = (sum(kept.get(name, 0) for kept in figures for name in names) for names in (("hits",), SEEN))
        return round(hits / seen, 1) if seen >= SEEN_FROM else UNSEEN_SHARE

    async def _measure(
        self,
        ready: Sequence[ManagedBackend[RequestT, AnswerT]],
        fit: Sequence[ManagedBackend[RequestT, AnswerT]],
        samples: Sequence[RequestT],
    ) -> None:
        """Time those of `ready` that have no time and, where one of them then has, and the others' are old, all of them in turns: times of
        another hour tell nothing beside it. The reference is the last of `fit` to answer the samples, else of `ready`.
        """
        answers = [(backend, await backend.rehearse(samples, loads=False)) for backend in ready]
        sound = [(backend, found) for backend, found in answers if all_answered(found)]
        if not sound:
            return
        reference, expected = next((one for one in reversed(sound) if one[0] in fit), sound[-1])
        new = [backend for backend, _ in sound if backend.measured_ms is None]
        times = await self._timed(new, samples)
        together = len(new) == len(sound)
        if times and not together and self._clock() - self._all_timed_at >= TIMES_HOLD_S:
            times |= await self._timed([backend for backend, _ in sound], samples)
            together = True
        if together:
            self._all_timed_at = self._clock()
        for backend, found in sound:
            if backend.loaded and backend in times:
                problems = map(self._rules.disagreement, expected, found)
                self._times[backend], backend.measured_ms = times[backend], times[backend].new_ms
                backend.exclusion = next((f"disagrees with {reference.name}: {problem}" for problem in problems if problem), "")

    async def _timed(
        self, backends: Sequence[ManagedBackend[RequestT, AnswerT]], samples: Sequence[RequestT]
    ) -> dict[ManagedBackend[RequestT, AnswerT], Times]:
        """The times of each backend, without those that broke while they were timed. A backend that cannot forget a user is given none."""
        if (again := self._rules.returning) is None:
            taken = await median_ms(backends, lambda _: samples)
            return {one: Times(taken[one.name], taken[one.name]) for one in backends if one.name in taken}
        keeping = [backend for backend in backends if backend.forgets]
        returning = await median_ms(keeping, lambda number: [again(samples[-1], number)])
        for backend in keeping:
            await backend.forget([REHEARSING])
        left = [one for one in backends if one not in keeping or one.name in returning]
        each = [await median_ms(left, lambda _, sample=sample: [sample]) for sample in samples]  # type: ignore[misc]
        new = {one.name: fmean(times[one.name] for times in each) for one in left if all(one.name in times for times in each)}
        return {one: Times(new[one.name], returning.get(one.name, each[-1][one.name])) for one in left if one.name in new}

    def _weigh(self, share: float) -> None:
        """Weigh the times of all backends by this share of returning users, and log them and the fastest backend."""
        self._share = share
        timed = {backend: times for backend, times in self._times.items() if backend in self._roster and backend.measured_ms is not None}
        self._times = timed
        for backend, times in timed.items():
            backend.measured_ms = times.mean(share)
        if timed:
            logger.info("%s", self._told(share, sorted(timed, key=lambda backend: timed[backend].mean(share))))

    def _told(self, share: float, backends: Iterable[ManagedBackend[RequestT, AnswerT]]) -> str:
        def figures(backend: ManagedBackend[RequestT, AnswerT]) -> str:
            times = self._times[backend]
            parts = f" (new {times.new_ms:.2f}, returning {times.returning_ms:.2f})" if self._rules.returning else ""
            return f"{backend.name} {times.mean(share):.2f} ms{parts}" + (f", which {backend.exclusion}" if backend.exclusion else "")

        users = f", {share:.0%} of users returning" if self._rules.returning else ""
        return f"fastest {self._stage}{users}: {'; '.join(map(figures, backends))}"


async def median_ms(
    backends: Sequence[ManagedBackend[RequestT, AnswerT]], samples: Callable[[int], Sequence[RequestT]]
) -> dict[str, float]:
    """Backend's name -> its median time, without backends that broke. They are called in turns, so that what slows the machine for a while
    slows them all. `samples`: gives the requests of each round; the first round is not counted: there, no user has returned yet.
    """
    durations: dict[str, list[float]] = {backend.name: [] for backend in backends}
    broken = set()
    for number, backend in product(range(MEASURED_ROUNDS + 1), backends):
        if backend.name in broken:
            continue
        if not all_answered(await backend.rehearse(samples(number), loads=False)):
            broken.add(backend.name)
        elif number:
            durations[backend.name].append(backend.rehearsed_ms)
    return {name: median(times) for name, times in durations.items() if name not in broken}
