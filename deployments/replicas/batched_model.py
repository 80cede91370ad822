"""A stage with engines that take whole batches: requests from all gateways are joined, and the framework controller answers them together.

An engine with a queue of its own is given each request at once, as long as it is the one that is asked first.
"""

import logging
from asyncio import FIRST_COMPLETED, Future, wait
from collections.abc import AsyncGenerator
from time import monotonic
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from cluster.bundle import Bundle
from cluster.config import Settings
from cluster.engines.controller import Served
from cluster.engines.skipped import NoBackendAnswered, OutOfTime, kind_of
from cluster.errors import BackendFailed, GenrecError, ModelGone
from cluster.traffic.batcher import Raised
from cluster.values import Outcomes, StageAnswer, Together
from deployments.replicas.batching import TOO_LATE, engine_batcher
from deployments.replicas.replica import StageReplica, due
from deployments.replicas.stage_model import AnswerT, RequestT, StageModel
from deployments.telemetry.metrics import StageRecorder, meter

Outcome: TypeAlias = Served[AnswerT] | NoBackendAnswered
LINGER_S = 0.01
"""How long an outcome waits for others of its call: each part costs the replica and the gateway almost a millisecond of Python."""
logger = logging.getLogger("ray.serve")


class BatchedModel(StageModel[RequestT, AnswerT], Generic[RequestT, AnswerT]):
    """One version of the model: its batches and its engines. `pads`: see StageRecorder."""

    pads: ClassVar[bool] = True

    def __init__(self, settings: Settings, bundle: Bundle) -> None:
        super().__init__(settings, bundle)
        waited = OutOfTime(self.stage, TOO_LATE)
        self._batcher = engine_batcher(
            self.controller.call,
            settings.engines(self.stage).batching,
            self._rows,
            lambda: NoBackendAnswered(self.stage, (waited,)),
            StageRecorder(self.stage, meter(), pads=self.pads).batch,
            most_rows=self._most_rows,
            one_by_one=lambda: self.controller.one_by_one,
        )

    def figures(self) -> dict[str, dict[str, float]]:
        waiting = 0 if self.controller.one_by_one else self._batcher.waiting  # each is with the engine, which may tell of a queue itself
        batches = {"waiting": float(waiting), "requests": float(self._batcher.under_way)}
        return {"batches": batches, **super().figures()}

    async def answer(self, request: RequestT) -> StageAnswer[AnswerT]:
        return self.answer_of(await self.submit(request))

    def submit(self, request: RequestT) -> Future[Outcome[AnswerT]]:
        """A future of the outcome that a batch has for this request."""
        return self._batcher.submit(request)

    def answer_of(self, outcome: Outcome[AnswerT]) -> StageAnswer[AnswerT]:
        """Raises NoBackendAnswered."""
        if isinstance(outcome, NoBackendAnswered):
            raise outcome
        return self._reported(outcome)

    def _rows(self, request: RequestT) -> int:
        """How many rows an engine computes for the request."""
        raise NotImplementedError

    def _most_rows(self, request: RequestT) -> int:
        """How many it computes at most, where it may turn out that `_rows` were too few."""
        return self._rows(request)


BatchedT = TypeVar("BatchedT", bound=BatchedModel[Any, Any])


class BatchedReplica(StageReplica[BatchedT]):
    """A replica that takes the requests of a call as they come, without a task for each."""

    async def together(self, requests: Together) -> Outcomes:
        """The outcomes of several requests of one gateway for one version, all at once."""
        began = monotonic()
        try:
            model = self._model_for(requests.model_version)
        except ModelGone as error:
            return _none(requests, error)
        waiting = _submitted(model, requests, began)
        try:
            outcomes = [(0, await self._outcome(model, waiting[0], began))]  # it waits longest, so that its batch is the first
            first = monotonic()
            outcomes += [(place, await self._outcome(model, one, began)) for place, one in enumerate(waiting[1:], 1)]
            return Outcomes(outcomes, monotonic() - first, model.controller.one_by_one)
        finally:
            for one in waiting:
                one.cancel()  # where the gateway has left

    async def together_in_parts(self, requests: Together) -> AsyncGenerator[Outcomes, None]:
        """As `together`, but each time that a batch ends, the outcomes that are there."""
        began = monotonic()
        try:
            model = self._model_for(requests.model_version)
        except ModelGone as error:
            yield _none(requests, error)
            return
        waiting = {one: place for place, one in enumerate(_submitted(model, requests, began))}
        first = 0.0
        try:
            while waiting:
                await wait(waiting, return_when=FIRST_COMPLETED)
                now = monotonic()
                first = first or now
                await wait(waiting, timeout=LINGER_S)
                ended = [one for one in waiting if one.done()]
                outcomes = [(waiting.pop(one), await self._outcome(model, one, began)) for one in ended]
                yield Outcomes(outcomes, now - first, model.controller.one_by_one)
        finally:
            for one in waiting:
                one.cancel()  # where the gateway has left

    async def _outcome(self, model: BatchedT, waiting: Future[Outcome[Any]], began: float) -> StageAnswer[Any] | NoBackendAnswered | Raised:
        try:
            with self._recorded(began):
                return model.answer_of(await waiting)
        except NoBackendAnswered as error:
            return error
        except GenrecError as error:
            return Raised(error)
        except Exception as error:
            logger.exception("the %s failed in a way it does not know", self.stage)
            return Raised(BackendFailed(f"the {self.stage} raised {kind_of(error)}; its log has the trace"))


def _none(requests: Together, why: ModelGone) -> Outcomes:
    return Outcomes([(place, why) for place in range(len(requests.requests))])


def _submitted(model: BatchedModel[Any, Any], requests: Together, began: float) -> list[Future[Outcome[Any]]]:
    return [model.submit(due(request, began, within_s)) for request, within_s in requests.requests]
