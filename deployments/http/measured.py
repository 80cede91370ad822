"""Counts and times every HTTP request, those that the edge turns away too: the outermost middleware."""

from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster.metrics import CLIENTS_GONE, HTTP_DURATION, HTTP_REQUESTS, Meter

OTHER = "other"


class MeasuredMiddleware:
    """A request is labelled by its route's path as it is written in the code, `/v1/items/{item_id:id}`, never by its own."""

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app, self._meter = app, meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        began, status = perf_counter(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = status or 500  # what answers it stands outside of every middleware
            raise
        finally:
            self._record(route_of(scope), status, perf_counter() - began)

    def _record(self, route: str, status: int, duration_s: float) -> None:
        if not status:
            self._meter.add(CLIENTS_GONE, route=route)
            return
        self._meter.add(HTTP_REQUESTS, route=route, status=str(status))
        self._meter.observe(HTTP_DURATION, duration_s, route=route, outcome=f"{status // 100}xx")


def route_of(scope: Scope) -> str:
    """Whoever was turned away before the routes is looked up among those without parameters."""
    if (path := getattr(scope.get("route"), "path", None)) is not None:
        return str(path)
    asked = scope["path"].removeprefix(scope.get("root_path", ""))
    return asked if any(getattr(route, "path", None) == asked for route in scope["app"].routes) else OTHER
