"""The stages that engines serve, in one table.

encoder     EncodeRequest   -> Encoded      a user's state, and the nearest items
generator   GenerateRequest -> Generated    the items that a decoder names for that state
ranker      RankRequest     -> Ranked       what the user would do with each candidate
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from cluster.ranking import Ranked, RankRequest
from cluster.values import Encoded, EncodeRequest, Generated, GenerateRequest

StageName: TypeAlias = Literal["encoder", "generator", "ranker"]
RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True, slots=True, eq=False)
class Stage(Generic[RequestT, ResultT]):
    """`name`: of the deployment, its section of the configuration and its table of backends. `step`: the stage's name in an answer's
    `stages` and in traces. `extent`: how much a request asks for, as attributes of its span. `repeatable`: the stage only computes, and
    quickly, so that a request may go to a second replica beside the first, or after an error of the first.
    """

    name: StageName
    step: str
    extent: Callable[[RequestT], dict[str, int]]
    repeatable: bool


ENCODER: Stage[EncodeRequest, Encoded] = Stage("encoder", "encode", lambda request: {"events": len(request.sequence)}, repeatable=True)
GENERATOR: Stage[GenerateRequest, Generated] = Stage("generator", "generate", lambda request: {"width": request.width}, repeatable=False)
RANKER: Stage[RankRequest, Ranked] = Stage("ranker", "rank", lambda request: {"candidates": len(request.candidates)}, repeatable=True)
STAGES: dict[str, Stage[Any, Any]] = {"encoder": ENCODER, "generator": GENERATOR, "ranker": RANKER}
