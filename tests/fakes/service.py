"""A service behind the HTTP routes. A test holds its answers back."""

import asyncio
from collections.abc import AsyncGenerator

from cluster.dataset import Catalogue
from cluster.errors import UnknownChoice
from cluster.fleet.switchboard import Position
from cluster.ranking import Ranking, RankingRequest
from cluster.values import Item, Recommendation, RecommendRequest, StageReport
from deployments.http.connection import current
from deployments.http.messages import BackendsOut, ReadyOut, SwitchOut
from deployments.http.models import ModelsOut
from deployments.http.playground import Offers


class Service:
    """Recommends once the gate is open, and remembers what it was asked and the users given up: `cancelled`, and those of them that were
    out of time: `late`; of streams `closed`. `switched`: the backends that were switched; there is none of the name "none".
    """

    def __init__(self) -> None:
        self.gate, self.asked = asyncio.Event(), list[RecommendRequest]()
        self.cancelled, self.late, self.closed = list[str](), list[str](), list[str]()
        self.switched = list[tuple[str, str, Position]]()

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        self.asked.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(request.user_id)
            if (connection := current()) and connection.late:
                self.late.append(request.user_id)
            raise
        return Recommendation(request.user_id, (), (), "tiny/1", degraded=False)

    async def stream(self, request: RecommendRequest) -> AsyncGenerator[StageReport | Recommendation, None]:
        self.asked.append(request)
        try:
            yield StageReport("encode", "torch", 1.0)
            await self.gate.wait()
            yield Recommendation(request.user_id, (), (), "tiny/1", degraded=False)
        finally:
            self.closed.append(request.user_id)

    async def rank(self, request: RankingRequest) -> Ranking:
        return Ranking(request.user_id, (), (), "tiny/1", degraded=False)

    def item(self, item_id: str) -> Item | None:
        return None

    def catalogue(self) -> Catalogue:
        return Catalogue(())

    def offers(self) -> Offers:
        return Offers("tiny/1", ("retrieval",), ranker=False)

    async def backends(self) -> BackendsOut:
        return BackendsOut(model_version="tiny/1", stages=[])

    async def switch(self, stage: str, name: str, to: Position) -> SwitchOut:
        if name == "none":
            raise UnknownChoice("backend", name, ["torch"])
        self.switched.append((stage, name, to))
        return SwitchOut(stage=stage, name=name, enabled=to != "off", first=to == "first", applied=False)

    async def readiness(self) -> ReadyOut:
        return ReadyOut(ready=True, model_version="tiny/1", stages=[])

    async def models(self) -> ModelsOut:
        return ModelsOut(model_version="tiny/1", replicas={}, versions=[], ended=[])

    async def close(self) -> None:
        """It keeps nothing."""
