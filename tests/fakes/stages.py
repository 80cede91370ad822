"""All stages of a gateway, played in this process."""

from collections.abc import AsyncGenerator
from typing import Any

from cluster.bundle import BundleStore
from cluster.config import FlagSettings
from cluster.fleet import FleetNews
from cluster.ranking import RankAnswer, RankRequest
from cluster.values import EncodeAnswer, EncodeRequest, GenerateAnswer, Generated, GenerateRequest
from deployments.replica import ModelGone
from tests.fake_stages import Ascending, Descending, Naming


class FakeStages:
    """Every version ranks its catalogue from the last item down. `generators`, `rankers`: what else it has, as a test puts it there.

    `gone`: versions that no replica holds; `able`: those said to be ready; `told`: each change of settings.
    """

    def __init__(self, store: BundleStore) -> None:
        self.encoders = {(bundle := store.open(version)).version: Descending(bundle) for version in store.versions()}
        self.generators: dict[str, Naming] = {}
        self.rankers: dict[str, Ascending] = {}
        self.gone, self.able = set[str](), {1, 2, 3}
        self.told: list[tuple[dict[str, Any], FlagSettings]] = []

    async def encode(self, request: EncodeRequest, within_s: float) -> EncodeAnswer:
        return await self._of(self.encoders, request)(request, within_s)

    async def generate(self, request: GenerateRequest, within_s: float) -> GenerateAnswer:
        return await self._of(self.generators, request)(request, within_s)

    async def generate_stream(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[Generated | GenerateAnswer, None]:
        async for part in self._of(self.generators, request).stream(request, within_s):
            yield part

    async def rank(self, request: RankRequest, within_s: float) -> RankAnswer:
        return await self._of(self.rankers, request)(request, within_s)

    def heed(self, news: FleetNews) -> None:
        self.news = news

    def ready(self, version: int) -> bool:
        return version in self.able

    def calls(self) -> dict[str, dict[str, float]]:
        return {}

    async def start(self) -> None:
        """It is there."""

    async def reconfigure(self, user_config: dict[str, Any], flags: FlagSettings) -> None:
        self.told.append((user_config, flags))

    async def check_health(self) -> None:
        """It is well."""

    async def close(self) -> None:
        """It keeps nothing."""

    def _of(self, engines: dict[str, Any], request: EncodeRequest | GenerateRequest | RankRequest) -> Any:
        if request.model_version in self.gone:
            raise ModelGone(f"not {request.model_version}")
        return engines[request.model_version]
