"""A service behind the HTTP routes. A test holds its answers back."""

import asyncio
from collections.abc import AsyncGenerator

from cluster.values import Recommendation, RecommendRequest, StageReport
from deployments.http.connection import current
from deployments.http.messages import BackendsOut, ReadyOut


class Service:
    """Answers once the gate is open, and remembers what it was asked and the users given up: `cancelled`, and those of them that were
    out of time: `late`; of streams `closed`.
    """

    def __init__(self) -> None:
        self.gate, self.asked = asyncio.Event(), list[RecommendRequest]()
        self.cancelled, self.late, self.closed = list[str](), list[str](), list[str]()

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

    def item(self, item_id: str) -> None:
        return None

    async def backends(self) -> BackendsOut:
        return BackendsOut(model_version="tiny/1", stages=[])

    async def readiness(self) -> ReadyOut:
        return ReadyOut(ready=True, model_version="tiny/1", stages=[])
