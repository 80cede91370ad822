"""One version of the model on one replica of a stage: its engines behind a framework controller."""

import asyncio
import sys
from typing import ClassVar, Generic, TypeVar

import numpy as np

from cluster.bundle import Bundle
from cluster.config import EngineSettings, Settings
from cluster.engines.controller import FrameworkController, Served
from cluster.engines.room import Join
from cluster.engines.roster import Choice
from cluster.engines.stage_rules import RULES
from cluster.stages import STAGES
from cluster.values import StageAnswer, StageReport, UserSequence
from deployments.replicas.batching import Due

STUCK_AFTER_S = 30.0
RequestT = TypeVar("RequestT", bound=Due)
AnswerT = TypeVar("AnswerT")


class StageModel(Generic[RequestT, AnswerT]):
    """One version of the model; `close` gives its engines up."""

    stage: ClassVar[str]

    def __init__(self, settings: Settings, bundle: Bundle, join: Join[RequestT, AnswerT] | None = None) -> None:
        self._settings, self.bundle = settings, bundle
        rules = RULES[self.stage](bundle)
        self.controller = FrameworkController[RequestT, AnswerT].configured(settings.engines(self.stage), bundle, rules, join)
        self._turn: asyncio.Future[None] | None = None  # of a check's piece of work on the engine thread

    async def answer(self, request: RequestT) -> StageAnswer[AnswerT]:
        """One request's answer. Raises NoBackendAnswered, which says why there is none."""
        raise NotImplementedError

    async def warm_up(self) -> str:
        """Load the engines that are to serve, and have them answer samples. Returns which engine is asked first, and why no other is."""
        return await self.controller.warm_up(self._samples())

    async def reconfigure(self, wanted: EngineSettings) -> None:
        """Take a new order or selection, other backends or options of theirs while requests are served."""
        await self.controller.reconfigure(Choice.of(wanted))

    async def check(self) -> None:
        """Raises TimeoutError where the engine thread does not come to a piece of work in time. The next check waits for the same piece: a
        thread that gets on fails no two checks, even where its calls take a little longer than a check waits.

        Raises RuntimeError where the piece of work finds that nothing can be computed on the GPU any more; see `require_working_gpu`.
        """
        if self._turn is None:
            self._turn = asyncio.ensure_future(self.controller.thread.run(require_working_gpu))
        try:
            await asyncio.wait_for(asyncio.shield(self._turn), timeout=STUCK_AFTER_S)
        except RuntimeError:
            self._turn = None
            raise
        self._turn = None

    def busy_s(self) -> float:
        """Seconds that the engine thread has computed for requests since the start, without the warm-up."""
        return self.controller.thread.busy_s

    def figures(self) -> dict[str, dict[str, float]]:
        """The figures of the requests that wait here, and of engines' own queues, by backend."""
        return self.controller.queues()

    def close(self) -> None:
        """Have the engines free what they hold, after the calls that run."""
        self.controller.close()

    def _reported(self, served: Served[AnswerT]) -> StageAnswer[AnswerT]:
        """The answer, with this stage's report."""
        report = StageReport(STAGES[self.stage].step, served.backend, served.duration_ms, served.fallback_from)
        return StageAnswer(served.answer, report, self.bundle.identity)

    def _samples(self) -> list[RequestT]:
        """Requests that no user made, for the warm-up and for trials."""
        raise NotImplementedError


def require_working_gpu() -> None:
    """Raises torch's RuntimeError where a fault in a kernel has ended this process's use of the GPU: every later call fails, of any engine
    and stream, until the process is replaced. Nothing is asked of a process in which torch has not begun to use one.

    It waits for this thread's stream only: to wait for the whole GPU spoils a CUDA graph that another thread records.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # absent, too, while another thread imports torch
    if cuda is not None and cuda.is_initialized():
        cuda.current_stream().synchronize()


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
