"""The encoder stage: batches requests from all gateways and asks the framework controller for their answers."""

from cluster.bundle import Bundle
from cluster.config import Settings
from cluster.values import Encoded, EncodeRequest
from deployments.replicas.batched_model import BatchedModel, BatchedReplica
from deployments.replicas.replica import AsDeployment
from deployments.replicas.stage_model import sample_history
from integrations.hstu.limits import limits

WARM_UP_LENGTHS = (1, 20, 200)
WARM_UP_ITEMS = 100


class EncoderModel(BatchedModel[EncodeRequest, Encoded]):
    """One version of the model: its batches and its engines."""

    stage = "encoder"

    def __init__(self, settings: Settings, bundle: Bundle) -> None:
        super().__init__(settings, bundle)
        self._longest, batching = limits(bundle.manifest.model).max_history, settings.encoder.batching
        self._foreseen = batching.max_tokens // batching.max_requests

    def _rows(self, request: EncodeRequest) -> int:
        """How many behaviours the engine computes: as many as are in the model's window, or the new ones alone where it keeps the others.

        By then it may keep them no longer, or another engine may answer. So it is not asked about histories so long that a batch full of
        them, computed whole, would be beyond `max_tokens`.
        """
        whole = self._most_rows(request)
        return self.controller.rows(request, whole) if whole <= self._foreseen else whole

    def _most_rows(self, request: EncodeRequest) -> int:
        return min(len(request.sequence), self._longest)

    def _samples(self) -> list[EncodeRequest]:
        """Histories of several lengths over real items, so that every engine has run before the first user comes."""
        items = self.bundle.items
        return [EncodeRequest(sample_history(length, items), top_n=min(WARM_UP_ITEMS, items)) for length in WARM_UP_LENGTHS]


class Encoder(BatchedReplica[EncoderModel]):
    """Answers an EncodeRequest with Encoded: a user's state and the nearest items."""

    stage = "encoder"
    model_type = EncoderModel


class EncoderDeployment(AsDeployment, Encoder):
    """The encoder as Serve makes it."""
