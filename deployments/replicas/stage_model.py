"""One version of the model on one replica of a stage: its engines behind a framework controller, in a thread of their own."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from time import monotonic
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

import numpy as np

from cluster.bundle import Bundle
from cluster.config import EngineSettings, Settings
from cluster.engines.controller import FrameworkController, Served
from cluster.engines.stage_rules import RULES
from cluster.stages import STAGES
from cluster.values import StageAnswer, StageReport, UserSequence

ControllerT = TypeVar("ControllerT", bound=FrameworkController[Any, Any])
Result = TypeVar("Result")
STUCK_AFTER_S = 30.0
TOO_LATE = "the time was over while the request waited for a batch"


class StageModel(Generic[ControllerT]):
    """Engines run in one thread, so that the event loop stays free to take requests. `close` gives them up."""

    stage: ClassVar[str]
    controller_type: ClassVar[type[FrameworkController[Any, Any]]]

    def __init__(self, settings: Settings, bundle: Bundle) -> None:
        self._settings, self.bundle = settings, bundle
        rules = RULES[self.stage](len(bundle.catalogue))
        controller = self.controller_type.configured(settings.engines(self.stage), bundle, rules)
        self.controller = cast(ControllerT, controller)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._busy_s = 0.0

    async def answer(self, request: Any) -> StageAnswer[Any]:
        """One request's answer. Raises NoBackendAnswered, which says why there is none."""
        raise NotImplementedError

    async def stream(self, request: Any) -> AsyncGenerator[Any, None]:
        """Results as the stage finds them, the same perhaps twice; lastly the answer, which is all that most stages give. Raises
        NoBackendAnswered.
        """
        yield await self.answer(request)

    async def warm_up(self) -> str:
        """Load what is to serve and let it answer samples; which engine that is, and why no other."""
        return await self.in_thread(lambda: self.controller.warm_up(self._samples()))

    async def reconfigure(self, wanted: EngineSettings) -> None:
        """Take a new order or selection, other backends or options of theirs while requests are served."""
        await self.in_thread(lambda: self.controller.follow(wanted))

    async def check(self) -> None:
        """Raises TimeoutError where the engine thread is stuck."""
        await asyncio.wait_for(self.in_thread(lambda: None), timeout=STUCK_AFTER_S)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def compute(self, work: Callable[[], Result]) -> Result:
        """As `in_thread`, and counted as busy: what is computed for requests, of which more replicas could take some."""
        return await self.in_thread(lambda: self._timed(work))

    def busy_s(self) -> float:
        """Seconds that the engine thread has computed for requests since the start; a warm-up is no load."""
        return self._busy_s

    def figures(self) -> dict[str, dict[str, float]]:
        """What engines with queues of their own say of them, by backend."""
        return {}

    def close(self) -> None:
        """Engines free what they hold; the thread ends after what it is doing."""
        self._thread.shutdown(wait=False)
        self.controller.close()

    def _answer_of(self, served: Served[Any]) -> StageAnswer[Any]:
        report = StageReport(STAGES[self.stage].step, served.backend, served.duration_ms, served.fallback_from)
        return StageAnswer(served.answer, report, self.bundle.version)

    def _samples(self) -> list[Any]:
        """Requests that no user made, for the warm-up and for trials."""
        raise NotImplementedError

    def _timed(self, work: Callable[[], Result]) -> Result:
        began = monotonic()
        try:
            return work()
        finally:
            self._busy_s += monotonic() - began


class Due(Protocol):
    """A request; `deadline` is on this process's monotonic clock, None where it has none."""

    @property
    def deadline(self) -> float | None: ...


RequestT = TypeVar("RequestT", bound=Due)
AnswerT = TypeVar("AnswerT")


async def in_time_only(
    requests: Sequence[RequestT], run: Callable[[list[RequestT]], Awaitable[Sequence[AnswerT]]], too_late: Callable[[], AnswerT]
) -> Sequence[AnswerT]:
    """The answers to a batch. Requests that are past their deadlines are not given to `run`, as they would cost the others time: they get
    what `too_late` makes.
    """
    now = monotonic()
    timely = [request.deadline is None or request.deadline > now for request in requests]
    asked = list(compress(requests, timely))
    answers = iter(await run(asked) if asked else ())
    return [next(answers) if in_time else too_late() for in_time in timely]


def sample_history(length: int, items: int) -> UserSequence:
    """A history that no user has: real items, an event an hour."""
    steps = np.arange(length)
    return UserSequence(
        items=(steps % items + 1).astype(np.int32),
        timestamps=(1_700_000_000 + 3600 * steps).astype(np.int64),
        actions=np.zeros(length, np.int8),
        values=np.full(length, np.nan, np.float32),
        request_time=1_700_000_000 + 3600 * length,
    )
