"""The encoder deployment: batches requests from all gateways and asks the framework controller for their answers."""

from collections.abc import Sequence
from typing import TypeAlias

from cluster.controller import FrameworkController, NoBackendAnswered, Served
from cluster.values import EncodeAnswer, Encoded, EncodeRequest, StageReport
from deployments.batching import MicroBatcher
from deployments.replica import StageReplica, sample_history
from integrations.hstu.limits import limits

Controller: TypeAlias = FrameworkController[EncodeRequest, Encoded]
WARM_UP_LENGTHS = (1, 20, 200)
WARM_UP_ITEMS = 100


class Encoder(StageReplica[Controller]):
    """One replica; `encode` is what the gateways call."""

    stage = "encoder"
    controller_type = FrameworkController

    def _set_up(self) -> None:
        self._longest = limits(self._bundle.manifest.model).max_history
        self._batcher = MicroBatcher(self._answer, self._settings.encoder.batching, tokens=self._tokens)

    async def encode(self, request: EncodeRequest) -> EncodeAnswer | NoBackendAnswered:
        """One user's state and nearest items, or why no engine gave them: a value, since for Ray this call did not fail."""
        served = await self._batcher.submit(request)
        if isinstance(served, NoBackendAnswered):
            return served
        report = StageReport("encode", served.backend, served.duration_ms, served.fallback_from)
        return EncodeAnswer(served.answer, report, self._bundle.version)

    def _tokens(self, request: EncodeRequest) -> int:
        """Behaviours that the engine computes: the model's window of them."""
        return min(len(request.sequence), self._longest)

    async def _answer(self, requests: list[EncodeRequest]) -> Sequence[Served[Encoded] | NoBackendAnswered]:
        return await self._in_thread(lambda: self._controller.call(requests))

    def _samples(self) -> list[EncodeRequest]:
        """Histories of several lengths over real items, so that every engine has run before the first user comes."""
        items = len(self._bundle.catalogue)
        return [EncodeRequest(sample_history(length, items), top_n=min(WARM_UP_ITEMS, items)) for length in WARM_UP_LENGTHS]
