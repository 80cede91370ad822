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
        self._longest = limits(bundle.manifest.model).max_history

    def _rows(self, request: EncodeRequest) -> int:
        """How many behaviours the engine computes: as many as are in the model's window."""
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
