"""A service behind the HTTP routes over the real pipeline and a real torch encoder, in this process."""

from collections.abc import AsyncGenerator

from cluster.bundle import Bundle
from cluster.dataset import Catalogue
from cluster.errors import BackendUnavailable, UnknownChoice
from cluster.fleet.switchboard import Position
from cluster.ranking import Ranking, RankingRequest
from cluster.values import AnswerPart, Encoded, EncodeRequest, Item, Recommendation, RecommendRequest, StageAnswer, StageReport
from deployments.http.messages import BackendsOut, ReadyOut, StageReadyOut, SwitchOut
from deployments.http.models import ModelsOut
from deployments.http.playground import Offers
from integrations.hstu.encoder import TorchEncoder
from pipelines.rank import CandidateRanker
from pipelines.recommend import Recommender
from pipelines.stored_history import StoredHistories
from tests.fakes.played_stages import Ascending


class InProcess:
    """What the gateway does with an encoder across the cluster, done with one right here. Its ranker is played. While it is not `ready`,
    its switchboard does not answer.
    """

    def __init__(self, bundle: Bundle) -> None:
        self.bundle, self.encoder, self.ready = bundle, TorchEncoder(), True
        self.encoder.load(bundle)
        self.recommender = Recommender(bundle, self.encode)
        histories = StoredHistories(None, 100)
        self.ranker = CandidateRanker(bundle, histories, self.encode, Ascending(bundle), deadline_s=5.0, ranking_deadline_s=2.0)

    async def encode(self, request: EncodeRequest, within_s: float) -> StageAnswer[Encoded]:
        return StageAnswer(self.encoder.infer(request), StageReport("encode", "torch", 1.0), self.bundle.identity)

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        return await self.recommender.recommend(request)

    async def rank(self, request: RankingRequest) -> Ranking:
        return await self.ranker.rank(request)

    def stream(self, request: RecommendRequest) -> AsyncGenerator[AnswerPart, None]:
        return self.recommender.stream(request)

    def item(self, item_id: str) -> Item | None:
        index = self.bundle.catalogue.index_of(item_id)
        return None if index is None else self.bundle.catalogue[index]

    def catalogue(self) -> Catalogue:
        return self.bundle.catalogue

    def offers(self) -> Offers:
        return Offers(self.bundle.version, ("retrieval",), ranker=True)

    async def backends(self) -> BackendsOut:
        if not self.ready:
            raise BackendUnavailable("the switchboard does not answer")
        return BackendsOut(model_version=self.bundle.version, stages=[])

    async def switch(self, stage: str, name: str, to: Position) -> SwitchOut:
        if name != "torch":
            raise UnknownChoice(stage, name, ["torch"])
        return SwitchOut(stage=stage, name=name, enabled=to != "off", first=to == "first", applied=True)

    async def readiness(self) -> ReadyOut:
        stage = StageReadyOut(stage="encoder", ready=self.ready, detail="")
        return ReadyOut(ready=self.ready, model_version=self.bundle.version, stages=[stage])

    async def models(self) -> ModelsOut:
        return ModelsOut(model_version=self.bundle.version, replicas={}, versions=[], ended=[])

    async def close(self) -> None:
        """It keeps nothing."""
