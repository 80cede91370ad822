"""One backend under the controller's care: switched on or off, probed, loaded when first needed, called, measured, stopped when it breaks.

    ask                 picks the requests that the backend may be given now
      _answers          one by one for an engine with a queue; else in a batch, as it comes or joined with others (`join`)
        _load_and_try   alone in the backend's turn: loads it where it is not loaded, unloads it where this opens its breaker
          Trying        calls the engine, and judges it by what the calls come to (see cluster.engines.trying)

Only what a backend's own code raises is caught (a foreign engine may raise anything); an error of ours passes through. State is changed on
the event loop, except that an engine is made in the thread that probes or loads it, and that `close` may be called in any thread. A
backend's code runs in the engine thread; a probe, a close and a load beside the calls, which may hang, each in a thread of its own; brief
calls, `ainfer` and `astream` on the loop.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import aclosing, suppress
from math import isfinite
from typing import Any, Generic, TypeVar

from cluster.engines.engine import Engine, Queue, together
from cluster.engines.forgetting import FORGETTING, Scope, forget, kept
from cluster.engines.health import Health
from cluster.engines.kept_users import KeptUser, chunk_of, hands_over, kind_of_engine, sealed, take_over
from cluster.engines.probing import Probing
from cluster.engines.room import EngineRoom, Joined, Run
from cluster.engines.shared_or_alone import SharedOrAlone
from cluster.engines.skipped import Declined, OutOfTime, has_failed, kind_of, reason_of
from cluster.engines.slot import EngineSlot
from cluster.engines.snapshots import BackendSnapshot
from cluster.engines.trying import Trying
from cluster.traffic.breaker import BreakerState
from cluster.values import Availability, SkippedBackend

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
CLOSED_WITHIN_S, CALL_WAITS_S = 30.0, 1.0
"""How long a close is waited for, and how long by the call that broke the engine: its requests go to the next backend. A close that takes
longer goes on alone, and until it is done the backend is not loaded again.
"""
LEFT_OUT, GONE = Availability.no("the order leaves it out, so it is not probed"), Availability.no("is no longer configured")
CLOSING = "its engine is being closed"
logger = logging.getLogger(__name__)


class ManagedBackend(Generic[RequestT, AnswerT]):
    """Loads, unloads and erasures take turns with batches, which follow each other in the engine thread at once; requests to an engine with
    a queue of its own wait for none of them. Probes take no turn.

    Others write to four of its attributes: its operator, by way of the controller, to `enabled`; the controller to `loading` and
    `fallbacks`; a measurement of the whole order to `measured_ms` and `exclusion`.
    """

    def __init__(self, name: str, import_string: str, room: EngineRoom[RequestT, AnswerT], options: Mapping[str, Any]) -> None:
        self.name, self.import_string, self.options = name, import_string, dict(options)
        self.enabled = True
        self.loading = False  # a refresh loads it and tries the samples; until it is done no other code touches the engine
        self._close: Future[None] | None = None  # the last one of an engine
        self.availability = Availability.no("not probed yet")
        self.exclusion = ""
        self.measured_ms: float | None = None
        self.fallbacks = 0
        self.health = Health(name, room.breaker, room.clock)
        self._room, self._turn = room, SharedOrAlone()
        self._joined: Joined[RequestT, AnswerT] | None = None  # made with the first request that is joined with others
        self._slot: EngineSlot[RequestT, AnswerT] = EngineSlot(name, import_string, self.options, room)
        self._trying, self._probing = Trying(name, room, self.health, self._slot), Probing(self._slot.get_availability)

    @property
    def loaded(self) -> bool:
        return self._slot.loaded

    @property
    def loads(self) -> int:
        """How many loads have ended well: tells an engine from the one that was loaded before it."""
        return self._slot.loads

    @property
    def closing(self) -> bool:
        """Whether its engine is being closed; until that is done it is not loaded again."""
        return self._close is not None and not self._close.done()

    @property
    def proven(self) -> bool:
        """Whether the backend has answered a user's request here."""
        return self.health.answers > 0

    @property
    def rehearsed_ms(self) -> float:
        """How long the engine last took for the samples, in milliseconds; 0 before the first time."""
        return self._trying.rehearsed_ms

    @property
    def late_probe(self) -> Future[Availability] | None:
        """The probe that took too long, and goes on or has ended since, until its result is taken."""
        return self._probing.late

    @property
    def forgets(self) -> bool:
        """Whether there is an engine that can forget users."""
        return self._slot.engine is not None and any(hasattr(self._slot.engine.backend, name) for name in FORGETTING)

    @property
    def queued(self) -> bool:
        """Whether the engine has a queue of its own; False as long as there is no engine."""
        return self._slot.engine is not None and self._slot.engine.queued

    def why_not_loadable(self) -> SkippedBackend | None:
        """Why the backend must be neither loaded nor asked now; None where it may."""
        return self.why_not_measurable() or (self.health.skipped(self.exclusion) if self.exclusion else None)

    def why_not_measurable(self) -> SkippedBackend | None:
        """As `why_not_loadable`, but None for a backend that only a measurement excludes: it may be measured anew."""
        if not self.enabled:
            return self.health.skipped("switched off by the operator")
        if self.closing:
            return self.health.obstacle() or self.health.skipped(CLOSING)
        if not self.availability.ok:
            return self.health.skipped(self.availability.told or self.availability.reason)
        if self.loading:
            return self.health.unready()
        return self.health.obstacle()

    def why_not_callable(self) -> SkippedBackend | None:
        """Why the backend would not be given a request now: it is not loadable, or calls do not wait for its load. None where it would."""
        if reason := self.why_not_loadable():
            return reason
        waits = not self.loaded and (self.queued or not self._room.loads_on_demand)
        return self.health.unready() if waits or (self.queued and not self.health.breaker_closed) else None

    def rows(self, request: RequestT, otherwise: int) -> int:
        """How many rows the engine says that it would compute for the request now; `otherwise` where it does not, or there is none."""
        engine = self._slot.engine
        return otherwise if engine is None else engine.rows([request], otherwise)

    async def ask(self, requests: Sequence[RequestT]) -> Sequence[AnswerT | SkippedBackend]:
        """For each request, in the order asked, an answer or the reason why there is none."""
        if skipped := self.why_not_callable():
            return [skipped] * len(requests)
        withheld = [self._why_withheld(request) for request in requests]
        asked = [request for request, reason in zip(requests, withheld, strict=True) if not reason]
        answers = iter(await self._answers(asked) if asked else ())
        return [reason or next(answers) for reason in withheld]

    async def stream(self, request: RequestT) -> AsyncGenerator[AnswerT | SkippedBackend, None]:
        """Pieces of the answer as the engine finds them. Where it breaks, the reason comes last, and the request is not tried again."""
        engine = self._slot.engine
        if not isinstance(engine, Queue) or not engine.streams:
            yield (await self.ask([request]))[0]
        elif skipped := self.why_not_callable() or self._why_withheld(request):
            yield skipped
        else:
            async with aclosing(self._trying.stream(engine, request)) as pieces:
                async for piece in pieces:
                    yield piece

    async def rehearse(
        self, samples: Sequence[RequestT], run: Run | None = None, *, loads: bool = True
    ) -> Sequence[AnswerT | SkippedBackend]:
        """Load the backend and have it answer samples, which count as no calls and no latencies. Without `loads`, a backend that was
        unloaded before its turn came, perhaps for good, stays unloaded.
        """
        async with self._turn.alone():
            if self.closing or not (loads or self.loaded):
                return [self.health.unready()] * len(samples)
            return await self._load_and_try(samples, run or self._room.thread.run, rehearsal=True)

    async def probe(self) -> None:
        """Ask again whether the backend can run here, and log a new reason why not.

        A repaired one starts afresh: newly loaded, its failures forgotten.
        """
        found = await self._probing.found()
        if self.loading or self.closing or self.availability is GONE:  # changed during the probe; a load reports its own outcome
            return
        if self._stays_loaded(found):
            return
        if not found.ok and found.reason != self.availability.reason:
            logger.info("backend %s cannot run here: %s", self.name, found.reason)
        was_available = self.availability.ok
        if found.certain or not was_available:  # an uncertain no stops no load
            self.availability = found
        if was_available and not found.ok:
            async with self._turn.alone():
                if self._stays_loaded(found):
                    return
                if self.availability is not GONE:
                    self.availability = found
                await self._unload()
        if not was_available and found.ok:
            self.health.succeeded()

    def _stays_loaded(self, found: Availability) -> bool:
        """Whether it is loaded, and the probe says nothing certain against it."""
        if not self.loaded or found.certain:
            return False
        stays = "stays loaded, though it cannot be checked"
        self.health.note(f"{stays}: {found.reason}", told=f"{stays}: {found.told or found.reason}")
        return True

    def leave_out(self) -> None:
        """It is not probed now, as the order leaves it out. One that is still loaded answers the requests that it was given before."""
        if not (self.loaded or self.loading or self.closing):
            self.availability = LEFT_OUT

    async def unload(self) -> None:
        """Close the engine, which frees all that it holds."""
        async with self._turn.alone():
            await self._unload()

    async def retire(self) -> None:
        """As `unload`, for good: a call that is under way does not load it again, and what joins requests goes with the last of them."""
        async with self._turn.alone():
            self.availability = GONE
            self._joined = None  # it refers to this backend: a cycle, which no collection finds once it is frozen
            await self._unload()

    def close(self) -> None:
        """As `unload`, at once and in this thread."""
        self._slot.close()

    async def lost(self) -> bool:
        """Whether a loaded engine is lost, and to be unloaded: it died, is stuck, or broke until the breaker opened."""
        engine = self._slot.engine
        if engine is None or not self.loaded or self.loading:
            return False
        problem = await self._trying.fault_of(engine) if self.health.breaker_closed else ""
        if engine is not self._slot.engine:
            return False
        if problem:
            self.health.note(problem)
            self.health.broke(at_once=True)
        return bool(problem) or (engine.queued and not self.health.breaker_closed)

    async def forget(self, users: Collection[Scope]) -> int:
        """Have the engine forget these users, all in one turn: in the engine thread, after the batch that runs. Returns how many states
        were erased.

        An engine that breaks over it is unloaded, which frees all that it keeps, and loaded again like any other.
        """
        if not self.loaded or self.loading:  # a load starts with nothing
            return 0
        async with self._turn.alone():
            engine = self._slot.engine if self.loaded else None
            try:
                return await self._room.thread.run(lambda: forget(engine.backend, users)) if engine else 0
            except Exception as error:  # noqa: BLE001 - a foreign engine may raise anything, and what it keeps has to go
                self.health.note(f"could not forget users and was unloaded: {reason_of(error)}", error)
                await self._unload()
                return 0

    @property
    def kind(self) -> str:
        """The kind of states that can be taken over here; "" where the backend takes none, or is not loaded."""
        engine = self._slot.engine if self.loaded and not self.loading else None
        if engine is None or not hands_over(engine.backend):
            return ""
        return kind_of_engine(self._room.bundle.version, self.import_string, self.options)

    async def hand_over(self) -> AsyncGenerator[list[KeptUser], None]:
        """The states that the engine keeps of users, the hottest first, a few MiB at a time. The backend takes no batch until all are read,
        or the generator is closed.
        """
        if not self.kind:  # a load holds the turn, perhaps for longer than a handover may take
            return
        async with self._turn.alone():
            kind, engine = self.kind, self._slot.engine
            states = sealed(engine.backend, kind) if engine and kind else iter(())
            while chunk := await self._room.thread.run(lambda: chunk_of(states)):
                yield chunk

    async def take_over(self, states: Sequence[KeptUser], wanted: Callable[[KeptUser], bool]) -> int:
        """Have the engine keep those of these states that are `wanted`; returns how many it took. `wanted` is asked in the backend's turn:
        an erasure has been carried out before, or follows.
        """
        async with self._turn.alone():
            kind, engine = self.kind, self._slot.engine
            if engine is None or not kind:
                return 0
            still = [one for one in states if wanted(one)]
            return await self._room.thread.run(lambda: take_over(engine.backend, kind, still))

    def kept(self) -> dict[str, float]:
        """The engine's figures of what it keeps of users; empty where it gives none."""
        return self._figures(lambda engine: kept(engine.backend), "asked what it keeps of users")

    def queue(self) -> dict[str, float]:
        """How much waits to be joined with others, and the engine's figures of its queue; empty where there are neither."""
        waits = {"waiting": self._joined[1]()} if self._joined else {}
        return {**waits, **self._figures(lambda engine: dict(engine.optional("queue") or {}), "asked for its queue")}

    def snapshot(self, rank: int | None, obstacle: SkippedBackend | None) -> BackendSnapshot:
        health = self.health
        return BackendSnapshot(
            name=self.name,
            import_string=self.import_string,
            available=self.availability.ok,
            reason=self.whole(obstacle.reason) if obstacle else "",
            enabled=self.enabled,
            rank=rank,
            loaded=self.loaded,
            breaker=health.state,
            last_error=health.last_error,
            calls=health.calls,
            failures=health.failures,
            fallbacks=self.fallbacks,
            latency=health.latency(),
            kept=self.kept(),
            probing=self.late_probe is not None,
        )

    def whole(self, reason: str) -> str:
        """A reason that callers read, as operators read it."""
        for told, whole in ((self.availability.told, self.availability.reason), (self.health.told, self.health.last_error)):
            if told and reason.startswith(told):
                return whole + reason.removeprefix(told)
        return reason

    def _why_withheld(self, request: RequestT) -> SkippedBackend | None:
        """Why the engine is not given this request, which then counts as neither a call nor a failure: the time is over, as after a backend
        that broke late, or the engine declines it. None where it is given the request.
        """
        if self._trying.is_late(request):
            return OutOfTime(self.name, "the time was over before it was asked")
        try:
            reason = self._slot.engine.optional("declines", request) if self._slot.engine else ""
        except Exception as error:  # noqa: BLE001 - a foreign engine may raise anything
            return self.health.note(f"broke when asked whether it declines: {reason_of(error)}", error)
        return Declined(self.name, str(reason)) if reason else None

    async def _answers(self, requests: Sequence[RequestT]) -> Sequence[AnswerT | SkippedBackend]:
        if self.queued:
            return await together([self._answer_one(request) for request in requests])
        if self._room.join:
            self._joined = self._joined or self._room.join(self.name, self._answer_batch)
            return await together([self._joined[0](request) for request in requests])
        return await self._answer_batch(requests)

    async def _answer_batch(self, requests: Sequence[RequestT]) -> Sequence[AnswerT | SkippedBackend]:
        async with self._turn.together():
            if skipped := self.why_not_callable():  # asked again: that may have changed while the requests waited
                return [skipped] * len(requests)
            results = await self._trying.answer(requests, self._room.thread.compute) if self.loaded and self.health.breaker_closed else None
        if results is None:
            async with self._turn.alone():
                if skipped := self.why_not_callable():
                    return [skipped] * len(requests)
                results = await self._load_and_try(requests, self._room.thread.compute)
        elif self.health.state is BreakerState.OPEN:
            async with self._turn.alone():
                await self._unload_if_open(CALL_WAITS_S)
        self.health.calls += len(requests)
        self.health.failures += sum(map(has_failed, results))
        return results

    async def _answer_one(self, request: RequestT) -> AnswerT | SkippedBackend:
        """Answer one request by an engine with a queue, beside those that it answers already."""
        if skipped := self.why_not_callable():
            return skipped
        self.health.calls += 1
        (result,) = await self._trying.answer([request], self._room.thread.run)
        self.health.failures += has_failed(result)
        return result

    async def _load_and_try(self, requests: Sequence[RequestT], run: Run, *, rehearsal: bool = False) -> list[AnswerT | SkippedBackend]:
        """Alone in the backend's turn. Where this opens the breaker, the engine is unloaded."""
        if not (self.loaded or await self._load(run)):
            return [self.health.skipped(self.health.told, failed=True)] * len(requests)
        results = await self._trying.answer(requests, run, rehearsal=rehearsal)
        await self._unload_if_open()
        return results

    async def _load(self, run: Run) -> bool:
        """Load the engine; returns whether it is loaded. A failed load opens the breaker at once."""
        try:
            await self._slot.load(run)
        except Exception as error:  # noqa: BLE001 - any error of an engine while it loads is a reason to ask the next one
            self.health.note(f"could not be loaded: {reason_of(error)}", error, told=f"could not be loaded: {kind_of(error)}")
            self.health.broke(at_once=True)
            await self._unload()
        return self.loaded

    async def _unload_if_open(self, within_s: float | None = None) -> None:
        """Alone in the backend's turn. An open breaker's next trial starts from a fresh load."""
        if self.health.state is BreakerState.OPEN:
            await self._unload(within_s)

    async def _unload(self, within_s: float | None = None) -> None:
        """Alone in the backend's turn. Waits for the close for `within_s` at most; None: for CLOSED_WITHIN_S. Where the breaker is
        not closed, the engine is at fault, and is condemned.
        """
        self.measured_ms, self.exclusion = None, ""
        if close := self._slot.unload(condemned=not self.health.breaker_closed):
            self._close = close
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.wrap_future(close), CLOSED_WITHIN_S if within_s is None else within_s)

    def _figures(self, of: Callable[[Engine[RequestT, AnswerT]], Mapping[str, Any]], asked: str) -> dict[str, float]:
        engine = self._slot.engine
        try:
            given = of(engine) if engine and self.loaded and not self.loading else {}
            return {name: figure for name, value in given.items() if isfinite(figure := float(value))}
        except Exception as error:  # noqa: BLE001 - a foreign engine may raise anything
            self.health.note(f"broke when {asked}: {reason_of(error)}", error)
            return {}
