"""A backend that is asked from an event loop: an engine with a queue of its own takes many requests at a time, any other a batch at a time.

An engine takes many at a time where it has `ainfer` (and `astream`, if it can say what it finds as it finds it). Its calls hold no lock, so
nothing here waits for anything but the engine: loads, unloads and trials are left to the controller's refreshes, which run in a thread.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from cluster.engines.breaker import BreakerState
from cluster.engines.managed_backend import ManagedBackend
from cluster.engines.skipped import OutOfTime, has_failed, reason_of
from cluster.errors import DeadlineExceeded
from cluster.values import SkippedBackend

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
KNOWN_GOOD_WITHIN_S = 5.0
"""How long an engine may take for a request it answered before, until it counts as broken."""
LATE_TO_BE_STUCK = 3
"""Calls that came too late to be answered, with no answer between them, after which an engine is asked all the same: it may be stuck."""


class ConcurrentBackend(ManagedBackend[RequestT, AnswerT]):
    """All that stands here but `lost` may be called from the event loop at any time; the rest is as with ManagedBackend."""

    _late_in_a_row = 0

    @property
    def concurrent(self) -> bool:
        """Whether its engine takes many requests at a time; False as long as there is none."""
        return hasattr(self._backend, "ainfer")

    @property
    def streams(self) -> bool:
        return hasattr(self._backend, "astream")

    def unfit(self) -> SkippedBackend | None:
        """Why it would not be asked now: beside any obstacle, that it is not loaded, or not past its trial by the samples."""
        untried = self.concurrent and not self._closed_breaker()
        return self.obstacle() or (self.unready() if untried or not self.loaded else None)

    def declined(self, request: RequestT) -> SkippedBackend | None:
        """Why this one request is not for it: neither a call nor a failure."""
        try:
            reason = self._optional("declines", request) or ""
        except Exception as error:  # noqa: BLE001 - a foreign engine may raise anything
            return self._note(f"broke when asked whether it declines: {reason_of(error)}", error)
        return self._skipped(str(reason)) if reason else None

    def lost(self) -> bool:
        """Whether it is loaded and of no use: its engine died, is stuck, or broke until the breaker opened. It is then to be unloaded."""
        if not self.loaded:
            return False
        if self._closed_breaker() and (problem := self._unusable()):
            self._note(problem)
            self.breaker = self.breaker.failed(self._clock(), at_once=True)
            return True
        return self.concurrent and not self._closed_breaker()

    def _unusable(self) -> str:
        if not self._is_alive():
            return "has lost its engine"
        if self._late_in_a_row < LATE_TO_BE_STUCK:
            return ""
        self._late_in_a_row = 0
        sound = asyncio.run(self._is_sound(self._backend))
        return "" if sound else f"is stuck: it was late again and again, and gave no answer to a sample within {KNOWN_GOOD_WITHIN_S:g} s"

    def queue(self) -> dict[str, float]:
        """What the engine says of its queue, such as how many requests wait; empty where it says nothing."""
        try:
            return dict(self._optional("queue") or {}) if self.loaded else {}
        except Exception as error:  # noqa: BLE001 - a foreign engine may raise anything
            self._note(f"broke when asked for its queue: {reason_of(error)}", error)
            return {}

    async def answer_one(self, request: RequestT) -> AnswerT | SkippedBackend:
        """An answer or why there is none, as with `answer`: a request that breaks an engine in good health does not count against it."""
        engine: Any = self._backend
        self.calls += 1
        result = await self._ask(engine, request)
        if has_failed(result):
            sound = await self._is_sound(engine)
            if sound and self._retries:
                result = await self._ask(engine, request)
            self._judge_of(engine, sound=sound)
            self.failures += has_failed(result)
        return result

    async def stream_one(self, request: RequestT) -> AsyncGenerator[AnswerT | SkippedBackend, None]:
        """What the engine finds as it finds it. Where it breaks, the reason comes last, and it is not asked again."""
        engine, began = self._backend, self._clock()
        self.calls += 1
        result: AnswerT | SkippedBackend | None = None
        async with aclosing(self._pieces(engine, request)) as pieces:
            async for result in pieces:
                if not isinstance(result, SkippedBackend):
                    yield result
        if has_failed(result):
            self.failures += 1
            self._judge_of(engine, sound=await self._is_sound(engine))
        if isinstance(result, SkippedBackend):
            yield result
        else:
            self._answered(engine, began)

    async def _pieces(self, engine: Any, request: RequestT) -> AsyncGenerator[AnswerT | SkippedBackend, None]:
        try:
            async with aclosing(engine.astream(request)) as pieces:
                async for piece in pieces:
                    result = self._checked(request, piece)
                    yield result
                    if isinstance(result, SkippedBackend):
                        return
        except (DeadlineExceeded, asyncio.CancelledError) as error:
            yield self._gave_up(error)
        except Exception as error:  # noqa: BLE001 - any error of an engine is a reason to ask the next one
            yield self._broke(engine, error)

    async def _ask(self, engine: Any, request: RequestT) -> AnswerT | SkippedBackend:
        began = self._clock()
        try:
            result = self._checked(request, await engine.ainfer(request))
        except (DeadlineExceeded, asyncio.CancelledError) as error:
            return self._gave_up(error)
        except Exception as error:  # noqa: BLE001 - any error of an engine is a reason to ask the next one
            return self._broke(engine, error)
        if not isinstance(result, SkippedBackend):
            self._answered(engine, began)
        return result

    async def _is_sound(self, engine: Any) -> bool:
        """Whether it still answers a request that it answered before."""
        known_good = self._known_good
        if known_good is None or not self._is_current(engine) or not self._is_alive():
            return False
        try:
            answer = await asyncio.wait_for(engine.ainfer(known_good), KNOWN_GOOD_WITHIN_S)
        except Exception:  # noqa: BLE001 - why it does not answer is noted already
            return False
        return not self._rules.nonsense(known_good, answer)

    def _judge_of(self, engine: Any, *, sound: bool) -> None:
        """Count for or against the breaker, unless another engine has been loaded since. An open one is closed by a trial only."""
        if not self._is_current(engine):
            return
        if not sound:
            calls = 1 if self._known_good is None else 2  # the request's and that by which it was found out
            self.breaker = self.breaker.failed(self._clock(), calls=calls, at_once=not self._is_alive() or self.suspected())
        elif self._closed_breaker():
            self.breaker = self.breaker.succeeded()

    def _answered(self, engine: Any, began: float) -> None:
        now, self._late_in_a_row = self._clock(), 0
        self._judge_of(engine, sound=True)
        with self._latency_lock:
            self._latency.record((now - began) * 1e3, now)

    def _gave_up(self, error: DeadlineExceeded | asyncio.CancelledError) -> OutOfTime:
        """The time was over, or the caller has gone, perhaps because it was: raises that one again."""
        self._late_in_a_row += 1
        if isinstance(error, DeadlineExceeded):
            return self._late(error)
        raise error

    def _broke(self, engine: Any, error: Exception) -> SkippedBackend:
        """Why, noted unless the engine has been taken away from under the call, which happens for a reason of its own."""
        reason = f"broke: {reason_of(error)}"
        return self._note(reason, error) if self._is_current(engine) else self._skipped(reason, failed=True)

    def _record(self, duration_s: float, requests: Sequence[RequestT], results: Sequence[AnswerT | SkippedBackend]) -> None:
        """Keep a sample as what tells a broken engine from a poisoned request: a user's has a deadline, and cannot be asked again."""
        known_good = self._known_good
        super()._record(duration_s, requests, results)
        if self._counting:
            self._known_good = known_good

    def _is_current(self, engine: object) -> bool:
        return engine is self._backend

    def _is_alive(self) -> bool:
        try:
            return self._optional("alive") is not False
        except Exception:  # noqa: BLE001 - an engine that cannot even say so is not
            return False

    def _optional(self, name: str, *args: Any) -> Any:
        """What a method answers that a backend may have; None where it has not."""
        method = getattr(self._backend, name, None)
        return method(*args) if method else None

    def _closed_breaker(self) -> bool:
        return self.breaker.state(self._clock()) is BreakerState.CLOSED
