"""The HTTP interface, without Ray: routes over a `Service`, which the gateway provides."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from importlib.metadata import version
from typing import Annotated, Literal, Protocol

from fastapi import APIRouter, FastAPI, Path, Request, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.config import GatewaySettings
from cluster.errors import InvalidRequest
from cluster.values import AnswerPart, Item, Recommendation, RecommendRequest
from deployments import problems, streaming
from deployments.http_user_data import UserDataService, user_data_routes
from deployments.messages import (
    BackendsOut,
    ItemOut,
    ReadyOut,
    RecommendBatchIn,
    RecommendBatchOut,
    RecommendIn,
    RecommendOut,
    SwitchOut,
)


class Service(Protocol):
    """What stands behind the routes."""

    async def recommend(self, request: RecommendRequest) -> Recommendation: ...
    def stream(self, request: RecommendRequest) -> AsyncGenerator[AnswerPart, None]: ...
    def item(self, item_id: str) -> Item | None: ...
    async def backends(self) -> BackendsOut: ...
    async def switch(self, stage: str, name: str, *, enabled: bool) -> SwitchOut: ...
    async def readiness(self) -> ReadyOut: ...
    async def close(self) -> None: ...


def create_api(service: Service, data: UserDataService, limits: GatewaySettings) -> FastAPI:
    """The API over `service` and `data`; its documentation is at /docs."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    about = "Recommendations from behaviour."
    api = FastAPI(title="genrec", version=version("genrec"), description=about, responses=problems.RESPONSES, lifespan=lifespan)
    problems.install(api)
    api.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes)

    api.include_router(_recommendations(service, limits))
    api.include_router(user_data_routes(data, limits))
    api.include_router(_operation(service))
    return api


def _recommendations(service: Service, limits: GatewaySettings) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/recommend", tags=["recommendations"], response_model=RecommendOut, responses=streaming.RESPONSES)
    async def recommend(message: RecommendIn, http: Request) -> Response:
        """Recommend items for one user: all at once, or as they are found where `Accept` asks for it."""
        _check_limits(message, limits)
        if media_type := streaming.wanted(",".join(http.headers.getlist("accept"))):
            return await streaming.respond(service.stream(message.to_value()), media_type, http.url.path)
        answer = RecommendOut.from_value(await service.recommend(message.to_value()))
        return Response(answer.model_dump_json(), media_type="application/json")  # as it is: FastAPI would check and encode it once more

    @routes.post("/v1/recommend:batch", tags=["recommendations"])
    async def recommend_batch(message: RecommendBatchIn) -> RecommendBatchOut:
        """Recommend items for several users; the answers stand in the order of the requests."""
        if len(message.requests) > limits.max_batch:
            raise InvalidRequest("requests", f"has {len(message.requests)} entries; send at most {limits.max_batch} a call")
        for position, request in enumerate(message.requests):
            _check_limits(request, limits, prefix=f"requests[{position}].")
        answers = await asyncio.gather(*(_within_batch(service, r.to_value(), i) for i, r in enumerate(message.requests)))
        return RecommendBatchOut(answers=[RecommendOut.from_value(answer) for answer in answers])

    @routes.get("/v1/items/{item_id:path}", tags=["catalogue"])
    async def item(item_id: str) -> ItemOut:
        """An item of the catalogue."""
        found = service.item(item_id)
        if found is None:
            raise HTTPException(404, f"the catalogue has no item {item_id!r}")
        return ItemOut(item_id=found.item_id, title=found.title, attributes=dict(found.attributes))

    return routes


def _operation(service: Service) -> APIRouter:
    routes = APIRouter(tags=["operation"])

    @routes.get("/v1/backends")
    async def backends() -> BackendsOut:
        """Every stage's backends: availability, reason, breaker, calls and latency, over all replicas."""
        return await service.backends()

    @routes.post("/v1/backends/{stage}/{name}:{switch}")
    async def switch(stage: str, name: str, switch: Annotated[Literal["enable", "disable"], Path()]) -> SwitchOut:
        """Switch a backend on or off in every replica, without a restart."""
        return await service.switch(stage, name, enabled=switch == "enable")

    @routes.get("/healthz")
    async def healthz() -> dict[str, Literal["ok"]]:
        """The gateway's process is alive."""
        return {"status": "ok"}

    @routes.get("/readyz", responses={503: {"model": ReadyOut}})
    async def readyz(response: Response) -> ReadyOut:
        """Every stage is up, and which engines it would ask; 503 until each has its first choice, and while there is no encoder."""
        ready = await service.readiness()
        response.status_code = 200 if ready.ready else 503
        return ready

    return routes


def _check_limits(message: RecommendIn, limits: GatewaySettings, prefix: str = "") -> None:
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


async def _within_batch(service: Service, request: RecommendRequest, position: int) -> Recommendation:
    try:
        return await service.recommend(request)
    except InvalidRequest as error:
        raise InvalidRequest(f"requests[{position}].{error.field}", error.problem) from error


class BodyLimit:
    """Refuse a body that is too large before it is parsed: reading it would stall every other request of this process."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise problems.BodyTooLarge(self._max_bytes)
            return message

        return await self._app(scope, counted, send)
