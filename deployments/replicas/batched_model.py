"""A stage whose engines take whole batches: requests from all gateways are joined, and the framework controller answers them together."""

from collections.abc import Sequence
from typing import Generic

from cluster.bundle import Bundle
from cluster.config import Settings
from cluster.engines.controller import Served
from cluster.engines.skipped import NoBackendAnswered, OutOfTime
from cluster.values import StageAnswer
from deployments.replicas.batching import MicroBatcher
from deployments.replicas.stage_model import TOO_LATE, AnswerT, RequestT, StageModel, in_time_only
from deployments.telemetry.metrics import StageRecorder, meter


class BatchedModel(StageModel[RequestT, AnswerT], Generic[RequestT, AnswerT]):
    """One version of the model: its batches and its engines."""

    def __init__(self, settings: Settings, bundle: Bundle) -> None:
        super().__init__(settings, bundle)
        batching, recorder = settings.engines(self.stage).batching, StageRecorder(self.stage, meter())
        self._batcher = MicroBatcher(self._run, batching, tokens=self._tokens, watch=recorder.batch)

    def figures(self) -> dict[str, dict[str, float]]:
        return {"batches": {"waiting": float(self._batcher.waiting)}, **super().figures()}

    async def answer(self, request: RequestT) -> StageAnswer[AnswerT]:
        served = await self._batcher.submit(request)
        if isinstance(served, NoBackendAnswered):
            raise served
        return self._answer_of(served)

    def _tokens(self, request: RequestT) -> int:
        """How many rows an engine computes for it."""
        raise NotImplementedError

    async def _run(self, requests: list[RequestT]) -> Sequence[Served[AnswerT] | NoBackendAnswered]:
        waited = OutOfTime(self.stage, TOO_LATE)
        return await in_time_only(requests, self.controller.call, lambda: NoBackendAnswered(self.stage, (waited,)))
