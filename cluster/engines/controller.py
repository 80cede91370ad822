"""The framework controller: ask the first of a stage's backends that can answer, and say why those before it did not.

    encoder=onnxruntime (tensorrt: no engine for sm_90 in models/ml-1m/3; run: genrec compile)

    requests -> vllm          a queue of its own: each request at once, on the event loop
             -> torch_beam    what vllm could not answer, a batch at a time in the engine thread

An engine's error is not shown to the caller: a request that one backend cannot answer goes to the next.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

from cluster.bundle import Bundle
from cluster.config import EngineSettings
from cluster.engines.fastest import Measuring
from cluster.engines.forgetting import Scope
from cluster.engines.kept_users import KeptUser, StateCapacity, capacity_for
from cluster.engines.managed_backend import ManagedBackend
from cluster.engines.room import EngineRoom, EngineThread, Join, beside
from cluster.engines.roster import Choice, Roster
from cluster.engines.skipped import Declined, NoBackendAnswered, all_answered, out_of_time, reasons
from cluster.engines.snapshots import BackendSnapshot, StageSnapshot
from cluster.engines.stage_rules import StageRules
from cluster.errors import ConfigError
from cluster.few_lines import TOLD_EVERY_S, FewLines
from cluster.traffic.breaker import BreakerSettings
from cluster.values import Availability, SkippedBackend

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
LOADS_ALONE_S = 30.0
"""How long a refresh waits for a backend that is loaded or closed. After that it may hang: other backends are looked after, and loaded,
beside it.
"""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Served(Generic[AnswerT]):
    """An answer, the backend that gave it, and the preferred ones that did not; `duration_ms` includes the time they took to fail."""

    answer: AnswerT
    backend: str
    fallback_from: tuple[SkippedBackend, ...]
    duration_ms: float


class FrameworkController(Generic[RequestT, AnswerT]):
    """One stage's backends. All methods belong to one event loop at a time; engines that take batches run in a thread, call after call.

    With selection "fastest", the speed of backends is that on the requests given to `warm_up`, the last of which is also timed as that of a
    returning user. `retries` bounds the search for bad requests in a batch that broke (0: none). `clock`: that of the `deadline`s that
    requests have. `join` makes batches for a single backend, where some of the stage's engines have queues of their own; without it, `call`
    is given batches. Raises UnknownChoice or ConfigError where the choice's order does not fit its table.
    """

    def __init__(
        self,
        stage: str,
        choice: Choice,
        bundle: Bundle,
        rules: StageRules[RequestT, AnswerT],
        *,
        breaker: BreakerSettings | None = None,
        retries: int = 2,
        probe_interval_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        join: Join[RequestT, AnswerT] | None = None,
    ) -> None:
        self.stage, self._clock, self._probe_interval_s = stage, clock, probe_interval_s
        self._room = EngineRoom(bundle, rules, breaker or BreakerSettings(), retries, clock, join)
        self._roster = Roster(stage, self._room, choice)
        self._measuring = Measuring(stage, rules, self._roster, clock)
        self._samples: Sequence[RequestT] = ()
        self._probed_at: float | None = None
        self._probing = asyncio.Lock()
        self._loads = set[asyncio.Task[bool]]()
        self._closes = dict[asyncio.Task[None], ManagedBackend[RequestT, AnswerT]]()
        self._serving, self._choices = "", FewLines(clock, within_s=TOLD_EVERY_S)
        self._closed = False

    @classmethod
    def configured(
        cls,
        settings: EngineSettings,
        bundle: Bundle,
        rules: StageRules[RequestT, AnswerT],
        join: Join[RequestT, AnswerT] | None = None,
    ) -> Self:
        """The controller of a stage as the configuration has it, over `bundle`."""
        return cls(
            settings.stage_name,
            Choice.of(settings),
            bundle,
            rules,
            breaker=settings.breaker,
            retries=settings.retries,
            probe_interval_s=settings.probe_interval_s,
            join=join,
        )

    @property
    def thread(self) -> EngineThread:
        """Where batches are computed."""
        return self._room.thread

    @property
    def queued(self) -> bool:
        """Whether a loaded engine of the order has a queue of its own, so that what it computes is not seen in `thread`."""
        return any(backend.loaded and backend.queued for backend in self._roster.ranked())

    @property
    def one_by_one(self) -> bool:
        """Whether the backend that would be asked first now has a queue of its own, so that requests need not be joined for it."""
        if not any(backend.queued for backend in self._roster):
            return False
        first = self._first()
        return first is not None and first.queued

    def rows(self, request: RequestT, otherwise: int) -> int:
        """How many rows the backend that would be asked first now says that it would compute for the request; `otherwise` where it does
        not, or no backend would be asked.
        """
        first = self._first()
        return otherwise if first is None else first.rows(request, otherwise)

    async def call(self, requests: Sequence[RequestT]) -> list[Served[AnswerT] | NoBackendAnswered]:
        """For each request, in order, an answer or the error that says why no backend gave one."""
        began = self._clock()
        if self._room.loads_on_demand:
            await self._probe_when_due()
        outcomes: dict[int, Served[AnswerT]] = {}
        skipped: dict[int, tuple[SkippedBackend, ...]] = dict.fromkeys(range(len(requests)), ())
        for backend in self._roster.asked():
            waiting = [index for index in skipped if index not in outcomes and not out_of_time(skipped[index])]
            if not waiting:
                break
            for index, result in zip(waiting, await backend.ask([requests[index] for index in waiting]), strict=True):
                if isinstance(result, SkippedBackend):
                    skipped[index] += (result,)
                else:
                    outcomes[index] = self._served(result, backend, skipped[index], began)
        return [outcomes.get(index) or NoBackendAnswered(self.stage, skipped[index]) for index in skipped]

    async def call_one(self, request: RequestT) -> Served[AnswerT]:
        """The answer to one request. Raises NoBackendAnswered."""
        (outcome,) = await self.call([request])
        if isinstance(outcome, NoBackendAnswered):
            raise outcome
        return outcome

    async def stream(
        self, request: RequestT, merge: Callable[[Sequence[AnswerT]], AnswerT]
    ) -> AsyncGenerator[AnswerT | Served[AnswerT], None]:
        """Pieces of the answer as a backend finds them, lastly the whole, which `merge` makes of them. Raises NoBackendAnswered.

        Where a backend breaks midway, all pieces of the next one follow: some of them may have come before.
        """
        began, skipped = self._clock(), tuple[SkippedBackend, ...]()
        for backend in self._roster.asked():
            pieces, failed = list[AnswerT](), False
            async with aclosing(backend.stream(request)) as results:
                async for result in results:
                    if isinstance(result, SkippedBackend):
                        skipped, failed = (*skipped, result), True
                    else:
                        pieces.append(result)
                        yield result
            if not failed:
                yield self._served(merge(pieces), backend, skipped, began)
                return
            if out_of_time(skipped):
                break
        raise NoBackendAnswered(self.stage, skipped)

    async def probe(self) -> dict[str, Availability]:
        """Ask every backend again whether it can run here, those too that the order leaves out."""
        await self._probe(self._roster)
        return {backend.name: backend.availability for backend in self._roster}

    async def refresh(self) -> bool:
        """Unload backends that died, broke or left the order, probe if it is time to, and load every backend of the order that can be
        loaded: to be called about once a second after `warm_up`. Returns whether an engine has been loaded since the last refresh.

        Loads then take place beside the calls, which go to another backend meanwhile, and the samples, not a user, try a repaired one.
        Loads take place one after another, each backend's once; a load, or the close of an engine, that takes longer than LOADS_ALONE_S
        goes on beside this and later refreshes. Probes run without requests too, so that the status stays true.
        """
        self._room.loads_on_demand = not self._samples
        if (relieved := self._roster.relieve()) is not None:
            await self._close_beside(relieved, relieved.retire())
        asked = self._roster.asked()
        for one in self._roster:
            if one.loading or one in self._closes.values():  # either may hang while it holds the turn
                continue
            if (one.loaded and one not in asked) or await one.lost():
                await self._close_beside(one, one.unload())
        await self._probe_when_due()
        loaded = self._reap_loads()
        tried = set[ManagedBackend[RequestT, AnswerT]]()
        while backend := self._next_to_load(tried):
            tried.add(backend)
            self._begin_load(backend)
            await asyncio.wait(self._loads, timeout=LOADS_ALONE_S, return_when=asyncio.FIRST_COMPLETED)
            loaded = self._reap_loads() or loaded
            await self._measure()
        return loaded

    async def warm_up(self, samples: Sequence[RequestT], ready: int = 2) -> str:
        """Load the first `ready` backends that work and let them answer `samples`; with selection "fastest", load and measure them all.

        Then neither a first call nor a first fallback waits for a load. An engine with a queue of its own starts slowly: `refresh` loads it
        while others serve; it is loaded here only where no other is. A load that takes longer than LOADS_ALONE_S, and a late probe, go on
        in the background. Where no backend is loaded by then, this waits until the first of them is, or nothing is left to wait for.
        Returns `explain()`.
        """
        if not samples:
            raise ConfigError(f"the {self.stage} backends cannot be warmed up without sample requests; give at least one")
        self._samples = list(samples)
        await self._probe_asked()
        await self._load_in_order(len(self._roster.ranked()) if self._roster.choice.selection == "fastest" else ready)
        await self._await_one_loaded()
        self._reap_loads()
        await self._measure()
        return self.explain()

    def _first(self) -> ManagedBackend[RequestT, AnswerT] | None:
        """The backend that would be asked first now; None where none would be."""
        return next((backend for backend in self._roster.asked() if backend.why_not_callable() is None), None)

    @property
    def loaded(self) -> bool:
        """Whether a backend that may be asked is loaded."""
        return any(backend.loaded for backend in self._roster.asked())

    def explain(self, *, whole: bool = False) -> str:
        """The backend that would be asked first now, and why the ones before it would not be; with `whole`, as operators read it."""
        skipped: list[SkippedBackend] = []
        for backend in self._roster.asked():
            reason = backend.why_not_callable()
            if reason is None:
                return _choice(self.stage, backend.name, skipped)
            skipped.append(SkippedBackend(backend.name, backend.whole(reason.reason)) if whole else reason)
        return _choice(self.stage, "none", skipped)

    def snapshot(self) -> StageSnapshot:
        """The stage as it is now. A stand-in and its successor have the same name and are reported as one backend."""
        ranked = self._roster.ranked()
        asked = tuple(self._asked_snapshot(rank, backend) for rank, backend in enumerate(ranked))
        others = (one for one in self._roster if self._roster.configured(one) and one not in ranked)
        return StageSnapshot(self.stage, self.explain(), (*asked, *(one.snapshot(None, one.why_not_loadable()) for one in others)))

    def enable(self, name: str) -> None:
        self._roster.named(name).enabled = True

    def disable(self, name: str) -> None:
        """Stop asking a backend. Disabling the last one is allowed: the pipeline then serves its own last fallback."""
        self._roster.named(name).enabled = False

    def prefer(self, name: str | None) -> None:
        """Ask this backend first, before order and selection, also where the order leaves it out; None: follow order and selection."""
        if name is not None:
            self._roster.named(name)
        if name != self._roster.preferred:
            self._roster.preferred, self._probed_at = name, None  # the order may have left it out

    def suspect(self, names: Collection[str]) -> None:
        """Suspect these backends, which broke on most other replicas: one failure opens their breakers here, and those that have not
        answered a request here yet are asked after the others. The last backend that could answer is spared. A later call without a
        backend's name ends its suspicion.
        """
        self._roster.suspects = frozenset(names)

    async def reconfigure(self, choice: Choice) -> None:
        """Follow another choice, or change nothing where it is wrong. A backend with the same import string and options stays as it is, a
        new one is loaded by `refresh`, and one that is gone, or left the order, is unloaded. Where no backend of the order is loaded, a
        backend that had another import string or other options goes on answering until one is. But an engine with a queue of its own is
        unloaded then, too, as there may be no memory for two, and the stage has none until another is loaded. A new one whose constructor
        does not take its options is not available, and says so.

        Raises ConfigError or UnknownChoice.
        """
        gone = self._roster.change(choice)
        for backend in gone:
            if not backend.loading:  # else the refresh that loads it unloads it
                await self._close_beside(backend, backend.retire())
        self._probed_at = None
        await self._probe_when_due()

    async def forget(self, users: Collection[Scope]) -> int:
        """Have every loaded backend erase what it keeps of these users, in one turn; returns how many states that were, as the backends
        count them.

        A batch that runs meanwhile ends first, and what it kept is erased too. A backend that breaks over it is unloaded, and the next ones
        are asked all the same.
        """
        return sum([await backend.forget(users) for backend in self._roster])

    def openings(self) -> dict[str, StateCapacity]:
        """Kind of states -> the room that a loaded backend has for them, for all kinds that can be taken over here."""
        return {kind: capacity_for(backend.kept()) for backend in self._roster.ranked() if (kind := backend.kind)}

    async def hand_over(self) -> AsyncGenerator[list[KeptUser], None]:
        """The states that the loaded backends keep of users, the first choice's first, of each the hottest first; a few MiB at a time."""
        for backend in self._roster.asked():
            async with aclosing(backend.hand_over()) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def take_over(self, states: Sequence[KeptUser], wanted: Callable[[KeptUser], bool]) -> int:
        """Have each loaded backend keep the states of its kind; returns how many were taken. See ManagedBackend."""
        taken = 0
        for backend in self._roster.ranked():
            kind = backend.kind
            if mine := [one for one in states if one.kind == kind]:
                taken += await backend.take_over(mine, wanted)
        return taken

    def queues(self) -> dict[str, dict[str, float]]:
        """What waits for each backend, and the figures of its loaded engine's queue, by backend."""
        return {backend.name: queue for backend in self._roster if (queue := backend.queue())}

    def close(self) -> None:
        """Close all backends, after the batch that runs; one that is just being loaded is closed once it is loaded."""
        self._closed = True
        self.thread.close()
        for backend in self._roster:
            if not backend.loading:
                backend.close()

    def _asked_snapshot(self, rank: int, backend: ManagedBackend[RequestT, AnswerT]) -> BackendSnapshot:
        own, old = backend.snapshot(rank, backend.why_not_callable()), self._roster.stand_in_for(backend)
        return own if old is None else own.answered_by(old.snapshot(rank, None))

    def _next_to_load(self, tried: Collection[ManagedBackend[RequestT, AnswerT]]) -> ManagedBackend[RequestT, AnswerT] | None:
        """The first backend that may be asked, is not loaded and has not been tried."""
        if self._closed or self._room.loads_on_demand:
            return None
        return next((one for one in self._roster.ranked() if not one.loaded and one not in tried and not one.why_not_loadable()), None)

    def _begin_load(self, backend: ManagedBackend[RequestT, AnswerT]) -> asyncio.Task[bool]:
        backend.loading = True
        load = asyncio.create_task(self._load_beside(backend))
        self._loads.add(load)
        return load

    async def _load_in_order(self, ready: int) -> None:
        """Load backends of the order, less those with a queue of their own, until `ready` of them have answered the samples; one that takes
        longer than LOADS_ALONE_S goes on loading.
        """
        for backend in self._roster.ranked():
            if ready and not backend.queued and not backend.why_not_loadable():
                load = self._begin_load(backend)
                await asyncio.wait({load}, timeout=LOADS_ALONE_S)
                if load.done() and load.result():
                    ready -= 1

    async def _await_one_loaded(self) -> None:
        """Wait until a backend is loaded, or no load or late probe is left that could end with one; where none is loaded, those with a
        queue of their own are loaded too.
        """
        tried, slow = set[ManagedBackend[RequestT, AnswerT]](), False
        while not any(backend.loaded and not backend.loading for backend in self._roster):
            self._begin_next_queued(tried, beside_another=slow)
            hopes: set[asyncio.Future[Any]] = {*self._loads, *self._late_probes()}
            if not hopes:
                break
            ended, _ = await asyncio.wait(hopes, timeout=LOADS_ALONE_S, return_when=asyncio.FIRST_COMPLETED)
            slow = not ended
            self._reap_loads()
            await self._load_after_late_probes()

    def _begin_next_queued(self, tried: set[ManagedBackend[RequestT, AnswerT]], *, beside_another: bool) -> None:
        """Begin to load the first backend with a queue of its own that has not been tried; while another one is being loaded, only with
        `beside_another`.
        """
        queued = [backend for backend in self._roster.ranked() if backend.queued]
        if not beside_another and any(backend.loading for backend in queued):
            return
        if backend := next((one for one in queued if one not in tried and not one.why_not_loadable()), None):
            tried.add(backend)
            self._begin_load(backend)

    def _late_probes(self) -> list[asyncio.Future[Availability]]:
        """The probes of the order's backends that take long; none where a refresh can load an engine without them."""
        ranked = self._roster.ranked()
        if any(backend.queued and not backend.why_not_loadable() for backend in ranked):
            return []
        return [asyncio.wrap_future(backend.late_probe) for backend in ranked if backend.enabled and backend.late_probe]

    async def _load_after_late_probes(self) -> None:
        """Begin to load each backend once its late probe has said yes; one with a queue of its own is a refresh's to load."""
        for backend in self._roster.ranked():
            if backend.late_probe and backend.late_probe.done():
                await backend.probe()
                if not backend.queued and not backend.why_not_loadable():
                    self._begin_load(backend)

    def _reap_loads(self) -> bool:
        """Forget the loads that have ended; returns whether one of them left an engine that serves. Raises an error that is not a
        backend's.
        """
        ended = {load for load in self._loads if load.done()}
        self._loads -= ended
        loaded = [load.result() for load in ended]
        return any(loaded)

    async def _load_beside(self, backend: ManagedBackend[RequestT, AnswerT]) -> bool:
        """Load a backend and have it answer the samples, beside the calls, which do not ask it before. Returns whether it did both."""
        try:
            answers = await backend.rehearse(self._samples, beside)
        finally:
            backend.loading = False
        if self._closed or not self._roster.configured(backend):
            await backend.retire()
        return backend.loaded and all_answered(answers)

    async def _close_beside(self, backend: ManagedBackend[RequestT, AnswerT], closing: Coroutine[Any, Any, None]) -> None:
        """Have a backend's engine closed, and wait for that for LOADS_ALONE_S at most: it may hang. Raises an error that is not a
        backend's.
        """
        task = asyncio.create_task(closing)
        self._closes[task] = backend
        task.add_done_callback(self._closes.pop)
        await asyncio.wait({task}, timeout=LOADS_ALONE_S)
        if task.done():
            task.result()

    async def _measure(self) -> None:
        if self._roster.choice.selection == "fastest" and self._samples:
            await self._measuring.measure(self._samples)

    async def _probe(self, backends: Iterable[ManagedBackend[RequestT, AnswerT]]) -> None:
        self._probed_at = self._clock()
        for backend in backends:
            if not (backend.loading or backend.closing):
                await backend.probe()
        await self._measure()

    async def _probe_asked(self) -> None:
        """Probe the backends that may be asked. What the order leaves out need not even be imported, and holds up no other."""
        asked = self._roster.ranked()
        for backend in self._roster:
            if backend not in asked:
                backend.leave_out()
        await self._probe(asked)

    async def _probe_when_due(self) -> None:
        async with self._probing:
            if self._probed_at is None or self._clock() - self._probed_at >= self._probe_interval_s:
                await self._probe_asked()

    def _served(
        self, answer: AnswerT, backend: ManagedBackend[RequestT, AnswerT], skipped: tuple[SkippedBackend, ...], began: float
    ) -> Served[AnswerT]:
        backend.fallbacks += bool(skipped)
        changed = backend.name != self._serving and not any(isinstance(one, Declined) for one in skipped)
        if changed and self._choices.more() is not None:
            self._serving = backend.name
            logger.info("%s", _choice(self.stage, backend.name, skipped))
        return Served(answer, backend.name, skipped, (self._clock() - began) * 1e3)


def _choice(stage: str, name: str, skipped: Sequence[SkippedBackend]) -> str:
    return f"{stage}={name}" + (f" ({reasons(skipped)})" if skipped else "")
