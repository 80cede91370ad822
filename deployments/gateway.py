"""The gateway deployment: HTTP in, the recommendation pipeline, HTTP out. It holds no engine, only the catalogue and what is popular."""

from typing import Any

from fastapi import FastAPI
from ray.serve.handle import DeploymentHandle

from cluster.bundle import BundleStore
from cluster.config import parse
from cluster.controller import NoBackendAnswered
from cluster.values import EncodeAnswer, EncodeRequest, Item, Recommendation, RecommendRequest
from deployments.http_api import create_api
from deployments.messages import BackendsOut, ReadyOut, SwitchOut
from deployments.operation import Operation
from deployments.remote import ask
from pipelines.recommend import Recommender


class Gateway:
    """One replica. Serve asks it for the ASGI application once it is constructed."""

    def __init__(self, settings: dict[str, Any], encoder: DeploymentHandle[Any], switchboard: DeploymentHandle[Any]) -> None:
        self._settings = parse(settings)
        bundle = BundleStore(self._settings.model_dir).open(self._settings.version)
        self._catalogue = bundle.catalogue
        self._recommender, self._encoder = Recommender(bundle, self._encode), encoder
        self._operation = Operation(switchboard, bundle.version)

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(self, self._settings.gateway)

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        return await self._recommender.recommend(request)

    async def _encode(self, request: EncodeRequest) -> EncodeAnswer:
        """The encoder stage, wherever its replicas are. Raises BackendError."""
        answer: EncodeAnswer | NoBackendAnswered = await ask(
            self._encoder, "encode", request, within_s=self._settings.gateway.deadline_s, tries=2
        )
        if isinstance(answer, NoBackendAnswered):
            raise answer
        return answer

    def item(self, item_id: str) -> Item | None:
        index = self._catalogue.index_of(item_id)
        return None if index is None else self._catalogue[index]

    async def backends(self) -> BackendsOut:
        return await self._operation.backends()

    async def switch(self, stage: str, name: str, *, enabled: bool) -> SwitchOut:
        return await self._operation.switch(stage, name, enabled=enabled)

    async def readiness(self) -> ReadyOut:
        return await self._operation.readiness()
