"""The HTTP interface, without Ray: routes over a `Service`, which the gateway provides.

POST /v1/recommend and /v1/recommend:batch are here twice: for FastAPI, with the schema and for bodies that need converting, and without.
"""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from typing import Annotated, Literal, Protocol

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Path, Request, Response
from fastapi.responses import StreamingResponse
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Scope

from cluster.config import GatewaySettings
from cluster.errors import InvalidRequest, UnknownChoice
from cluster.fleet.switchboard import Position
from cluster.metrics import SILENT, Meter
from cluster.ranking import Ranking, RankingRequest
from cluster.values import AnswerPart, Item, Recommendation, RecommendRequest
from deployments.http import problems, streaming
from deployments.http.answer_json import written
from deployments.http.api_pages import documentation_routes
from deployments.http.audit import Audit
from deployments.http.batches import Batches
from deployments.http.bodies import RecommendBatchBody, RecommendBody
from deployments.http.callers import Caller, CallerHere, operator_of
from deployments.http.edge import BATCH_PATH, Edge
from deployments.http.ids import ITEM_PATH, end_where_the_path_ends
from deployments.http.interface import DirectRoute, HttpInterface
from deployments.http.messages import (
    BackendsOut,
    GatewayOut,
    ItemOut,
    ReadyOut,
    RecommendBatchIn,
    RecommendBatchOut,
    RecommendIn,
    RecommendOut,
    SwitchOut,
)
from deployments.http.models import ModelsOut, model_routes
from deployments.http.pieces import InPieces
from deployments.http.playground import PlaygroundService, StoredUsers, page_routes, playground_routes
from deployments.http.ranking import rank_directly, ranking_routes
from deployments.http.reading import ReadingRoute, no_unknown_parameters
from deployments.http.schema import DocumentedApi
from deployments.http.user_data import UserDataService, user_data_routes

BATCH_WAITS = 1 / 8
"""The part of a batch's bytes that counts in the reading queue where msgspec reads it."""
POSITIONS: dict[str, Position] = {"enable": "on", "disable": "off", "first": "first"}


class Service(PlaygroundService, Protocol):
    """The gateway, as the routes call it."""

    async def recommend(self, request: RecommendRequest) -> Recommendation: ...
    async def rank(self, request: RankingRequest) -> Ranking: ...
    def stream(self, request: RecommendRequest) -> AsyncGenerator[AnswerPart, None]: ...
    def item(self, item_id: str) -> Item | None: ...
    async def backends(self) -> BackendsOut: ...
    async def switch(self, stage: str, name: str, to: Position) -> SwitchOut: ...
    async def readiness(self) -> ReadyOut: ...
    async def models(self) -> ModelsOut: ...
    async def close(self) -> None: ...


class Data(UserDataService, StoredUsers, Protocol):
    """The gateway's data of users, as the routes call it."""


def create_api(
    service: Service,
    data: Data,
    settings: GatewaySettings,
    gateways: Callable[[], int] = lambda: 1,
    meter: Meter = SILENT,
    *,
    local: bool = False,
    proxied: bool = False,
) -> HttpInterface:
    """The API over `service` and `data`; its documentation is at /docs. `gateways`: how many live gateways share the tenants' rate limits.
    `local`: this machine alone reaches the service; `proxied`: by a HAProxy that `haproxy.sh` has started.

    ``.edge.reconfigure(settings)`` gives it other settings while it serves.
    """
    edge = Edge(settings, gateways, meter=meter, local=local, proxied=proxied)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    about = "Recommendations from behaviour."
    api = DocumentedApi(
        title="genrec",
        version=version("genrec"),
        description=about,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # its redirect is to http, and unquotes the path once more, which may make it another user's
    )
    problems.install(api)

    spelt = Depends(no_unknown_parameters)
    key = Depends(HTTPBearer(auto_error=False, description="an API key, where this service asks for one"))  # the edge checks it

    def limits() -> GatewaySettings:
        return edge.settings

    api.state.limits = limits  # for `operator_of` and the OpenAPI document
    audit = Audit(limits)
    for routes in (
        _recommendations(service, limits, edge.batches),
        ranking_routes(service, limits),
        user_data_routes(data, limits, audit),
        playground_routes(service, data, limits),
    ):
        api.include_router(routes, responses=problems.EVERYWHERE, dependencies=[key, spelt])
    for routes in (_admin(service, edge, audit), model_routes(service)):
        api.include_router(routes, responses=problems.EVERYWHERE, dependencies=[key, Depends(operator_of), spelt])
    api.include_router(_health(service))
    api.include_router(page_routes(limits))
    api.include_router(documentation_routes())
    end_where_the_path_ends(api.routes)
    direct = {
        "/v1/recommend": recommend_directly(service, limits),
        BATCH_PATH: recommend_batch_directly(service, limits, edge.batches),
        "/v1/rank": rank_directly(service, limits),
    }
    return HttpInterface(api, edge, direct, meter)


def recommend_directly(service: Service, limits: Callable[[], GatewaySettings]) -> DirectRoute:
    """POST /v1/recommend without FastAPI."""

    def answer(message: RecommendBody, caller: Caller, scope: Scope) -> Awaitable[bytes | ASGIApp]:
        _check_limits(message, limits())
        accept = b",".join([value for name, value in scope["headers"] if name == b"accept"]).decode("latin-1")
        return _answered(service, message, caller, accept, scope["path"])

    return DirectRoute(msgspec.json.Decoder(RecommendBody), answer)


def recommend_batch_directly(service: Service, limits: Callable[[], GatewaySettings], batches: Batches) -> DirectRoute:
    """POST /v1/recommend:batch without FastAPI."""

    def answer(message: RecommendBatchBody, caller: Caller, _: Scope) -> Awaitable[ASGIApp]:
        return _batch_answered(service, message.requests, caller, limits(), batches)

    return DirectRoute(msgspec.json.Decoder(RecommendBatchBody), answer, waits=BATCH_WAITS)


def _recommendations(service: Service, limits: Callable[[], GatewaySettings], batches: Batches) -> APIRouter:
    routes = APIRouter(route_class=ReadingRoute)

    @routes.post("/v1/recommend", tags=["recommendations"], response_model=RecommendOut, responses=streaming.RESPONSES)
    async def recommend(message: RecommendIn, http: Request, caller: CallerHere) -> Response:
        """Recommend items for one user: all at once, or as they are found where `Accept` asks for it."""
        _check_limits(message, limits())
        answer = await _answered(service, message, caller, ",".join(http.headers.getlist("accept")), http.scope["path"])
        return InPieces(answer, caller.place.computed) if isinstance(answer, bytes) else answer

    @routes.post(BATCH_PATH, tags=["recommendations"], response_model=RecommendBatchOut)
    async def recommend_batch(message: RecommendBatchIn, caller: CallerHere) -> Response:
        """Recommend items for several users; the answers stand in the order of the requests. Each counts for its tenant's rate limit, and
        waits for its turn among the entries of all batches.
        """
        return await _batch_answered(service, message.requests, caller, limits(), batches)

    @routes.get(ITEM_PATH, tags=["catalogue"], responses=problems.documented([404]))
    async def item(item_id: str, caller: CallerHere) -> ItemOut:
        """An item of the catalogue."""
        caller.acts_for()
        found = service.item(item_id)
        if found is None:
            raise HTTPException(404, f"the catalogue has no item {item_id!r}")
        return ItemOut(item_id=found.item_id, title=found.title, attributes=dict(found.attributes))

    return routes


def _admin(service: Service, edge: Edge, audit: Audit) -> APIRouter:
    routes = APIRouter(tags=["operation"])

    @routes.get("/v1/gateway")
    async def gateway() -> GatewayOut:
        """What the gateway replica that answers has under way."""
        return GatewayOut.model_validate(asdict(edge.statistics()))

    @routes.get("/v1/backends")
    async def backends() -> BackendsOut:
        """Every stage's backends: availability, reason, breaker, calls and latency, over all replicas."""
        return await service.backends()

    @routes.post("/v1/backends/{stage}/{name}:{switch:verb}", responses=problems.documented([404]))
    async def switch(http: Request, stage: str, name: str, switch: Annotated[Literal["enable", "disable", "first"], Path()]) -> SwitchOut:
        """Switch a backend on or off in every replica, or have it asked first, without a restart. `enable` ends `first`, too."""
        try:
            async with audit.line(http, f"backend.{switch}", f"{stage}/{name}") as line:
                switched = await service.switch(stage, name, POSITIONS[switch])
                line.more["everywhere"] = switched.applied
        except UnknownChoice as error:
            raise HTTPException(404, str(error)) from None
        return switched

    return routes


def _health(service: Service) -> APIRouter:
    routes = APIRouter(tags=["operation"])

    @routes.head("/healthz", include_in_schema=False)
    @routes.get("/healthz")
    async def healthz() -> dict[str, Literal["ok"]]:
        """The gateway's process is alive."""
        return {"status": "ok"}

    @routes.head("/readyz", include_in_schema=False)
    @routes.get("/readyz", responses={503: {"model": ReadyOut}})
    async def readyz(response: Response) -> ReadyOut:
        """Which engines each stage would ask. 503 until, in each stage, the first engine of the order that can run here is loaded or has
        failed; afterwards only while no replica of the encoder is there. Answers come before the first 200.
        """
        ready = await service.readiness()
        if not ready.ready:
            response.status_code, response.headers["retry-after"] = 503, "1"
        return ready

    return routes


async def _answered(
    service: Service, message: RecommendIn | RecommendBody, caller: Caller, accept: str, path: str
) -> bytes | StreamingResponse:
    """The JSON of the answer or, where the Accept header asks for it, a stream of its parts."""
    request = message.to_value(caller.acts_for(message.tenant), caller.arrived)
    if media_type := streaming.wanted(accept):
        return await streaming.respond(service.stream(request), media_type, path, caller.place)
    return await written(await service.recommend(request))


async def _batch_answered(
    service: Service, requests: Sequence[RecommendIn | RecommendBody], caller: Caller, limits: GatewaySettings, batches: Batches
) -> InPieces:
    """The answers in the order of the requests. Raises InvalidRequest, with the entry's position, for the whole batch."""
    most = limits.max_batch
    if len(requests) > most:
        raise InvalidRequest("requests", f"has {len(requests)} entries; send at most {most} a call")
    for position, request in enumerate(requests):
        _check_limits(request, limits, prefix=f"requests[{position}].")
    caller.charge(caller.fill_in(requests))
    values = [request.to_value(caller.named(request.tenant), caller.arrived) for request in requests]
    entries = [partial(_within_batch, service, value, position, caller) for position, value in enumerate(values)]
    caller.place.leave()
    answers = await batches.run(entries, Counter(value.tenant for value in values), caller.lane)
    answers[0] = b'{"answers":[' + answers[0]
    answers[-1] += b"]}"  # the whole answer is copied once, as these are joined
    return InPieces(b",".join(answers), lambda _: caller.place.computed(0))  # its bytes count as held already


def _check_limits(message: RecommendIn | RecommendBody, limits: GatewaySettings, prefix: str = "") -> None:
    for field, count, most in (
        ("k", message.k, limits.max_k),
        ("behaviours", len(message.behaviours or ()), limits.max_behaviours),
        ("blocked", len(message.blocked), limits.max_listed_items),
        ("allowed", len(message.allowed or ()), limits.max_listed_items),
    ):
        if count > most:
            cure = "ask for fewer items" if field == "k" else "send the most recent ones" if field == "behaviours" else "list fewer items"
            shown = count if count < 10**9 else "far more"
            raise InvalidRequest(prefix + field, f"{shown} is more than the {most} this service takes; {cure}")


async def _within_batch(service: Service, request: RecommendRequest, position: int, caller: Caller) -> bytes:
    """The answer's JSON, which counts as held from then on: all entries of a batch wait for the last, and for their reader."""
    try:
        answer = await written(await service.recommend(request))
    except InvalidRequest as error:
        raise InvalidRequest(f"requests[{position}].{error.field}", error.problem) from error
    caller.keep(len(answer))
    return answer
