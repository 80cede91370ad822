"""The ranker stage: what users would do with given candidates. Requests from all gateways are batched, as the encoder's are.

The stage also runs for a model without a ranker, and says so: `ray_config.yaml` may not name a deployment that the application lacks.
"""

import numpy as np

from cluster.ranking import Ranked, RankRequest
from deployments.replicas.batched_model import BatchedModel, BatchedReplica
from deployments.replicas.replica import AsDeployment
from deployments.replicas.stage_model import sample_history

WARM_UP_LENGTHS = (0, 20, 200)
WARM_UP_CANDIDATES = 100


class RankerModel(BatchedModel[RankRequest, Ranked]):
    """One version of the model: its batches and its engines, which compute the users of a batch one by one."""

    stage = "ranker"
    pads = False

    def _rows(self, request: RankRequest) -> int:
        """How many candidates there are: most of the history is kept, and not computed."""
        return len(request.candidates)

    def _samples(self) -> list[RankRequest]:
        """Histories of several lengths over real items, and real candidates."""
        items = self.bundle.items
        candidates = np.arange(1, min(WARM_UP_CANDIDATES, items) + 1, dtype=np.int32)
        return [RankRequest(sample_history(length, items), candidates) for length in WARM_UP_LENGTHS]


class Ranker(BatchedReplica[RankerModel]):
    """Answers a RankRequest with Ranked: what the user would do with each candidate."""

    stage = "ranker"
    model_type = RankerModel


class RankerDeployment(AsDeployment, Ranker):
    """The ranker as Serve makes it."""
