"""A route whose JSON body is read straight into its message, at a third of what FastAPI's own way costs.

    body -> message -> endpoint            what nearly every request is
         -> FastAPI: JSON, checks, errors  what is not JSON, no such message, or of another media type

FastAPI decodes the body into dicts and lists, checks those, and solves the route's dependencies. All errors are told by its way, so there
is one account of what is wrong with a request.
"""

from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import Request, Response
from fastapi.routing import APIRoute
from fastapi.security.base import SecurityBase
from pydantic import TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect

from deployments.http.callers import caller_of

JSON = "application/json"


class DirectRoute(APIRoute):
    """Of an endpoint ``(message, http, caller) -> Response``. Nothing else may be asked for: it would be passed over."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Raises TypeError where the endpoint takes something else, or the route depends on more than the caller."""
        usual, endpoint = super().get_route_handler(), self.endpoint
        self._check()
        message: TypeAdapter[Any] = TypeAdapter(get_type_hints(endpoint)["message"])

        async def handle(http: Request) -> Response:
            if http.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
                return await usual(http)
            try:
                said = message.validate_json(await http.body())
            except (ValidationError, ClientDisconnect):
                return await usual(http)
            response: Response = await endpoint(message=said, http=http, caller=await caller_of(http))
            return response

        return handle

    def _check(self) -> None:
        """Security schemes only document what the edge checks."""
        asked = [one.call for one in self.dependant.dependencies if not isinstance(one.call, SecurityBase)]
        names = {self.dependant.request_param_name, *(one.name for one in self.dependant.body_params)}
        if asked != [caller_of] or names != {"http", "message"} or self.dependant.path_params or self.dependant.query_params:
            raise TypeError(f"{self.path}: a direct route's endpoint takes message, http and caller, and depends on nothing else")
