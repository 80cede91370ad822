"""What calls of a backend's engine come to: an answer for each request, or the reason why there is none; and whether the engine is sound.

    answer         a batch: where the whole call breaks, tries a sample, then halves of the batch; judges the engine
      _attempt     one call of the engine
    stream         a request, its answer in pieces
    fault_of       an engine that calls have not broken, though it may be dead or stuck

A sample is a request of the warm-up that the engine answered, never a user's. What is found out about an engine counts only as long as the
backend has no other one. Only what a backend's own code raises is caught (a foreign engine may raise anything).
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Generic, TypeVar

from cluster.engines.call_cost import CallCost
from cluster.engines.engine import Engine, Nonsense, Queue
from cluster.engines.halving import in_parts
from cluster.engines.health import Health
from cluster.engines.room import EngineRoom, Run
from cluster.engines.skipped import OutOfTime, any_answer, has_failed, kind_of, reason_of
from cluster.engines.slot import EngineSlot
from cluster.errors import DeadlineExceeded
from cluster.traffic.breaker import BreakerState
from cluster.values import SkippedBackend

RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
SAMPLE_WITHIN_S, SAMPLE_SLOWER = 5.0, 10.0
"""How long an engine with a queue may take for a sample that it answered before, until it counts as broken: so many seconds, or so many
times as long as before, whichever is more.
"""
BRIEF_S = 0.003
"""A call that takes less processor time is not worth a thread. The way there and back costs a lone request about a millisecond, and in a
batch the thread and the event loop take the interpreter from each other; other requests wait for the call no longer than for what else
holds up the loop.
"""
LATE_TO_BE_STUCK = 3
"""After so many calls in a row that were late, with no answer between them, an engine is asked a sample: it may be stuck."""


class Trying(Generic[RequestT, AnswerT]):
    """The calls of the engine in `slot`, which say to `health` what they came to. `rehearsed_ms`: how long it last took for the samples."""

    def __init__(self, name: str, room: EngineRoom[RequestT, AnswerT], health: Health, slot: EngineSlot[RequestT, AnswerT]) -> None:
        self.rehearsed_ms = 0.0
        self._name, self._room, self._health, self._slot = name, room, health, slot
        self._cost = CallCost()

    async def answer(self, requests: Sequence[RequestT], run: Run, *, rehearsal: bool = False) -> list[AnswerT | SkippedBackend]:
        """For each request, in the order asked, an answer or the reason why there is none. In the backend's turn, unless its engine has a
        queue. With `rehearsal` the requests are samples, which count as no calls and no latencies.

        Where the whole call breaks, a sample that the engine answered before tells whether it is broken or the requests are poisoned.

        A poisoned batch is halved until the requests at fault stand alone. These never count against the breaker of a backend that answers
        others; every call of a broken backend does, the sample's too.
        """
        engine, broken_calls = self._slot.engine, 0
        assert engine is not None
        on_trial = self._health.state is BreakerState.HALF_OPEN

        async def attempt(part: Sequence[RequestT]) -> list[AnswerT | SkippedBackend]:
            nonlocal broken_calls
            results = await self._attempt(engine, part, run, rehearsal=rehearsal)
            broken_calls += all(map(has_failed, results))
            return results

        results = await attempt(requests)
        if any_answer(results):
            self._judge(engine, sound=True, on_trial=on_trial)
            return results
        if all(isinstance(result, OutOfTime) for result in results):  # one request may have made all late: apart from it, others are not
            return results if len(requests) <= 1 else await in_parts(requests, results, attempt, self._room.retries, self.is_late)
        still_answers = await self._still_answers(engine, run)
        if still_answers or (still_answers is None and not on_trial):
            results = await in_parts(requests, results, attempt, self._room.retries, self.is_late)
        broken_calls += still_answers is False
        self._judge(engine, sound=still_answers or any_answer(results), on_trial=on_trial, broken_calls=broken_calls)
        return results

    async def stream(self, engine: Queue[RequestT, AnswerT], request: RequestT) -> AsyncGenerator[AnswerT | SkippedBackend, None]:
        """Pieces of the answer as the engine finds them, counted as one call. Where it breaks, the reason comes last."""
        began, result = self._room.clock(), None
        self._health.calls += 1
        async with aclosing(engine.stream(request)) as outcomes:
            async for outcome in outcomes:
                result = self._result(engine, outcome)
                if not isinstance(result, SkippedBackend):
                    yield result
        if has_failed(result):
            self._health.failures += 1
            still_answers = await self._still_answers(engine, self._room.thread.run)
            self._judge(engine, sound=bool(still_answers), broken_calls=1 + (still_answers is False))
        if isinstance(result, SkippedBackend):
            yield result
        else:
            self._health.record(self._room.clock() - began)
            self._judge(engine, sound=True)

    async def fault_of(self, engine: Engine[RequestT, AnswerT]) -> str:
        """What is wrong with a loaded engine that has not broken on calls; "" where nothing is."""
        if loss := engine.loss():
            return loss
        if engine.late_in_a_row < LATE_TO_BE_STUCK:
            return ""
        engine.late_in_a_row, answered = 0, engine.answered
        if await self._still_answers(engine, self._room.thread.run) or engine.answered > answered:  # the sample may wait behind others
            return ""
        return f"is stuck: it was late again and again, and gave no answer within {self._sample_within_s:g} s, a sample's among them"

    def is_late(self, request: RequestT) -> bool:
        """Whether the request's deadline has passed: no caller waits for its answer any longer."""
        deadline: float | None = getattr(request, "deadline", None)
        return deadline is not None and deadline <= self._room.clock()

    async def _attempt(
        self, engine: Engine[RequestT, AnswerT], requests: Sequence[RequestT], run: Run, *, rehearsal: bool
    ) -> list[AnswerT | SkippedBackend]:
        """One call of the engine: by `run`, or on the event loop where that computes for requests and the call is brief."""
        thread, rows = self._room.thread, None
        if engine.brief and run == thread.compute and not thread.pending:
            rows = engine.rows(requests, otherwise=len(requests))
            run = thread.compute_here if self._cost.expected_s(len(requests), rows) < BRIEF_S else run
        reply = await engine.ask(requests, run)
        results = [self._result(engine, outcome) for outcome in reply.outcomes]
        answered = [request for request, result in zip(requests, results, strict=True) if not isinstance(result, SkippedBackend)]
        if answered and rehearsal:
            engine.known_good, self.rehearsed_ms = answered[-1], reply.duration_s * 1e3
        elif answered:
            self._health.record(reply.duration_s, len(answered))
            if rows is not None:
                self._cost.note(len(requests), rows, reply.spent_s)
        return results

    async def _still_answers(self, engine: Engine[RequestT, AnswerT], run: Run) -> bool | None:
        """Whether the engine still answers a sample that it answered before; None where there is no such sample."""
        if engine is not self._slot.engine or not engine.is_alive():
            return False
        if engine.known_good is None:
            return None
        try:
            async with asyncio.timeout(self._sample_within_s if engine.queued else None):
                (outcome,) = (await engine.ask([engine.known_good], run)).outcomes
        except TimeoutError:
            return False
        return not isinstance(outcome, Exception)

    @property
    def _sample_within_s(self) -> float:
        return max(SAMPLE_WITHIN_S, SAMPLE_SLOWER * self.rehearsed_ms / 1e3)

    def _judge(self, engine: Engine[RequestT, AnswerT], *, sound: bool, on_trial: bool = False, broken_calls: int = 0) -> None:
        """Count for or against the breaker, unless another engine has been loaded since. Only a trial closes an open breaker."""
        if engine is not self._slot.engine:
            return
        if not sound:
            self._health.broke(calls=max(1, broken_calls), at_once=not engine.is_alive())
        elif on_trial or self._health.breaker_closed:
            self._health.succeeded()

    def _result(self, engine: Engine[RequestT, AnswerT], outcome: AnswerT | Exception) -> AnswerT | SkippedBackend:
        """The answer, or why there is none. The reason is noted, unless the engine was replaced during the call for a reason of its own."""
        if not isinstance(outcome, Exception):
            return outcome
        if isinstance(outcome, DeadlineExceeded):
            return OutOfTime(self._name, f"{outcome}")
        if nonsense := isinstance(outcome, Nonsense):
            reason = told = f"{outcome}"
        else:
            reason, told = f"broke: {reason_of(outcome)}", f"broke: {kind_of(outcome)}"
        if engine is not self._slot.engine:
            return self._health.skipped(told, failed=True)
        return self._health.note(reason, None if nonsense else outcome, told=told)
