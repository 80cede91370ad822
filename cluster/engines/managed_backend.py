"""One backend under the controller's care: switched on or off, probed, loaded when first needed, called, measured, stopped when it breaks.

Only what a backend's own code raises is caught (a foreign engine may raise anything); an error of ours passes through. All state is changed
on the event loop; the backend's code runs in the engine thread, a load beside the calls in another one, `ainfer` and `astream` on the loop.
"""

import asyncio
import importlib
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import cached_property
from typing import Any, Generic, TypeVar

from cluster.engines.breaker import Breaker, BreakerState
from cluster.engines.engine import Batches, Engine, Nonsense, Queue, together
from cluster.engines.forgetting import forget, kept
from cluster.engines.halving import in_parts
from cluster.engines.latency import LatencyRecorder
from cluster.engines.room import AskOne, EngineRoom, Run, beside
from cluster.engines.skipped import OutOfTime, any_answer, has_failed, reason_of
from cluster.engines.snapshots import BackendSnapshot
from cluster.errors import DeadlineExceeded
from cluster.registry import resolve
from cluster.values import Availability, SkippedBackend

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
LOADING = "is being loaded"
SAMPLE_WITHIN_S = 5.0
"""How long an engine with a queue may take for a sample that it answered before, until it counts as broken."""
LATE_TO_BE_STUCK = 3
"""Calls that came too late to be answered, with no answer between them, after which an engine is asked a sample: it may be stuck."""
logger = logging.getLogger(__name__)


class ManagedBackend(Generic[RequestT, AnswerT]):
    """Batches, probes, loads, unloads and erasures take turns; requests to an engine with a queue of its own wait for none of them."""

    def __init__(self, name: str, import_string: str, room: EngineRoom[RequestT, AnswerT], options: Mapping[str, Any]) -> None:
        self.name, self.import_string, self.options = name, import_string, dict(options)
        self.enabled = True
        self.loading = False  # a refresh loads it and tries the samples; until it is done no other code touches the engine
        self.availability = Availability.no("not probed yet")
        self.exclusion = ""
        self.measured_ms: float | None = None
        self.rehearsed_ms = 0.0  # what the engine last took for the samples
        self.suspected: Callable[[], bool] = lambda: False  # whether one failure is enough to open its breaker
        self.breaker = Breaker(room.breaker)
        self.last_error = ""
        self.calls = self.failures = self.fallbacks = 0
        self._room, self._turn = room, asyncio.Lock()
        self._engine: Engine[RequestT, AnswerT] | None = None
        self._loaded = False
        self._holds = False  # a load was begun, whether or not it ended well: there is something to close
        self._known_good: RequestT | None = None  # a sample that the engine has answered; never a user's request
        self._latency, self._latency_lock = LatencyRecorder(room.clock()), threading.Lock()

    @property
    def loaded(self) -> bool:
        return self._loaded

    @property
    def proven(self) -> bool:
        """Whether it has answered a user's request here."""
        return self.calls > self.failures

    @property
    def queued(self) -> bool:
        """Whether its engine has a queue of its own; False as long as there is no engine."""
        return self._engine is not None and self._engine.queued

    def obstacle(self) -> SkippedBackend | None:
        """Why it must be neither loaded nor asked now; None where it may."""
        if not self.enabled:
            return self._skipped("switched off by the operator")
        if not self.availability.ok:
            return self._skipped(self.availability.reason)
        if self.loading:
            return self._unready()
        if self.exclusion:
            return self._skipped(self.exclusion)
        if self._state() is BreakerState.OPEN:
            return self._skipped(f"{self.last_error}; next trial in {self.breaker.wait_s(self._room.clock()):.1f} s", failed=True)
        return None

    def unfit(self) -> SkippedBackend | None:
        """Why a request would not be given to it now: an obstacle, or a load that calls do not wait for."""
        return self.obstacle() or (self._unready() if self._waits_for_a_refresh() else None)

    async def ask(self, requests: Sequence[RequestT]) -> Sequence[AnswerT | SkippedBackend]:
        """For each request an answer, or why there is none, in the order asked."""
        if skipped := self.unfit():
            return [skipped] * len(requests)
        if self.queued:
            return await together([self._answer_one(request) for request in requests])
        if self._room.join:
            return await together([self._joined(request) for request in requests])
        return await self.answer_batch(requests)

    async def answer_batch(self, requests: Sequence[RequestT]) -> Sequence[AnswerT | SkippedBackend]:
        """One batch of an engine that takes batches; what waited for its turn finds out here whether the engine still serves."""
        async with self._turn:
            if skipped := self.unfit():
                return [skipped] * len(requests)
            results = await self._load_and_try(requests, self._room.thread.compute)
        self.calls += len(requests)
        self.failures += sum(map(has_failed, results))
        return results

    async def stream(self, request: RequestT) -> AsyncGenerator[AnswerT | SkippedBackend, None]:
        """What the engine finds as it finds it. Where it breaks, the reason comes last, and it is not asked again."""
        if skipped := self.unfit() or self._declined(request):
            yield skipped
        elif isinstance(engine := self._engine, Queue) and engine.streams:
            async with aclosing(self._pieces(engine, request)) as pieces:
                async for piece in pieces:
                    yield piece
        else:
            yield (await self.ask([request]))[0]

    async def rehearse(self, samples: Sequence[RequestT], run: Run | None = None) -> Sequence[AnswerT | SkippedBackend]:
        """Load it, and have it answer requests that no user made: no call and no latency is counted."""
        async with self._turn:
            return await self._load_and_try(samples, run or self._room.thread.run, rehearsal=True)

    async def probe(self) -> None:
        """Ask again whether it can run here. One that was repaired starts afresh: newly loaded, its failures forgotten."""
        async with self._turn:
            was_available, self.availability = self.availability.ok, await self._room.thread.run(self._get_availability)
            if was_available and not self.availability.ok:
                await self._unload(self._room.thread.run)
            if not was_available and self.availability.ok:
                self.breaker = self.breaker.succeeded()

    async def load_beside(self) -> bool:
        """Make it ready to answer, beside the calls of others; whether it is."""
        async with self._turn:
            return await self._load(beside)

    async def unload(self, why: str = "") -> None:
        """Free what the engine holds. With `why` for good: no call loads it again."""
        async with self._turn:
            self.availability = Availability.no(why) if why else self.availability
            await self._unload(beside)

    def close(self) -> None:
        """As `unload`, at once and in this thread."""
        self._close(self._detached())

    async def lost(self) -> bool:
        """Whether it is loaded and of no use: its engine died, is stuck, or broke until the breaker opened. It is then to be unloaded."""
        engine = self._engine
        if engine is None or not self._loaded or self.loading:
            return False
        problem = await self._unusable(engine) if self._state() is BreakerState.CLOSED else ""
        if engine is not self._engine:
            return False
        if problem:
            self._note(problem)
            self.breaker = self.breaker.failed(self._room.clock(), at_once=True)
        return bool(problem) or (engine.queued and self._state() is not BreakerState.CLOSED)

    async def forget(self, tenant: str | None, user: str | None) -> int:
        """See cluster.engines.forgetting; in the engine thread, after the batch that runs.

        One that breaks over it is unloaded, and with it goes all that it keeps; it is loaded again as any that is not.
        """
        if not self._loaded or self.loading:  # a load starts with nothing
            return 0
        async with self._turn:
            engine = self._engine if self._loaded else None
            try:
                return await self._room.thread.run(lambda: forget(engine.backend, tenant, user)) if engine else 0
            except Exception as error:  # noqa: BLE001 - a foreign engine may raise anything, and what it keeps has to go
                self._note(f"could not forget a user and was unloaded: {reason_of(error)}", error)
                await self._unload(self._room.thread.run)
                return 0

    def kept(self) -> dict[str, float]:
        """What it says it keeps of users; empty where it says nothing."""
        return self._figures(lambda engine: kept(engine.backend), "asked what it keeps of users")

    def queue(self) -> dict[str, float]:
        """What the engine says of its queue, such as how many requests wait; empty where it says nothing."""
        return self._figures(lambda engine: dict(engine.optional("queue") or {}), "asked for its queue")

    def snapshot(self, rank: int | None, obstacle: SkippedBackend | None) -> BackendSnapshot:
        with self._latency_lock:
            latency = self._latency.summary(self._room.clock())
        return BackendSnapshot(
            self.name,
            self.import_string,
            self.availability.ok,
            obstacle.reason if obstacle else "",
            self.enabled,
            rank,
            self._loaded,
            self._state(),
            self.last_error,
            self.calls,
            self.failures,
            self.fallbacks,
            latency,
            self.kept(),
        )

    @cached_property
    def _joined(self) -> AskOne[RequestT, AnswerT]:
        assert self._room.join
        return self._room.join(self.name, self.answer_batch)

    async def _answer_one(self, request: RequestT) -> AnswerT | SkippedBackend:
        """By an engine with a queue, beside all that it answers already."""
        if skipped := self.unfit() or self._declined(request):
            return skipped
        self.calls += 1
        (result,) = await self._try([request], self._room.thread.run)
        self.failures += has_failed(result)
        return result

    async def _pieces(self, engine: Queue[RequestT, AnswerT], request: RequestT) -> AsyncGenerator[AnswerT | SkippedBackend, None]:
        began, result = self._room.clock(), None
        self.calls += 1
        async with aclosing(engine.stream(request)) as outcomes:
            async for outcome in outcomes:
                result = self._result(engine, outcome)
                if not isinstance(result, SkippedBackend):
                    yield result
        if has_failed(result):
            self.failures += 1
            answers_sample = await self._answers_sample(engine, self._room.thread.run)
            self._judge(engine, sound=bool(answers_sample), broken_calls=1 + (answers_sample is False))
        if isinstance(result, SkippedBackend):
            yield result
        else:
            self._record_latency(self._room.clock() - began)
            self._judge(engine, sound=True)

    def _declined(self, request: RequestT) -> SkippedBackend | None:
        """Why this one request is not for it: neither a call nor a failure."""
        try:
            reason = self._engine.optional("declines", request) if self._engine else ""
        except Exception as error:  # noqa: BLE001 - a foreign engine may raise anything
            return self._note(f"broke when asked whether it declines: {reason_of(error)}", error)
        return self._skipped(str(reason)) if reason else None

    async def _load_and_try(self, requests: Sequence[RequestT], run: Run, *, rehearsal: bool = False) -> list[AnswerT | SkippedBackend]:
        """In its turn. Where that opens the breaker, unload, so that the next trial starts from a fresh load."""
        if not await self._load(run):
            return [self._skipped(self.last_error, failed=True)] * len(requests)
        results = await self._try(requests, run, rehearsal=rehearsal)
        if self._state() is BreakerState.OPEN:
            await self._unload(run)
        return results

    async def _try(self, requests: Sequence[RequestT], run: Run, *, rehearsal: bool = False) -> list[AnswerT | SkippedBackend]:
        """Where all of it breaks, a sample that the engine answered before tells whether the engine is broken or the requests are poisoned.

        A poisoned batch is halved until the requests at fault stand alone. They never count against the breaker of a backend that answers
        others; every call of a broken one does, also that by which it is found out.
        """
        engine, broken_calls = self._engine, 0
        assert engine is not None
        on_trial = self._state() is BreakerState.HALF_OPEN

        async def attempt(part: Sequence[RequestT]) -> list[AnswerT | SkippedBackend]:
            nonlocal broken_calls
            results = await self._attempt(engine, part, run, rehearsal=rehearsal)
            broken_calls += all(map(has_failed, results))
            return results

        results = await attempt(requests)
        if any_answer(results):
            self._judge(engine, sound=True, on_trial=on_trial)
            return results
        if all(isinstance(result, OutOfTime) for result in results):  # one may have been late for all: alone, the others are not
            return results if len(requests) <= 1 else await in_parts(requests, results, attempt, self._room.retries)
        answers_sample = await self._answers_sample(engine, run)
        if answers_sample or (answers_sample is None and not on_trial):
            results = await in_parts(requests, results, attempt, self._room.retries)
        broken_calls += answers_sample is False
        self._judge(engine, sound=answers_sample or any_answer(results), on_trial=on_trial, broken_calls=broken_calls)
        return results

    async def _attempt(
        self, engine: Engine[RequestT, AnswerT], requests: Sequence[RequestT], run: Run, *, rehearsal: bool
    ) -> list[AnswerT | SkippedBackend]:
        """One call of the engine."""
        reply = await engine.ask(requests, run)
        results = [self._result(engine, outcome) for outcome in reply.outcomes]
        answered = [request for request, result in zip(requests, results, strict=True) if not isinstance(result, SkippedBackend)]
        if answered and rehearsal:
            self._known_good, self.rehearsed_ms = answered[-1], reply.duration_s * 1e3
        elif answered:
            self._record_latency(reply.duration_s, len(answered))
        return results

    async def _answers_sample(self, engine: Engine[RequestT, AnswerT], run: Run) -> bool | None:
        """Whether it still answers a sample that it answered before; None where there is no such sample."""
        if engine is not self._engine or not engine.is_alive():
            return False
        if self._known_good is None:
            return None
        try:
            async with asyncio.timeout(SAMPLE_WITHIN_S if engine.queued else None):
                (outcome,) = (await engine.ask([self._known_good], run)).outcomes
        except TimeoutError:
            return False
        return not isinstance(outcome, Exception)

    async def _unusable(self, engine: Engine[RequestT, AnswerT]) -> str:
        if not engine.is_alive():
            return "has lost its engine"
        if engine.late_in_a_row < LATE_TO_BE_STUCK:
            return ""
        engine.late_in_a_row = 0
        sound = await self._answers_sample(engine, self._room.thread.run)
        return "" if sound else f"is stuck: it was late again and again, and gave no answer to a sample within {SAMPLE_WITHIN_S:g} s"

    def _judge(self, engine: Engine[RequestT, AnswerT], *, sound: bool, on_trial: bool = False, broken_calls: int = 0) -> None:
        """Count for or against the breaker, unless another engine has been loaded since. An open one is closed by a trial only."""
        if engine is not self._engine:
            return
        if not sound:
            at_once = self.suspected() or not engine.is_alive()
            self.breaker = self.breaker.failed(self._room.clock(), calls=max(1, broken_calls), at_once=at_once)
        elif on_trial or self._state() is BreakerState.CLOSED:
            self.breaker = self.breaker.succeeded()

    def _result(self, engine: Engine[RequestT, AnswerT], outcome: AnswerT | Exception) -> AnswerT | SkippedBackend:
        """The answer, or why there is none; that is noted unless the engine has been replaced under the call, for a reason of its own."""
        if not isinstance(outcome, Exception):
            return outcome
        if isinstance(outcome, DeadlineExceeded):
            return OutOfTime(self.name, f"{outcome}")
        nonsense = isinstance(outcome, Nonsense)
        reason = f"{outcome}" if nonsense else f"broke: {reason_of(outcome)}"
        return self._note(reason, None if nonsense else outcome) if engine is self._engine else self._skipped(reason, failed=True)

    def _record_latency(self, duration_s: float, calls: int = 1) -> None:
        with self._latency_lock:
            self._latency.record(duration_s * 1e3, self._room.clock(), calls)

    async def _load(self, run: Run) -> bool:
        """A failed load opens the breaker at once."""
        if self._loaded:
            return True
        self._holds = True
        try:
            await run(lambda: self._made().backend.load(self._room.bundle))
        except Exception as error:  # noqa: BLE001 - any error of an engine while it loads is a reason to ask the next one
            self._note(f"could not be loaded: {reason_of(error)}", error)
            self.breaker = self.breaker.failed(self._room.clock(), at_once=True)
            await self._unload(run)
        else:
            self._loaded = True
        return self._loaded

    async def _unload(self, run: Run) -> None:
        if engine := self._detached():
            await run(lambda: self._close(engine))

    def _detached(self) -> Engine[RequestT, AnswerT] | None:
        """The engine that is to be closed, if there is one: from now on no call reaches it."""
        engine, self._engine = self._engine, None
        held, self._holds = self._holds, False
        self._loaded, self._known_good, self.measured_ms, self.exclusion = False, None, None, ""
        return engine if held else None

    def _close(self, engine: Engine[RequestT, AnswerT] | None) -> None:
        try:
            if engine:
                engine.backend.close()
        except Exception:  # a foreign engine may raise anything, and it is no longer needed
            logger.warning("backend %s broke while it was closed", self.name, exc_info=True)

    def _get_availability(self) -> Availability:
        try:
            availability: Availability = self._made().backend.get_availability(self._room.bundle)
        except ImportError as error:
            return Availability.no(f"{self.import_string} cannot be imported: {error}")
        except Exception as error:  # noqa: BLE001 - the module, the constructor and the probe are the backend's code
            return Availability.no(f"its probe broke: {reason_of(error)}")
        return availability

    def _made(self) -> Engine[RequestT, AnswerT]:
        if self._engine is None:
            importlib.invalidate_caches()  # a package may have been installed since the last probe
            backend = resolve(self.import_string)(**self.options)
            kind = Queue if hasattr(backend, "ainfer") else Batches
            self._engine = kind(backend, self._room.rules.nonsense, self._room.clock)
        return self._engine

    def _figures(self, of: Callable[[Engine[RequestT, AnswerT]], dict[str, float]], asked: str) -> dict[str, float]:
        engine = self._engine
        try:
            return of(engine) if engine and self._loaded and not self.loading else {}
        except Exception as error:  # noqa: BLE001 - a foreign engine may raise anything
            self._note(f"broke when {asked}: {reason_of(error)}", error)
            return {}

    def _waits_for_a_refresh(self) -> bool:
        if self.queued:
            return not self._loaded or self._state() is not BreakerState.CLOSED
        return not self._loaded and not self._room.loads_on_demand

    def _state(self) -> BreakerState:
        return self.breaker.state(self._room.clock())

    def _unready(self) -> SkippedBackend:
        """That it waits to be loaded, anew if it broke."""
        if self._state() is BreakerState.CLOSED:
            return self._skipped(LOADING)
        return self._skipped(f"{self.last_error}; it is being loaded again", failed=True)

    def _note(self, reason: str, error: Exception | None = None) -> SkippedBackend:
        if reason != self.last_error:
            logger.warning("backend %s %s", self.name, reason, exc_info=error)
        self.last_error = reason
        return self._skipped(reason, failed=True)

    def _skipped(self, reason: str, *, failed: bool = False) -> SkippedBackend:
        return SkippedBackend(self.name, reason, failed)
