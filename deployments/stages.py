"""Where the stages are computed: by deployments of their own (split), or in the gateway's replica (colocated). The pipeline cannot tell.

gateway -> SplitStages     -> a handle -> a replica of the encoder, of the generator, of the ranker
        -> ColocatedStages -> an Encoder, a Generator and a Ranker of its own
"""

import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, Protocol, TypeVar, cast

from ray.serve.handle import DeploymentHandle

from cluster.background import Background
from cluster.config import FlagSettings
from cluster.engines.skipped import NoBackendAnswered, declined, out_of_time
from cluster.errors import BackendError, BackendUnavailable, ModelGone
from cluster.fleet.board import READY, FleetNews
from cluster.stages import ENCODER, GENERATOR, RANKER, Stage, StageName
from cluster.traffic.hedging import Hedge
from cluster.values import GeneratedPart, GenerateRequest, StageAnswer
from deployments.calls.mailbox import Mailbox
from deployments.calls.remote import StageCaller, ask
from deployments.replicas.encoder import Encoder
from deployments.replicas.generator import Generator
from deployments.replicas.ranker import Ranker
from deployments.replicas.replica import StageReplica

START_WITHIN_S = 120.0
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
logger = logging.getLogger("ray.serve")


class Stages(Protocol):
    """All stages. `ask` and `stream` raise BackendError where there is no answer; ModelGone where only the version asked for is missing."""

    def ask(self, stage: Stage[RequestT, ResultT], request: RequestT, within_s: float) -> Awaitable[StageAnswer[ResultT]]:
        """The stage's answer to one request, within `within_s` seconds."""
        ...

    def stream(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[GeneratedPart, None]:
        """Items as the generator finds them, some perhaps twice, and lastly its answer."""
        ...

    def update(self, news: FleetNews) -> None:
        """Take the latest news of the replicas."""
        ...

    def ready(self, version: int) -> bool:
        """Whether replicas of all stages serve this version, as far as is known."""
        ...

    def calls(self) -> dict[StageName, dict[str, float]]:
        """Counts of calls to other replicas since the start, by stage; see StageCaller.figures."""
        ...

    async def reconfigure(self, user_config: dict[str, Any], flags: FlagSettings) -> None: ...
    async def check_health(self) -> None: ...
    async def close(self) -> None: ...


class SplitStages:
    """Stages that are deployments of their own, anywhere in the cluster."""

    def __init__(
        self,
        encoder: DeploymentHandle[Any],
        generator: DeploymentHandle[Any],
        ranker: DeploymentHandle[Any],
        hedge: Hedge | None = None,
    ) -> None:
        self._hedge = hedge or Hedge(on=False)
        self._mailboxes: dict[StageName, Mailbox] = {"encoder": Mailbox(encoder), "ranker": Mailbox(ranker)}
        self._callers: dict[StageName, StageCaller] = {
            stage.name: StageCaller(
                handle,
                hedge=self._hedge if stage is ENCODER else None,
                mailbox=self._mailboxes.get(stage.name),
                repeatable=stage.repeatable,
                poor=_another_may_do_better,
            )
            for stage, handle in ((ENCODER, encoder), (GENERATOR, generator), (RANKER, ranker))
        }
        self._generators: int | None = None
        self._ready: frozenset[int] = frozenset()
        self._all_known = False
        self._scale_up = ScaleUpTrigger(generator)

    async def ask(self, stage: Stage[RequestT, ResultT], request: RequestT, within_s: float) -> StageAnswer[ResultT]:
        """Where a replica's engines are broken, or it lacks the version, the request goes to another replica."""
        if stage is GENERATOR:
            self._require_generator()
        return cast("StageAnswer[ResultT]", _answer_or_raise(await self._callers[stage.name].ask(request, within_s=within_s)))

    async def stream(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[GeneratedPart, None]:
        self._require_generator()
        async with aclosing(self._callers["generator"].ask_stream(request, within_s=within_s)) as parts:
            async for part in parts:
                yield _answer_or_raise(part)

    def update(self, news: FleetNews) -> None:
        self._ready = news.ready
        if news.generators is not None:
            self._generators = news.generators
        if news.settled or not self._all_known:  # a restarted switchboard has heard of few replicas: the homes of users would move
            for stage, mailbox in self._mailboxes.items():
                mailbox.learn(news.replicas.get(stage, ()))
        self._all_known |= news.settled

    def ready(self, version: int) -> bool:
        return version in self._ready

    def calls(self) -> dict[StageName, dict[str, float]]:
        return {stage: caller.figures for stage, caller in self._callers.items()}

    def _require_generator(self) -> None:
        """Raises BackendUnavailable at once where no generator runs, and has one started: users do not wait for its start."""
        if self._generators == 0:
            self._scale_up.pull()
            raise BackendUnavailable("no generator runs now; one is being started")

    async def reconfigure(self, user_config: dict[str, Any], flags: FlagSettings) -> None:  # noqa: ARG002 - it is not for the gateway
        """Serve tells their replicas itself."""
        self._hedge.on = flags.hedge

    async def check_health(self) -> None:
        """Serve asks their replicas itself."""

    async def close(self) -> None:
        """Serve stops their replicas itself."""


class ScaleUpTrigger:
    """Has Serve start a replica of a deployment that was scaled to zero, by a call that waits for one."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle, self._starting = handle, Background(1)

    def pull(self) -> None:
        if self._starting.has_room():
            self._starting.start(self._start())

    async def _start(self) -> None:
        try:
            await ask(self._handle, "check_health", within_s=START_WITHIN_S)
        except BackendError as error:
            logger.warning("%s could not be woken: %s", self._handle.deployment_name, error)


class ColocatedStages:
    """Stages in the gateway's own process: no call leaves it, and each gateway replica has its own engines."""

    def __init__(self, encoder: Encoder, generator: Generator, ranker: Ranker) -> None:
        self._replicas: dict[StageName, StageReplica[Any]] = {"encoder": encoder, "generator": generator, "ranker": ranker}
        self._generator = generator

    def ask(self, stage: Stage[RequestT, ResultT], request: RequestT, within_s: float) -> Awaitable[StageAnswer[ResultT]]:
        return self._replicas[stage.name].ask(request, within_s)

    async def stream(self, request: GenerateRequest, within_s: float) -> AsyncGenerator[GeneratedPart, None]:
        async with aclosing(self._generator.stream(request, within_s)) as parts:
            async for part in parts:
                yield _answer_or_raise(part)

    def update(self, news: FleetNews) -> None:
        """No other process is asked."""

    def ready(self, version: int) -> bool:
        return all(replica.holds.get(version) == READY for replica in self._replicas.values())

    def calls(self) -> dict[StageName, dict[str, float]]:
        return {}  # none leaves this process

    async def reconfigure(self, user_config: dict[str, Any], flags: FlagSettings) -> None:  # noqa: ARG002 - nothing can be hedged here
        """`user_config` holds by each stage's name what, with split stages, stands in the user_config of the stage's deployment."""
        for stage, replica in self._replicas.items():
            await replica.reconfigure(user_config.get(stage, {}))

    async def check_health(self) -> None:
        for replica in self._replicas.values():
            await replica.check_health()

    async def close(self) -> None:
        for replica in self._replicas.values():
            await replica.close()


def _another_may_do_better(answer: Any) -> bool:
    """Whether another replica may still answer: not where the time is over, which is so for all replicas, or where every engine declined
    the request.
    """
    if isinstance(answer, NoBackendAnswered):
        return not (out_of_time(answer.skipped) or declined(answer.skipped))
    return isinstance(answer, ModelGone)


def _answer_or_raise(answer: Any) -> Any:
    """The answer. Raises an error that a replica gave in its place."""
    if isinstance(answer, NoBackendAnswered | ModelGone):
        raise answer
    return answer
