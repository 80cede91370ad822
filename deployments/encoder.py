"""The encoder deployment: batches requests from all gateways and asks the framework controller for their answers."""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from cluster.bundle import Bundle
from cluster.config import Settings
from cluster.controller import FrameworkController, NoBackendAnswered, Served
from cluster.stage_rules import encoder_rules
from cluster.values import EncodeAnswer, Encoded, EncodeRequest, StageReport, UserSequence
from deployments.batching import MicroBatcher
from deployments.replica import StageReplica
from integrations.hstu.limits import limits

Controller: TypeAlias = FrameworkController[EncodeRequest, Encoded]
WARM_UP_LENGTHS = (1, 20, 200)


class Encoder(StageReplica[Controller]):
    """One replica; `encode` is what the gateways call."""

    stage = "encoder"

    def _create_controller(self, settings: Settings, bundle: Bundle) -> Controller:
        return Controller.configured(settings.encoder, bundle, encoder_rules(len(bundle.catalogue)))

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
        return [_history_of(length, len(self._bundle.catalogue)) for length in WARM_UP_LENGTHS]


def _history_of(length: int, items: int) -> EncodeRequest:
    steps = np.arange(length)
    sequence = UserSequence(
        items=(steps % items + 1).astype(np.int32),
        timestamps=(1_700_000_000 + 3600 * steps).astype(np.int64),
        actions=np.zeros(length, np.int8),
        values=np.full(length, np.nan, np.float32),
        request_time=1_700_000_000 + 3600 * length,
    )
    return EncodeRequest(sequence, top_n=min(100, items))
