"""Where the stages are computed: by deployments of their own (split), or in the gateway's replica (colocated). The pipeline cannot tell.

gateway -> SplitStages     -> a handle -> a replica of the encoder, of the generator, of the ranker
-> ColocatedStages -> an Encoder, a Generator and a Ranker of its own
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from ray.serve.handle import DeploymentHandle

from cluster.config import FlagSettings
from cluster.controller import NoBackendAnswered
from cluster.errors import BackendError, BackendUnavailable
from cluster.fleet import READY, FleetNews, Role
from cluster.ranking import RankAnswer, RankRequest
from cluster.traffic.hedging import Hedge
from cluster.values import EncodeAnswer, EncodeRequest, GenerateAnswer, Generated, GenerateRequest
from deployments.encoder import Encoder
from deployments.generator import Generator
from deployments.mailbox import Mailbox
from deployments.ranker import Ranker
from deployments.remote import StageCaller, ask
from deployments.replica import ModelGone, StageReplica

START_WITHIN_S = 120.0
logger = logging.getLogger("ray.serve")


class Stages(Protocol):
    """All stages. Every call raises BackendError where there is no answer, ModelGone where only that version has none."""

    async def encode(self, request: EncodeRequest, within_s: float) -> EncodeAnswer: ...
    async def generate(self, request: GenerateRequest, within_s: float) -> GenerateAnswer: ...
    def generate_stream(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[Generated | GenerateAnswer, None]: ...

    async def rank(self, request: RankRequest, within_s: float) -> RankAnswer: ...

    def heed(self, news: FleetNews) -> None:
        """Take what is known of the replicas by now."""
        ...

    def ready(self, version: int) -> bool:
        """Whether a request for this version finds it, as far as is known."""
        ...

    def calls(self) -> dict[str, dict[str, float]]:
        """What was asked of replicas elsewhere, since the start, by stage; see StageCaller.figures."""
        ...

    async def start(self) -> None: ...
    async def reconfigure(self, user_config: dict[str, Any], flags: FlagSettings) -> None: ...
    async def check_health(self) -> None: ...
    async def close(self) -> None: ...


class SplitStages:
    """Across the cluster."""

    def __init__(
        self,
        encoder: DeploymentHandle[Any],
        generator: DeploymentHandle[Any],
        ranker: DeploymentHandle[Any],
        hedge: Hedge | None = None,
    ) -> None:
        self._hedge = hedge or Hedge(on=False)
        self._mailboxes: dict[Role, Mailbox] = {"encoder": Mailbox(encoder), "ranker": Mailbox(ranker)}
        self._encoder = StageCaller(encoder, hedge=self._hedge, mailbox=self._mailboxes["encoder"])
        self._generator, self._ranker = StageCaller(generator), StageCaller(ranker, mailbox=self._mailboxes["ranker"])
        self._generators: int | None = None
        self._ready: frozenset[int] = frozenset()
        self._alarm = Alarm(generator)

    async def encode(self, request: EncodeRequest, within_s: float) -> EncodeAnswer:
        """Where a replica's engines are broken, or it lacks the version, another one may answer."""
        answer: EncodeAnswer = _raised(await self._encoder.ask("encode", request, within_s=within_s, safe=True, poor=_is_failure))
        return answer

    async def generate(self, request: GenerateRequest, within_s: float) -> GenerateAnswer:
        """What broke one replica's engines is not tried on the next."""
        self._wake()
        answer: GenerateAnswer = _raised(await self._generator.ask("generate", request, within_s=within_s))
        return answer

    async def rank(self, request: RankRequest, within_s: float) -> RankAnswer:
        """As `encode`."""
        answer: RankAnswer = _raised(await self._ranker.ask("rank", request, within_s=within_s, safe=True, poor=_is_failure))
        return answer

    async def generate_stream(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[Generated | GenerateAnswer, None]:
        self._wake()
        async with aclosing(self._generator.ask_stream("generate_stream", request, within_s=within_s)) as parts:
            async for part in parts:
                yield _raised(part)

    def heed(self, news: FleetNews) -> None:
        self._generators, self._ready = news.generators, news.ready
        for stage, mailbox in self._mailboxes.items():
            mailbox.learn(news.replicas.get(stage, ()))

    def ready(self, version: int) -> bool:
        return version in self._ready

    def calls(self) -> dict[str, dict[str, float]]:
        return {"encoder": self._encoder.figures, "generator": self._generator.figures, "ranker": self._ranker.figures}

    def _wake(self) -> None:
        """Raises BackendUnavailable at once where no generator runs, rather than have users wait for one to start."""
        if self._generators == 0:
            self._alarm.ring()
            raise BackendUnavailable("no generator runs now; one is being started")

    async def start(self) -> None:
        """Their replicas start themselves."""

    async def reconfigure(self, user_config: dict[str, Any], flags: FlagSettings) -> None:  # noqa: ARG002 - it is not for the gateway
        """Serve tells their replicas itself."""
        self._hedge.on = flags.hedge

    async def check_health(self) -> None:
        """Serve asks their replicas itself."""

    async def close(self) -> None:
        """Serve stops their replicas itself."""


class Alarm:
    """Has Serve start a replica of a deployment that was scaled to zero, by a call that waits for one."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._ringing: asyncio.Task[None] | None = None

    def ring(self) -> None:
        if self._ringing is None or self._ringing.done():
            self._ringing = asyncio.create_task(self._ring())

    async def _ring(self) -> None:
        try:
            await ask(self._handle, "check_health", within_s=START_WITHIN_S)
        except BackendError as error:
            logger.warning("%s could not be woken: %s", self._handle.deployment_name, error)


class ColocatedStages:
    """In this process: no call leaves it, and each gateway replica has engines of its own."""

    def __init__(self, encoder: Encoder, generator: Generator, ranker: Ranker) -> None:
        self._encoder, self._generator, self._ranker = encoder, generator, ranker

    async def encode(self, request: EncodeRequest, within_s: float) -> EncodeAnswer:
        answer: EncodeAnswer = _raised(await self._encoder.encode(request, within_s))
        return answer

    async def generate(self, request: GenerateRequest, within_s: float) -> GenerateAnswer:
        answer: GenerateAnswer = _raised(await self._generator.generate(request, within_s))
        return answer

    async def rank(self, request: RankRequest, within_s: float) -> RankAnswer:
        answer: RankAnswer = _raised(await self._ranker.rank(request, within_s))
        return answer

    @property
    def _stages(self) -> dict[str, StageReplica[Any]]:
        return {"encoder": self._encoder, "generator": self._generator, "ranker": self._ranker}

    async def generate_stream(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[Generated | GenerateAnswer, None]:
        async with aclosing(self._generator.generate_stream(request, within_s)) as parts:
            async for part in parts:
                yield _raised(part)

    def heed(self, news: FleetNews) -> None:
        """Nobody else is asked."""

    def ready(self, version: int) -> bool:
        return all(stage.holds.get(version) == READY for stage in self._stages.values())

    def calls(self) -> dict[str, dict[str, float]]:
        return {}  # none leaves this process

    async def start(self) -> None:
        for stage in self._stages.values():
            await stage.start()

    async def reconfigure(self, user_config: dict[str, Any], flags: FlagSettings) -> None:  # noqa: ARG002 - nothing can be hedged here
        """A stage's name in a gateway's user_config holds what stands in that deployment's own where they are split."""
        for name, stage in self._stages.items():
            await stage.reconfigure(user_config.get(name, {}))

    async def check_health(self) -> None:
        for stage in self._stages.values():
            await stage.check_health()

    async def close(self) -> None:
        for stage in self._stages.values():
            await stage.close()


def _is_failure(answer: Any) -> bool:
    return isinstance(answer, NoBackendAnswered | ModelGone)


def _raised(answer: Any) -> Any:
    """What a replica gave as a value is raised here where it is an error."""
    if _is_failure(answer):
        raise answer
    return answer
