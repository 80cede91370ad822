"""The generator's stage of the pipeline: the items a decoder names for the user's state, in time, or why there are none."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import TypeAlias

import numpy as np

from cluster.bundle import Bundle
from cluster.errors import BackendError, BackendFailed
from cluster.stages import ENCODER, GENERATOR
from cluster.traffic.budget import Budget, each_in_time
from cluster.values import (
    FloatArray,
    Generated,
    GeneratedPart,
    GenerateRequest,
    SkippedBackend,
    StageAnswer,
    StageReport,
    UserSequence,
    UserState,
)
from cluster.window import Window
from pipelines.asking import Ask, ask_in_time, check_version, why_none
from pipelines.candidates import Candidates, broken
from pipelines.history import ResolvedRequest

Generate: TypeAlias = Ask[GenerateRequest, Generated]
Stream: TypeAlias = Callable[[GenerateRequest, float], AsyncIterator[GeneratedPart]]
AT_WORK = StageReport(GENERATOR.step, "not known yet", 0.0)


class Generation:
    """`generate` and `stream` are the generator stage, here or across the cluster; both are told how many seconds they may take.

    A stream yields items as they are found and lastly the answer. Where there is none, everything is found at the end.
    """

    def __init__(self, bundle: Bundle, generate: Generate | None, stream: Stream | None, *, deadline_s: float) -> None:
        self._version, self._identity = bundle.version, bundle.identity
        self._size, self._prompt_length = len(bundle.catalogue), bundle.prompt_length
        self._generate, self._stream, self._deadline_s = generate if bundle.manifest.decoder else None, stream, deadline_s

    @property
    def available(self) -> bool:
        """Whether there is a decoder, and a stage to ask for it."""
        return self._generate is not None

    async def complete(self, retrieved: Candidates, resolved: ResolvedRequest, width: int, budget: Budget) -> Candidates:
        """The complete list without excluded items, best first, or why there is none. `width`: how many items to generate."""
        if obstacle := self._obstacle(retrieved):
            return obstacle
        assert self._generate is not None
        began = time.perf_counter()
        try:
            prompted = self._request(retrieved, resolved, width)
            answer = await ask_in_time(GENERATOR, self._generate, prompted, budget.within(self._deadline_s), self._identity)
        except BackendError as error:
            return Candidates.asked_in_vain(GENERATOR.step, why_none(GENERATOR, error), began)
        return self._candidates(answer, resolved)

    async def stream(
        self, retrieved: Candidates, resolved: ResolvedRequest, width: int, budget: Budget
    ) -> AsyncGenerator[Candidates, None]:
        """Items as they are found, none twice and none that is excluded; lastly the complete list, as `complete` gives it."""
        if obstacle := self._obstacle(retrieved):
            yield obstacle
            return
        began = time.perf_counter()
        skipped: tuple[SkippedBackend, ...] | None = None
        try:
            prompted = self._request(retrieved, resolved, width)
            async with aclosing(self._found(prompted, resolved, budget.within(self._deadline_s))) as parts:
                async for part in parts:
                    yield part
        except BackendError as error:
            skipped = why_none(GENERATOR, error)
        if skipped is not None:
            yield Candidates.asked_in_vain(GENERATOR.step, skipped, began)

    def _obstacle(self, retrieved: Candidates) -> Candidates | None:
        """Why no generator can be asked, None if one can. Missing states degrade the answer only if the encoder answered without them."""
        if not self.available:
            return Candidates.not_asked(GENERATOR, f"{self._version} has no decoder")
        if retrieved.states is None:
            reason = f"{retrieved.report.backend} gives no user states, which a decoder is prompted with"
            return Candidates.not_asked(GENERATOR, reason, degraded=retrieved.report.stage == ENCODER.step)
        return None

    def _request(self, retrieved: Candidates, resolved: ResolvedRequest, width: int) -> GenerateRequest:
        """The request for as many items as the beam is wide. The replica sets the deadline, by its own clock."""
        assert retrieved.states is not None
        request = resolved.request
        return GenerateRequest(
            prompt(retrieved.states, resolved.sequence, self._prompt_length),
            width,
            width,
            resolved.excluded,
            resolved.among,
            tenant=request.tenant,
            sampling=request.sampling,
            model_version=self._identity,
            user_id=request.user_id,
        )

    async def _found(self, request: GenerateRequest, resolved: ResolvedRequest, within_s: float) -> AsyncGenerator[Candidates, None]:
        """The items as they are found. Raises BackendError, as DeadlineExceeded where they come too late."""
        parts = self._stream(request, within_s) if self._stream else self._at_once(request, within_s)
        known = request.blocked
        async with aclosing(each_in_time(parts, within_s)) as punctual:
            async for part in punctual:
                if isinstance(part, StageAnswer):
                    check_version(GENERATOR, part, self._identity)
                generated = part.result if isinstance(part, StageAnswer) else part
                new = ~np.isin(generated.items, known) & (generated.items >= 1) & (generated.items <= self._size)
                known = np.append(known, generated.items)
                yield Candidates(generated.items, generated.log_probs, AT_WORK, complete=False).at(new)
                if isinstance(part, StageAnswer):
                    yield self._candidates(part, resolved)
                    return
        raise BackendFailed("the generator stopped before its answer was complete")

    async def _at_once(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[GeneratedPart, None]:
        assert self._generate is not None
        yield await self._generate(request, within_s)

    @staticmethod
    def _candidates(answer: StageAnswer[Generated], resolved: ResolvedRequest) -> Candidates:
        found = Candidates(answer.result.items, answer.result.log_probs, answer.report, broken(answer.report))
        return found.without(resolved.barred)


def prompt(states: FloatArray, sequence: UserSequence, longest: int) -> UserState:
    """The input of a decoder's prompt: the states after the latest events, `longest` at most, and those events.

    For a long history they are a window that moves in steps, as the rows that decoders keep of a prompt are valid from its first event on.
    `states` may be fewer than the events, or more than the prompt takes.
    """
    latest = states[Window.of(longest).start(len(sequence)) - len(sequence) :]
    return UserState(latest, last_events(sequence, len(latest)))


def last_events(sequence: UserSequence, count: int) -> UserSequence:
    """The `count` latest events, asked about at the same time."""
    rows = slice(max(0, len(sequence) - count), None)
    columns = sequence.items[rows], sequence.timestamps[rows], sequence.actions[rows], sequence.values[rows]
    return UserSequence(*columns, request_time=sequence.request_time)
