"""The HTTP interface as one ASGI callable.

    request ──► size, key, rate, body, turn, place (edge.py) ──► the direct routes: decoded, answered and sent here
                                                └──► every other path, and a body that msgspec refuses: FastAPI's routes (api.py)

POST /v1/recommend, /v1/recommend:batch and /v1/rank are direct. FastAPI has them too: for the schema, and for bodies that msgspec refuses.
"""

from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any
from urllib.parse import unquote_to_bytes

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.routing import Match
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.errors import InvalidRequest
from cluster.metrics import CLIENTS_GONE, HTTP_DURATION, HTTP_REQUESTS, SILENT, Meter
from deployments.http import problems
from deployments.http.bodies import UNREADABLE
from deployments.http.callers import Caller
from deployments.http.connection import Connection
from deployments.http.edge import OTHER, Edge, path_of
from deployments.http.open_paths import OPEN
from deployments.http.pieces import PIECE, InPieces
from deployments.http.reading import MOST_LISTED, MOST_PATH_CHARACTERS, MOST_QUERY_BYTES, check_size, values_in

JSON = b"application/json"
REPLACED = "\ufffd"
"""What a server puts into the path for bytes that are not UTF-8, which makes it another id's; an id may have it, too."""


@dataclass(frozen=True, slots=True)
class DirectRoute:
    """A POST route; `decoder` reads its JSON body. `answer(message, caller, scope)` returns the JSON of the answer, or an ASGI application
    that sends it. `waits`: the part of a large body's bytes that counts in the reading queue though msgspec reads it, for what it holds
    waits without a place.
    """

    decoder: msgspec.json.Decoder[Any]
    answer: Callable[[Any, Caller, Scope], Awaitable[bytes | ASGIApp]]
    waits: float = 0.0


class HttpInterface:
    """`fastapi` has all routes; those in `direct`, by path, are answered without it. `edge` protects all but the open paths."""

    def __init__(self, fastapi: FastAPI, edge: Edge, direct: Mapping[str, DirectRoute], meter: Meter = SILENT) -> None:
        self.fastapi, self.edge, self._direct, self._meter = fastapi, edge, direct, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.fastapi(scope, receive, send)
        began, connection = perf_counter(), Connection(receive, send)
        try:
            if (path := path_of(scope)) in OPEN:
                await self.edge.serve_open(self, path, scope, connection)
            else:
                await self.edge.serve(self, scope, connection)
        except Exception:
            connection.status = connection.status or 500  # what answers it stands outside of the application
            raise
        finally:
            self._record(scope, connection.status, perf_counter() - began)

    def slow_bytes(self, scope: Scope, body: bytes) -> int:
        """How many of a large body's bytes count in the reading queue: all where pydantic reads it, which takes twenty times as long as
        msgspec. Raises BodyTooLarge where it is too large for that.

        A body that msgspec reads here is read again once there is a place: its message takes several times the memory of the body.
        """
        route = self._direct_route(scope)
        if route is None and not self._reads_body(scope):
            return 0
        if route is not None and route.waits:
            check_size(body)
        if route is not None and values_in(body, MOST_LISTED) <= MOST_LISTED:
            with suppress(*UNREADABLE):
                route.decoder.decode(body)
                return int(len(body) * route.waits)
        check_size(body)
        return len(body)

    def _reads_body(self, scope: Scope) -> bool:
        """Whether one of FastAPI's routes reads the body of such a request."""
        reading = (route for route in self.fastapi.routes if isinstance(route, APIRoute) and route.body_field)
        return any(route.matches(scope)[0] is Match.FULL for route in reading)

    async def answer(self, scope: Scope, connection: Connection) -> None:
        try:
            _check_target(scope)
        except InvalidRequest as error:
            await problems.send(error, scope["path"][:MOST_PATH_CHARACTERS], connection.send)
            return
        route = self._direct_route(scope)
        if route is None:
            await self.fastapi(scope, connection.receive, connection.send)
            return
        try:
            message = route.decoder.decode(connection.body)
        except UNREADABLE:
            await self.fastapi(scope, connection.receive, connection.send)
            return
        caller: Caller = scope["state"]["caller"]
        try:
            answer = await route.answer(message, caller, scope)
        except Exception as error:  # noqa: BLE001 - every error is told as a problem
            await problems.send(error, scope["path"], connection.send, operates=caller.may("operate"))
            return
        if isinstance(answer, bytes) and len(answer) <= PIECE:
            await connection.respond(answer)
        else:
            sent = InPieces(answer, caller.place.computed) if isinstance(answer, bytes) else answer
            await sent(scope, connection.receive, connection.send)

    def _direct_route(self, scope: Scope) -> DirectRoute | None:
        direct = scope["method"] == "POST" and not scope.get("query_string") and _is_json(scope)
        return self._direct.get(path_of(scope)) if direct else None

    def _record(self, scope: Scope, status: int, duration_s: float) -> None:
        """Count and time a request, even one that the edge turns away."""
        route = self.route_of(scope)
        if status:
            self.edge.answered(route, status)
            self._meter.add(HTTP_REQUESTS, route=route, status=str(status))
            self._meter.observe(HTTP_DURATION, duration_s, route=route, outcome=f"{status // 100}xx")
        else:
            self._meter.add(CLIENTS_GONE, route=route)

    def route_of(self, scope: Scope) -> str:
        """The route's path as it is written in the code, `/v1/items/{item_id:id}`; a request that was turned away before the routes is
        looked up among those without parameters.
        """
        if (path := getattr(scope.get("route"), "path", None)) is not None:
            return str(path)
        path = path_of(scope)
        return path if path in self._direct or any(getattr(route, "path", None) == path for route in self.fastapi.routes) else OTHER


def _check_target(scope: Scope) -> None:
    """Raises InvalidRequest where the path or the query string is not to be read."""
    for name, length, most, unit in (
        ("path", len(path_of(scope)), MOST_PATH_CHARACTERS, "characters"),
        ("query string", len(scope.get("query_string", b"")), MOST_QUERY_BYTES, "bytes"),
    ):
        if length > most:
            raise InvalidRequest(name, f"has more than the {most} {unit} this service takes; send a shorter one")
    if REPLACED in scope["path"]:
        try:
            unquote_to_bytes(scope.get("raw_path") or b"").decode()
        except UnicodeDecodeError:
            raise InvalidRequest("path", "is not UTF-8; quote the id as UTF-8") from None


def _is_json(scope: Scope) -> bool:
    for name, value in scope["headers"]:
        if name == b"content-type":
            return bool(value == JSON or value.partition(b";")[0].strip().lower() == JSON)
    return False
