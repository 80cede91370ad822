"""The gateway deployment: HTTP in, the recommendation pipeline, HTTP out. It holds no engine, only what ranks and
titles items: the catalogue, their vectors and first days, what is popular, the blend.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from cluster.bundle import Bundle, BundleStore
from cluster.config import parse
from cluster.controller import NoBackendAnswered
from cluster.values import (
    AnswerPart,
    EncodeAnswer,
    EncodeRequest,
    GenerateAnswer,
    Generated,
    GenerateRequest,
    Item,
    Recommendation,
    RecommendRequest,
)
from deployments.following import Follower
from deployments.http_api import create_api
from deployments.messages import BackendsOut, ReadyOut, SwitchOut
from deployments.operation import Operation
from deployments.remote import ask, ask_stream
from deployments.stores import open_cache, open_events
from deployments.user_data import UserData
from pipelines.answers import Answers
from pipelines.recommend import Recommender
from pipelines.stored_history import StoredHistories

GRACE_S = 1.0
"""How much longer than the pipeline a call waits for the generator: that the time is over is for the pipeline, or the replica, to say."""


class Gateway:
    """One replica. Serve asks it for the ASGI application once it is constructed."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        settings: dict[str, Any],
        encoder: DeploymentHandle[Any],
        generator: DeploymentHandle[Any],
        switchboard: DeploymentHandle[Any],
    ) -> None:
        self._settings = parse(settings)
        self._encoder, self._generator = encoder, generator
        bundle = BundleStore(self._settings.model_dir).open(self._settings.version)
        self._catalogue = bundle.catalogue
        generates = bundle.manifest.decoder is not None
        self._operation = Operation(switchboard, bundle.version, stages=("encoder", "generator") if generates else ("encoder",))
        cache, events = await open_cache(self._settings.cache), await open_events(self._settings)
        histories = StoredHistories(events, self._settings.gateway.max_behaviours)
        self._answers = Answers(self._recommender(bundle, generates=generates), histories, cache, bundle.digest)
        self._data = UserData(self._settings, self._operation, bundle.catalogue, self._answers, cache=cache, events=events)
        self._following = asyncio.create_task(self._follower(switchboard).follow_forever())

    def __serve_build_asgi_app__(self) -> FastAPI:
        return create_api(self, self._data, self._settings.gateway)

    async def check_health(self) -> None:
        """Unhealthy where it does not follow erasures any more: it would keep what it should forget."""
        if self._following.done():
            self._following.result()

    async def close(self) -> None:
        """Let go of what it keeps state in."""
        self._following.cancel()
        await self._data.close()

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        return await self._answers.recommend(request)

    def stream(self, request: RecommendRequest) -> AsyncGenerator[AnswerPart, None]:
        return self._answers.stream(request)

    def _follower(self, switchboard: DeploymentHandle[Any]) -> Follower:
        edge = self._settings.gateway
        return Follower(
            switchboard,
            f"gateway/{serve.get_replica_context().replica_id.unique_id}",
            on_erasure=self._data.forget,
            on_lost_track=self._data.forget,
            again_after_s=edge.deadline_s + edge.generation_deadline_s + GRACE_S,
        )

    def _recommender(self, bundle: Bundle, *, generates: bool) -> Recommender:
        edge = self._settings.gateway
        return Recommender(
            bundle,
            self._encode,
            self._generate if generates else None,
            self._generate_stream if generates else None,
            beam=self._settings.generator.beam,
            pool=edge.pool,
            generation_deadline_s=edge.generation_deadline_s,
        )

    async def _encode(self, request: EncodeRequest) -> EncodeAnswer:
        """The encoder stage, wherever its replicas are. Raises BackendError."""
        within_s = self._settings.gateway.deadline_s
        answer: EncodeAnswer | NoBackendAnswered = await ask(self._encoder, "encode", request, within_s=within_s, tries=2)
        if isinstance(answer, NoBackendAnswered):
            raise answer
        return answer

    async def _generate(self, request: GenerateRequest, within_s: float) -> GenerateAnswer:
        """The generator stage. Raises BackendError. What broke one replica or its engines is not tried on the next."""
        answer: GenerateAnswer | NoBackendAnswered = await ask(self._generator, "generate", request, within_s, within_s=within_s + GRACE_S)
        if isinstance(answer, NoBackendAnswered):
            raise answer
        return answer

    async def _generate_stream(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[Generated | GenerateAnswer, None]:
        """The same, piece by piece."""
        parts = ask_stream(self._generator, "generate_stream", request, within_s, within_s=within_s + GRACE_S)
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, NoBackendAnswered):
                    raise part
                yield part

    def item(self, item_id: str) -> Item | None:
        index = self._catalogue.index_of(item_id)
        return None if index is None else self._catalogue[index]

    async def backends(self) -> BackendsOut:
        return await self._operation.backends()

    async def switch(self, stage: str, name: str, *, enabled: bool) -> SwitchOut:
        return await self._operation.switch(stage, name, enabled=enabled)

    async def readiness(self) -> ReadyOut:
        return await self._operation.readiness()
