"""The ranker stage: what users would do with given candidates. Requests from all gateways are batched, as the encoder's are.

For a model without a ranker it runs too, and says so: `ray_config.yaml` may not name a deployment that the application lacks.
"""

from dataclasses import replace
from time import monotonic
from typing import Any

import numpy as np
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.config import parse
from cluster.controller import NoBackendAnswered
from cluster.ranking import Ranked, RankRequest
from cluster.values import StageAnswer, StageReport
from deployments.batched_model import BatchedModel
from deployments.heartbeat import Heartbeat
from deployments.replica import ModelGone, StageReplica
from deployments.stage_model import sample_history

WARM_UP_LENGTHS = (0, 20, 200)
WARM_UP_CANDIDATES = 100


class RankerModel(BatchedModel[RankRequest, Ranked]):
    """One version of the model: its batches and its engines."""

    stage = "ranker"

    async def rank(self, request: RankRequest) -> StageAnswer[Ranked] | NoBackendAnswered:
        """The predictions for one user's candidates, or why no engine made them."""
        served = await self._served(request)
        if isinstance(served, NoBackendAnswered):
            return served
        report = StageReport("rank", served.backend, served.duration_ms, served.fallback_from)
        return StageAnswer(served.answer, report, self.bundle.version)

    def _tokens(self, request: RankRequest) -> int:
        """Candidates: of the history, most is kept."""
        return len(request.candidates)

    def _samples(self) -> list[RankRequest]:
        """Histories of several lengths over real items, and real candidates."""
        items = len(self.bundle.catalogue)
        candidates = np.arange(1, min(WARM_UP_CANDIDATES, items) + 1, dtype=np.int32)
        return [RankRequest(sample_history(length, items), candidates) for length in WARM_UP_LENGTHS]


class Ranker(StageReplica[RankerModel]):
    """`rank` is what the gateways call, with the seconds it may take from now on."""

    stage = "ranker"
    model_type = RankerModel

    async def rank(self, request: RankRequest, within_s: float) -> StageAnswer[Ranked] | NoBackendAnswered | ModelGone:
        """The predictions, or why there are none: a value, since for Ray this call did not fail."""
        began = monotonic()
        try:
            return await self._model_for(request.model_version).rank(replace(request, deadline=began + within_s))
        except ModelGone as gone:
            return gone
        finally:
            self._record(began)


class RankerDeployment(Ranker):
    """As a Serve deployment."""

    async def __init__(self, settings: dict[str, Any], switchboard: DeploymentHandle[Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        tree = parse(settings)
        super().__init__(tree, Heartbeat(tree, switchboard, serve.get_replica_context().replica_id.unique_id))
        await self.start()
