"""The generator's stage of the pipeline: the items a decoder names for the user's state, in time, or why there are none."""

import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeAlias

import numpy as np

from cluster.bundle import Bundle
from cluster.controller import NoBackendAnswered
from cluster.errors import BackendError, BackendFailed
from cluster.managed_backend import passed_over
from cluster.traffic.budget import Budget, each_in_time
from cluster.values import (
    FloatArray,
    GenerateAnswer,
    Generated,
    GenerateRequest,
    RecommendRequest,
    SkippedBackend,
    StageReport,
    UserSequence,
    UserState,
)
from cluster.window import default_step, window_start
from pipelines.candidates import Candidates, broken
from pipelines.history import Wishes

Part: TypeAlias = Generated | GenerateAnswer
Generate: TypeAlias = Callable[[GenerateRequest, float], Awaitable[GenerateAnswer]]
Stream: TypeAlias = Callable[[GenerateRequest, float], AsyncIterator[Part]]
STAGE = "generate"
CHOICE = 3
"""How many generated items there are for each of the `k` that diversity or freshness choose, up to the pool."""
AT_WORK = StageReport(STAGE, "not known yet", 0.0)


class Generation:
    """`generate` and `stream` are the generator stage, here or across the cluster; both are told how many seconds they may take.

    A stream yields items as they are found and lastly the answer. Where there is none, everything is found at the end.
    """

    def __init__(
        self, bundle: Bundle, generate: Generate | None, stream: Stream | None, *, beam: int, pool: int, deadline_s: float
    ) -> None:
        self._version, self._size, self._prompt_length = bundle.version, len(bundle.catalogue), bundle.prompt_length
        self._beam, self._pool, self._deadline_s = beam, pool, deadline_s
        self._generate, self._stream = generate if bundle.manifest.decoder else None, stream

    @property
    def available(self) -> bool:
        """Whether there is a decoder, and a stage to ask for it."""
        return self._generate is not None

    async def find(
        self, retrieved: Candidates, wishes: Wishes, request: RecommendRequest, budget: Budget, *, streaming: bool
    ) -> AsyncGenerator[Candidates, None]:
        """Items as they are found, none twice and none that is excluded; lastly the complete list, best first, or why there is none."""
        if obstacle := self._obstacle(retrieved):
            yield obstacle
            return
        started = time.perf_counter()
        skipped: tuple[SkippedBackend, ...] | None = None
        try:
            asked = self._asked(retrieved, wishes, request)
            async with aclosing(self._found(asked, budget.within(self._deadline_s), streaming=streaming)) as parts:
                async for part in parts:
                    yield part
        except NoBackendAnswered as error:
            skipped = error.skipped
        except BackendError as error:
            skipped = (passed_over("generator", error),)
        if skipped is not None:
            yield Candidates.none(STAGE, skipped, degraded=True, duration_ms=(time.perf_counter() - started) * 1000)

    def _obstacle(self, retrieved: Candidates) -> Candidates | None:
        """What there is instead of items where nobody can be asked for them. It degrades the answer where there is a user to ask about."""
        if not self.available:
            return Candidates.none(STAGE, (SkippedBackend("generator", f"{self._version} has no decoder"),), degraded=False)
        if retrieved.states is None:
            reason = f"{retrieved.report.backend} gives no user states, which a decoder is prompted with"
            return Candidates.none(STAGE, (SkippedBackend("generator", reason),), degraded=retrieved.report.stage == "encode")
        return None

    def _asked(self, retrieved: Candidates, wishes: Wishes, request: RecommendRequest) -> GenerateRequest:
        """As many items as the beam is wide. No deadline: whose clock is it?"""
        assert retrieved.states is not None
        width = self._width(request)
        return GenerateRequest(
            prompt(retrieved.states, wishes.sequence, self._prompt_length),
            width,
            width,
            wishes.excluded,
            wishes.among,
            tenant=request.tenant,
            sampling=request.sampling,
            model_version=self._version,
            whose=request.user_id,
        )

    def _width(self, request: RecommendRequest) -> int:
        """The beam's, since a blend takes what it can get, or what is asked for; more where diversity or freshness choose from it alone."""
        chosen_from = request.strategy == "generative" and (request.diversity or request.freshness)
        choice = min(CHOICE * request.k, self._pool) if chosen_from else 0
        return min(max(self._beam, request.k, choice), self._size)

    async def _found(self, asked: GenerateRequest, within_s: float, *, streaming: bool) -> AsyncGenerator[Candidates, None]:
        """Raises BackendError, DeadlineExceeded among them."""
        parts = self._stream(asked, within_s) if streaming and self._stream else self._at_once(asked, within_s)
        known = asked.blocked
        async with aclosing(each_in_time(parts, within_s)) as punctual:
            async for part in punctual:
                generated = self._generated(part)
                if streaming:
                    new = ~np.isin(generated.items, known) & (generated.items >= 1) & (generated.items <= self._size)
                    known = np.append(known, generated.items)
                    yield Candidates(generated.items, generated.log_probs, AT_WORK, complete=False).at(new)
                if isinstance(part, GenerateAnswer):
                    found = Candidates(generated.items, generated.log_probs, part.report, broken(part.report))
                    yield found.without(asked.blocked)
                    return
        raise BackendFailed("the generator stopped before its answer was complete")

    async def _at_once(self, asked: GenerateRequest, within_s: float) -> AsyncGenerator[Part, None]:
        assert self._generate is not None
        yield await self._generate(asked, within_s)

    def _generated(self, part: Part) -> Generated:
        if isinstance(part, Generated):
            return part
        if part.model_version != self._version:
            here = f"the generator serves {part.model_version}, this gateway {self._version}"
            raise BackendFailed(f"{here}: a new version is being rolled out")
        return part.generated


def prompt(states: FloatArray, sequence: UserSequence, longest: int) -> UserState:
    """What a decoder is prompted with: the states after the latest events, `longest` at most, and those events.

    Of a long history they are a window that moves in steps: what decoders keep of a prompt is valid from its first event on. `states` may
    be fewer than the events, or more than the prompt takes.
    """
    latest = states[window_start(len(sequence), longest, default_step(longest)) - len(sequence) :]
    return UserState(latest, last_events(sequence, len(latest)))


def last_events(sequence: UserSequence, count: int) -> UserSequence:
    """The `count` latest events, asked about at the same time."""
    rows = slice(max(0, len(sequence) - count), None)
    columns = sequence.items[rows], sequence.timestamps[rows], sequence.actions[rows], sequence.values[rows]
    return UserSequence(*columns, request_time=sequence.request_time)
