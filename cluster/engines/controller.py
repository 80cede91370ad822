"""The framework controller: of a stage's backends, ask the first that can answer, and say why the others were not asked.

    encoder=onnxruntime (tensorrt: no engine for sm_90 in models/ml-1m/3; run: genrec compile)

An answer is never an error because an engine is: what one backend cannot answer, the next one is asked.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from statistics import median
from typing import Any, ClassVar, Generic, Literal, Self, TypeGuard, TypeVar

from cluster import registry
from cluster.bundle import Bundle
from cluster.config import EngineSettings
from cluster.engines.breaker import BreakerSettings, BreakerState
from cluster.engines.managed_backend import BackendSnapshot, ManagedBackend
from cluster.engines.skipped import NoBackendAnswered, OutOfTime, reasons
from cluster.engines.stage_rules import StageRules
from cluster.errors import ConfigError, UnknownChoice
from cluster.values import Availability, SkippedBackend

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
Selection = Literal["ordered", "fastest"]
MEASURED_ROUNDS = 5
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served(Generic[AnswerT]):
    """An answer, which backend gave it, and which preferred ones did not; `duration_ms` includes the time they took to fail."""

    answer: AnswerT
    backend: str
    fallback_from: tuple[SkippedBackend, ...]
    duration_ms: float


@dataclass(frozen=True, slots=True)
class StageSnapshot:
    """A stage as the operator sees it; the backends stand in the order they are asked, those left out of it at the end."""

    stage: str
    explanation: str
    backends: tuple[BackendSnapshot, ...]

    @property
    def settled(self) -> bool:
        """Whether the first choice that can run here is loaded or has failed: what serves now will serve until something changes."""
        able = [one for one in self.backends if one.rank is not None and one.available and one.enabled]
        return not able or able[0].loaded or able[0].breaker is not BreakerState.CLOSED


class FrameworkController(Generic[RequestT, AnswerT]):
    """`call`, `warm_up`, `probe` and `refresh` take turns on a lock; everything else may be called from any thread at any time.

    `table` names every backend of the stage (name -> import string), `order` those that may serve, most wanted first. `selection` "fastest"
    reorders them by speed on the requests given to `warm_up`. `retries` bounds the search for bad requests in a batch that broke (0: none).
    `options` are the keyword arguments of the backends' constructors, by name.
    Raises UnknownChoice or ConfigError where the order does not fit the table.
    """

    managed: ClassVar[type[ManagedBackend[Any, Any]]] = ManagedBackend

    @classmethod
    def configured(cls, settings: EngineSettings, bundle: Bundle, rules: StageRules[RequestT, AnswerT]) -> Self:
        """The controller of a stage as the configuration has it, over `bundle`."""
        controller = cls(
            settings.stage_name,
            registry.backends(settings.stage_name, settings.backends),
            settings.order,
            bundle,
            rules,
            selection=settings.selection,
            breaker=settings.breaker,
            probe_interval_s=settings.probe_interval_s,
            retries=settings.retries,
            options=settings.options,
        )
        for name in settings.disabled:
            controller.disable(name)
        return controller

    def __init__(
        self,
        stage: str,
        table: Mapping[str, str],
        order: Sequence[str],
        bundle: Bundle,
        rules: StageRules[RequestT, AnswerT],
        *,
        selection: Selection = "ordered",
        breaker: BreakerSettings | None = None,
        retries: int = 2,
        probe_interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.stage, self._clock, self._probe_interval_s = stage, clock, probe_interval_s
        self._rules, breaker = rules, breaker or BreakerSettings()
        self._make = partial(self.managed, bundle=bundle, rules=rules, breaker=breaker, retries=retries, clock=clock)
        self._backends: dict[str, ManagedBackend[RequestT, AnswerT]] = {}
        self._backends = self._managed(table, options or {})
        self._order, self._selection = self._checked_order(order, self._backends), _checked_selection(selection)
        self._suspects: frozenset[str] = frozenset()
        self._first: str | None = None
        self._samples: Sequence[RequestT] = ()
        self._probed_at: float | None = None
        self._serving = ""
        self._measured_against = ""
        self._refreshed = self._closed = False
        self._turn = threading.RLock()

    def call(self, requests: Sequence[RequestT]) -> list[Served[AnswerT] | NoBackendAnswered]:
        """For each request, in order, an answer or the error that says why no backend gave one."""
        with self._turn:
            began = self._clock()
            self._probe_when_due()
            outcomes: dict[int, Served[AnswerT]] = {}
            skipped: dict[int, tuple[SkippedBackend, ...]] = dict.fromkeys(range(len(requests)), ())
            for backend in self._ranked():
                waiting = [index for index in skipped if index not in outcomes and not _out_of_time(skipped[index])]
                if not waiting:
                    break
                for index, result in zip(waiting, self._ask(backend, [requests[index] for index in waiting]), strict=True):
                    if isinstance(result, SkippedBackend):
                        skipped[index] += (result,)
                    else:
                        outcomes[index] = Served(result, backend.name, skipped[index], (self._clock() - began) * 1e3)
                        backend.fallbacks += bool(skipped[index])
            self._log_change(outcomes.values())
            return [outcomes.get(index) or NoBackendAnswered(self.stage, skipped[index]) for index in skipped]

    def call_one(self, request: RequestT) -> Served[AnswerT]:
        """The answer to one request. Raises NoBackendAnswered."""
        (outcome,) = self.call([request])
        if isinstance(outcome, NoBackendAnswered):
            raise outcome
        return outcome

    def probe(self) -> dict[str, Availability]:
        """Ask every backend again whether it can run here. `call` does so itself every `probe_interval_s`."""
        with self._turn:
            self._probed_at = self._clock()
            for backend in self._backends.values():
                if not backend.loading:
                    backend.probe()
            self._measure()
            return {name: backend.availability for name, backend in self._backends.items()}

    def refresh(self) -> bool:
        """Probe if it is time to, and load every backend of the order that can be loaded: to be called about once a second after `warm_up`.
        Returns whether an engine was loaded.

        Loads then take place beside the calls, which go to another backend meanwhile, and the samples, not a user, try a repaired one.
        The status stays true while no request comes.
        """
        loaded = False
        with self._turn:
            self._probe_when_due()
            self._refreshed = bool(self._samples)
        while backend := self._next_to_load():
            try:
                if backend.load():
                    loaded = True
                    backend.rehearse(self._samples)
            finally:
                with self._turn:
                    backend.loading = False
                    if self._closed or self._backends.get(backend.name) is not backend:
                        backend.unload()
            with self._turn:
                self._measure()
        return loaded

    def warm_up(self, samples: Sequence[RequestT], ready: int = 2) -> str:
        """Load the first `ready` backends that work and let them answer `samples`; with selection "fastest", load and measure them all.

        Then neither a first call nor a first fallback waits for a load. Returns `explain()`.
        """
        if not samples:
            raise ConfigError(f"the {self.stage} backends cannot be warmed up without sample requests; give at least one")
        with self._turn:
            self._samples = list(samples)
            self.probe()
            ready = len(self._order) if self._selection == "fastest" else ready
            for backend in self._quick_to_load():
                ready -= ready > 0 and _all_answered(self._rehearse(backend))
            self._measure()
            return self.explain()

    def explain(self) -> str:
        """The backend that would be asked first now, and why the ones before it would not be."""
        skipped: list[SkippedBackend] = []
        for backend in self._ranked():
            obstacle = self._obstacle(backend)
            if obstacle is None:
                return _choice(self.stage, backend.name, skipped)
            skipped.append(obstacle)
        return _choice(self.stage, "none", skipped)

    def snapshot(self) -> StageSnapshot:
        ranked = self._ranked()
        asked = tuple(backend.snapshot(rank, self._obstacle(backend)) for rank, backend in enumerate(ranked))
        left_out = tuple(backend.snapshot(None, backend.obstacle()) for backend in self._backends.values() if backend not in ranked)
        return StageSnapshot(self.stage, self.explain(), asked + left_out)

    def enable(self, name: str) -> None:
        self._backend(name).enabled = True

    def disable(self, name: str) -> None:
        """Stop asking a backend. Disabling the last one is allowed: the pipeline then serves its own last fallback."""
        self._backend(name).enabled = False

    def prefer(self, name: str | None) -> None:
        """Ask this backend first, before order and selection, also where the order leaves it out; None: follow order and selection."""
        if name is not None:
            self._backend(name)
        self._first = name

    def suspect(self, names: Collection[str]) -> None:
        """These broke on most of the other replicas: here one failure opens their breakers, and what has not answered a request here yet
        is asked after the others. Nothing of it holds for the last one that could answer. Ends with the next call that leaves them out.
        """
        self._suspects = frozenset(names)

    def reconfigure(
        self,
        *,
        order: Sequence[str] | None = None,
        enabled: Mapping[str, bool] | None = None,
        selection: Selection | None = None,
        table: Mapping[str, str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Change what is given and leave the rest; nothing changes where something given is wrong. `options` go with a `table`: a backend
        with the same import string and options stays as it is, one that is new is loaded by `refresh`, and one that is gone is unloaded.
        """
        backends = self._backends if table is None else self._managed(table, options or {})
        new_order = self._checked_order(self._order if order is None else order, backends)
        new_selection = self._selection if selection is None else _checked_selection(selection)
        switched = [(self._known(name, backends), on) for name, on in (enabled or {}).items()]
        with self._turn:
            gone = [one for name, one in self._backends.items() if backends.get(name) is not one]
            self._backends = {**self._backends, **backends}  # so that the order names none that is not there, before and after
            self._order, self._selection = new_order, new_selection
            self._backends = backends
            for backend, on in switched:
                backend.enabled = on
            for backend in gone:
                if not backend.loading:
                    backend.unload()
            self._probed_at = None  # the next call probes

    def follow(self, settings: EngineSettings) -> None:
        """Reconfigure as the stage's settings are now."""
        self.reconfigure(
            order=settings.order,
            selection=settings.selection,
            enabled={name: name not in settings.disabled for name in settings.order},
            table=registry.backends(settings.stage_name, settings.backends),
            options=settings.options,
        )

    def forget(self, tenant: str | None, user: str | None) -> int:
        """Have every loaded backend erase what it keeps of a user: how many states that were, as they count them.

        With `user` None, of all the tenant's users; with `tenant` None too, of all users. A batch that `call` runs meanwhile ends first,
        and what it kept is erased too. A backend that breaks over it is unloaded, and the others still are told.
        """
        with self._turn:
            return sum(backend.forget(tenant, user) for backend in self._backends.values())

    def forget_all(self) -> int:
        return self.forget(None, None)

    def kept(self) -> dict[str, dict[str, float]]:
        """What the loaded backends say they keep of users, by backend."""
        return {name: kept for name, backend in self._backends.items() if (kept := backend.kept())}

    def close(self) -> None:
        """Free what the backends hold; the one that is just being loaded as soon as it is."""
        with self._turn:
            self._closed = True
            for backend in self._backends.values():
                if not backend.loading:
                    backend.unload()

    def _ask(self, backend: ManagedBackend[RequestT, AnswerT], requests: Sequence[RequestT]) -> Sequence[AnswerT | SkippedBackend]:
        obstacle = self._obstacle(backend)
        return [obstacle] * len(requests) if obstacle else backend.answer(requests)

    def _obstacle(self, backend: ManagedBackend[RequestT, AnswerT]) -> SkippedBackend | None:
        """Why it would not be asked now. Once refreshes load the backends, calls never do."""
        return backend.obstacle() or (backend.unready() if self._refreshed and not backend.loaded else None)

    def _next_to_load(self) -> ManagedBackend[RequestT, AnswerT] | None:
        """The first backend that may be asked and is not loaded; it is not asked until its load has ended."""
        with self._turn:
            waiting = (one for one in self._ranked() if self._refreshed and not one.loaded and not one.obstacle())
            backend = None if self._closed else next(waiting, None)
            if backend:
                backend.loading = True
            return backend

    def _rehearse(self, backend: ManagedBackend[RequestT, AnswerT]) -> Sequence[AnswerT | SkippedBackend]:
        obstacle = backend.obstacle()
        return [obstacle] * len(self._samples) if obstacle else backend.rehearse(self._samples)

    def _quick_to_load(self) -> Sequence[ManagedBackend[RequestT, AnswerT]]:
        """What a warm-up waits for."""
        return self._ranked()

    def _ranked(self) -> list[ManagedBackend[RequestT, AnswerT]]:
        """The backends in the order they are asked."""
        ranked = [self._backends[name] for name in self._order]
        if self._selection == "fastest":
            ranked.sort(key=lambda backend: float("inf") if (measured := backend.measured_ms) is None else measured)
        if suspects := self._suspects:
            ranked.sort(key=lambda backend: backend.name in suspects and not backend.proven)
        if first := self._backends.get(self._first or ""):
            ranked = [first, *(backend for backend in ranked if backend is not first)]
        return ranked

    def _is_suspect(self, backend: ManagedBackend[RequestT, AnswerT]) -> bool:
        others = (other for other in self._ranked() if other is not backend)
        return backend.name in self._suspects and any(self._obstacle(other) is None for other in others)

    def _measure(self) -> None:
        """With selection "fastest", time every loaded backend that has not been timed, and exclude those that disagree with the reference.

        An excluded one may be fast, but it is not the same model. The reference is the last in the order that can answer; where that
        changes, everything is measured anew.
        """
        if self._selection != "fastest" or not self._samples:
            return
        if (ready := self._ready()) and ready[-1].name != self._measured_against:
            for backend in self._backends.values():
                backend.measured_ms, backend.exclusion = None, ""
            ready = self._ready()
        if all(backend.measured_ms is not None for backend in ready):
            return
        answers = {backend.name: self._rehearse(backend) for backend in ready}
        sound = {name: answer for name, answer in answers.items() if _all_answered(answer)}
        reference = self._measured_against = next(reversed(sound), "")
        new = [self._backends[name] for name in sound if self._backends[name].measured_ms is None]
        for backend, measured_ms in zip(new, self._median_ms(new), strict=True):
            backend.measured_ms = measured_ms
            problems = map(self._rules.disagreement, sound[reference], sound[backend.name])
            backend.exclusion = next((f"disagrees with {reference}: {problem}" for problem in problems if problem), "")

    def _ready(self) -> list[ManagedBackend[RequestT, AnswerT]]:
        """What is loaded and may be asked, as the order has it."""
        return [backend for name in self._order if (backend := self._backends[name]).loaded and not backend.obstacle()]

    def _median_ms(self, backends: Sequence[ManagedBackend[RequestT, AnswerT]]) -> list[float | None]:
        """Of calls in turns, so that what slows the machine for a while slows them all; None for one that broke while it was timed."""
        durations: dict[str, list[float]] = {backend.name: [] for backend in backends}
        broken = set()
        for _, backend in product(range(MEASURED_ROUNDS), backends):
            if backend.name in broken:
                continue
            began = self._clock()
            if not _all_answered(backend.rehearse(self._samples)):
                broken.add(backend.name)
            durations[backend.name].append((self._clock() - began) * 1e3)
        return [None if name in broken else median(times) for name, times in durations.items()]

    def _probe_when_due(self) -> None:
        probed_at = self._probed_at
        if probed_at is None or self._clock() - probed_at >= self._probe_interval_s:
            self.probe()

    def _log_change(self, outcomes: Iterable[Served[AnswerT]]) -> None:
        for served in outcomes:
            if served.backend != self._serving:
                self._serving = served.backend
                logger.info("%s", _choice(self.stage, served.backend, served.fallback_from))

    def _managed(self, table: Mapping[str, str], options: Mapping[str, Mapping[str, Any]]) -> dict[str, ManagedBackend[RequestT, AnswerT]]:
        """A backend for each name of the table: the one there is where its import string and options are the same."""
        backends = {}
        for name, path in table.items():
            backend, given = self._backends.get(name), dict(options.get(name, {}))
            if backend is None or (backend.import_string, backend.options) != (path, given):
                backend = self._make(name, path, options=given)
                backend.suspected = partial(self._is_suspect, backend)
            backends[name] = backend
        return backends

    def _backend(self, name: str) -> ManagedBackend[RequestT, AnswerT]:
        return self._known(name, self._backends)

    def _known(self, name: str, backends: Mapping[str, ManagedBackend[RequestT, AnswerT]]) -> ManagedBackend[RequestT, AnswerT]:
        if name not in backends:
            raise UnknownChoice(self.stage, name, backends)
        return backends[name]

    def _checked_order(self, order: Sequence[str], backends: Mapping[str, ManagedBackend[RequestT, AnswerT]]) -> tuple[str, ...]:
        for name in order:
            self._known(name, backends)
        if not order or len(set(order)) != len(order):
            raise ConfigError(f"the order of {self.stage} backends is {list(order)}; name each backend that may serve once, at least one")
        return tuple(order)


def _all_answered(results: Sequence[AnswerT | SkippedBackend]) -> TypeGuard[Sequence[AnswerT]]:
    return not any(isinstance(result, SkippedBackend) for result in results)


def _out_of_time(skipped: Sequence[SkippedBackend]) -> bool:
    return bool(skipped) and isinstance(skipped[-1], OutOfTime)


def _checked_selection(selection: Selection) -> Selection:
    if selection not in ("ordered", "fastest"):
        raise UnknownChoice("selection", selection, ("ordered", "fastest"))
    return selection


def _choice(stage: str, name: str, skipped: Sequence[SkippedBackend]) -> str:
    return f"{stage}={name}" + (f" ({reasons(skipped)})" if skipped else "")
