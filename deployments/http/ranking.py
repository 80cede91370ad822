"""POST /v1/rank: given candidates, in the order in which a user would want them."""

from collections.abc import Callable
from typing import Annotated, Protocol

import msgspec
from fastapi import APIRouter, Response
from pydantic import BeforeValidator, ConfigDict, Field
from starlette.types import Scope

from cluster.config import GatewaySettings
from cluster.errors import InvalidRequest
from cluster.ranking import Ranking, RankingRequest, Task
from deployments.http.answer_json import ranking_json
from deployments.http.bodies import RankBody
from deployments.http.callers import Caller, CallerHere
from deployments.http.interface import DirectRoute
from deployments.http.messages import TENANT_SAID, Behaviours, ItemIds, ItemOut, Message, StageOut, Tenant, Timestamp, UserId, few_fields
from deployments.http.pieces import InPieces
from deployments.http.reading import ReadingRoute


class RankingService(Protocol):
    """The gateway, as this route calls it."""

    async def rank(self, request: RankingRequest) -> Ranking: ...


Weight = Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)]


class RankIn(Message):
    """A user and the candidates to order for this user."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "user_id": "196",
                    "behaviours": [{"item_id": "50", "timestamp": 881250949, "action": "rating", "value": 5}],
                    "candidates": ["181", "258", "286", "1"],
                    "weights": {"click": 1, "rating": 0.5},
                }
            ]
        }
    )

    user_id: UserId
    candidates: ItemIds = Field(min_length=1, description="items to order; those that are given twice are ranked once")
    behaviours: Behaviours | None = Field(None, description="in any order. Default: what is stored of the user (/v1/events)")
    weights: Annotated[dict[Task, Weight], Field(min_length=1), BeforeValidator(few_fields)] | None = Field(
        None,
        description="task -> how much it counts. The score is p(click) * (weight of click + the other tasks' weights * their predictions, "
        "a rating's as its place on the scale of the data, 0 to 1): what showing the item is worth. Default: as the model's training chose",
    )
    request_time: Timestamp | None = Field(None, description="the moment to rank for; default: now")
    tenant: Tenant | None = Field(None, description=TENANT_SAID)
    deadline_ms: float | None = Field(None, gt=0, le=600_000, allow_inf_nan=False, description="time for the whole answer")

    def to_value(self, tenant: str, arrived: float | None) -> RankingRequest:
        """See RankBody.to_value."""
        return msgspec.convert(self.model_dump(exclude_unset=True), RankBody).to_value(tenant, arrived)


class RankedItemOut(ItemOut):
    score: float = Field(description="orders the items of this answer; what `weights` make of the predictions, where there are any")
    predictions: dict[Task, float] = Field(
        description="task -> probability, but of `rating` the expected rating; all but `click` are of a user that has turned to the item. "
        "Empty where no ranker answered: then the score is a cosine, or a share of all events"
    )


class RankOut(Message):
    user_id: str
    items: list[RankedItemOut] = Field(description="best first")
    stages: list[StageOut]
    degraded: bool = Field(description="an engine that should have served broke and another took its place, or none served a stage")
    model_version: str
    unknown_items: list[str] = Field(description="item ids of the request that the catalogue does not hold")


def ranking_routes(service: RankingService, limits: Callable[[], GatewaySettings]) -> APIRouter:
    routes = APIRouter(route_class=ReadingRoute)

    @routes.post("/v1/rank", tags=["recommendations"], response_model=RankOut)
    async def rank(message: RankIn, caller: CallerHere) -> Response:
        """Order given candidates for one user, with a prediction for each of the model's tasks."""
        _check_limits(message, limits())
        request = message.to_value(caller.acts_for(message.tenant), caller.arrived)
        answer = await service.rank(request)
        return InPieces(ranking_json(answer), caller.place.computed)

    return routes


def rank_directly(service: RankingService, limits: Callable[[], GatewaySettings]) -> DirectRoute:
    """POST /v1/rank without FastAPI."""

    async def answer(message: RankBody, caller: Caller, _: Scope) -> bytes:
        _check_limits(message, limits())
        request = message.to_value(caller.acts_for(message.tenant), caller.arrived)
        return ranking_json(await service.rank(request))

    return DirectRoute(msgspec.json.Decoder(RankBody), answer)


def _check_limits(message: RankIn | RankBody, limits: GatewaySettings) -> None:
    counts = {"candidates": (message.candidates, limits.max_candidates), "behaviours": (message.behaviours or (), limits.max_behaviours)}
    for field, (given, most) in counts.items():
        if len(given) > most:
            cure = "send the most recent ones" if field == "behaviours" else "send them in several calls, or fewer"
            raise InvalidRequest(field, f"{len(given)} is more than the {most} this service takes; {cure}")
