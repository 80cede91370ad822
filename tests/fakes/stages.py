"""All stages of a gateway, played in this process."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

from cluster.bundle_store import BundleStore
from cluster.config import FlagSettings
from cluster.errors import ModelGone
from cluster.fleet.board import FleetNews
from cluster.ranking import RankRequest
from cluster.stages import GENERATOR, Stage, StageName
from cluster.values import EncodeRequest, GenerateRequest, StageAnswer
from tests.fakes.played_stages import Ascending, Descending, Naming


class FakeStages:
    """Every version, by its name in answers, ranks its catalogue from the last item down. `generators`, `rankers`: what else it has, as a
    test puts it there.

    `gone`: versions that no replica holds; `able`: those said to be ready; `told`: each change of settings.
    """

    def __init__(self, store: BundleStore) -> None:
        self.encoders = {(bundle := store.open(version)).version: Descending(bundle) for version in store.versions()}
        self.generators: dict[str, Naming] = {}
        self.rankers: dict[str, Ascending] = {}
        self.gone, self.able = set[str](), {1, 2, 3}
        self.told: list[tuple[dict[str, Any], FlagSettings]] = []

    async def ask(self, stage: Stage[Any, Any], request: Any, within_s: float) -> StageAnswer[Any]:
        answer: StageAnswer[Any] = await self._engine(stage, request)(request, within_s)
        return answer

    async def stream(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[Any, None]:
        async for part in self._engine(GENERATOR, request).stream(request, within_s):
            yield part

    def update(self, news: FleetNews) -> None:
        self.news = news

    def ready(self, version: int) -> bool:
        return version in self.able

    def calls(self) -> dict[StageName, dict[str, float]]:
        return {}

    async def reconfigure(self, user_config: dict[str, Any], flags: FlagSettings) -> None:
        self.told.append((user_config, flags))

    async def check_health(self) -> None:
        """It is well."""

    async def close(self) -> None:
        """It keeps nothing."""

    def _engine(self, stage: Stage[Any, Any], request: EncodeRequest | GenerateRequest | RankRequest) -> Any:
        version = request.model_version.partition("@")[0]
        if version in self.gone:
            raise ModelGone(f"not {version}")
        engines: dict[str, Mapping[str, Any]] = {"encoder": self.encoders, "generator": self.generators, "ranker": self.rankers}
        return engines[stage.name][version]
