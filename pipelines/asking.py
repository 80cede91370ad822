"""How the pipeline asks a stage: in time, for an answer of the pipeline's version of the model."""

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

from cluster.engines.skipped import NoBackendAnswered, passed_over
from cluster.errors import BackendError, BackendFailed
from cluster.stages import Stage
from cluster.traffic.budget import in_time
from cluster.values import SkippedBackend, StageAnswer

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")
Ask: TypeAlias = Callable[[RequestT, float], Awaitable[StageAnswer[ResultT]]]
"""A stage, in this process or across the cluster, as a function of a request and of the seconds that its answer may take."""


async def ask_in_time(
    stage: Stage[RequestT, ResultT], ask: Ask[RequestT, ResultT], request: RequestT, within_s: float, identity: str
) -> StageAnswer[ResultT]:
    """The stage's answer by the version of this identity. Raises BackendError where there is none, as DeadlineExceeded where it is late."""
    answer = await in_time(lambda: ask(request, within_s), within_s)
    check_version(stage, answer, identity)
    return answer


def check_version(stage: Stage[Any, Any], answer: StageAnswer[Any], identity: str) -> None:
    """Raises BackendFailed at an answer by another version: its indices mean other items."""
    if answer.model_version != identity:
        here = f"the {stage.name} serves {answer.model_version}, this gateway {identity}"
        raise BackendFailed(f"{here}: a new version is being rolled out")


def why_none(stage: Stage[Any, Any], error: BackendError) -> tuple[SkippedBackend, ...]:
    """The reasons in the report of a stage that gave no answer: each backend's where the stage tells them, else the stage's own."""
    return error.skipped if isinstance(error, NoBackendAnswered) else (passed_over(stage.name, error),)
