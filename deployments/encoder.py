"""The encoder stage: batches requests from all gateways and asks the framework controller for their answers."""

from dataclasses import replace
from time import monotonic
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.bundle import Bundle
from cluster.config import Settings, parse
from cluster.controller import NoBackendAnswered
from cluster.values import Encoded, EncodeRequest, StageAnswer, StageReport
from deployments.batched_model import BatchedModel
from deployments.heartbeat import Heartbeat
from deployments.replica import ModelGone, StageReplica
from deployments.stage_model import sample_history
from integrations.hstu.limits import limits

WARM_UP_LENGTHS = (1, 20, 200)
WARM_UP_ITEMS = 100


class EncoderModel(BatchedModel[EncodeRequest, Encoded]):
    """One version of the model: its batches and its engines."""

    stage = "encoder"

    def __init__(self, settings: Settings, bundle: Bundle) -> None:
        super().__init__(settings, bundle)
        self._longest = limits(bundle.manifest.model).max_history

    async def encode(self, request: EncodeRequest) -> StageAnswer[Encoded] | NoBackendAnswered:
        """One user's state and nearest items, or why no engine gave them."""
        served = await self._served(request)
        if isinstance(served, NoBackendAnswered):
            return served
        report = StageReport("encode", served.backend, served.duration_ms, served.fallback_from)
        return StageAnswer(served.answer, report, self.bundle.version)

    def _tokens(self, request: EncodeRequest) -> int:
        """Behaviours that the engine computes: the model's window of them."""
        return min(len(request.sequence), self._longest)

    def _samples(self) -> list[EncodeRequest]:
        """Histories of several lengths over real items, so that every engine has run before the first user comes."""
        items = len(self.bundle.catalogue)
        return [EncodeRequest(sample_history(length, items), top_n=min(WARM_UP_ITEMS, items)) for length in WARM_UP_LENGTHS]


class Encoder(StageReplica[EncoderModel]):
    """`encode` is what the gateways call, with the seconds it may take from now on."""

    stage = "encoder"
    model_type = EncoderModel

    async def encode(self, request: EncodeRequest, within_s: float) -> StageAnswer[Encoded] | NoBackendAnswered | ModelGone:
        """The answer, or why there is none: a value, since for Ray this call did not fail."""
        began = monotonic()
        try:
            return await self._model_for(request.model_version).encode(replace(request, deadline=began + within_s))
        except ModelGone as gone:
            return gone
        finally:
            self._record(began)


class EncoderDeployment(Encoder):
    """As a Serve deployment."""

    async def __init__(self, settings: dict[str, Any], switchboard: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        tree = parse(settings)
        super().__init__(tree, Heartbeat(tree, switchboard, serve.get_replica_context().replica_id.unique_id))
        await self.start()
