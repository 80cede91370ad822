"""Bodies that FastAPI's routes read, which takes twenty times as long as by msgspec: how much they may hold, and large ones in a thread.

The thread reads one body after the other, so that the memory of one is all that this takes. Whole numbers and ids pass through functions of
Python, where the event loop gets its turn, which it would not within a call of json or pydantic.
"""

import gc
import json
import sys
from asyncio import get_running_loop
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from fastapi import Request, Response
from fastapi.dependencies.utils import get_flat_dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from cluster.engines.room import TURN_S
from deployments.http.connection import SMALL
from deployments.http.problems import BodyTooLarge

MOST_VALUES, MOST_BYTES = 100_000, 6 * 2**20
"""The most values, and bytes, of a body that FastAPI reads: a value takes up to 250 bytes meanwhile, and a character up to 10."""
MOST_LISTED = 2**19
"""The most values of a body that msgspec reads: more than the longest lists that any settings allow (cluster.config.MOST_ENTRIES)."""
MOST_QUERY_BYTES = 2**12
"""The longest query string that FastAPI reads, all in one go: a parameter has two bytes at least, and takes microseconds."""
MOST_PATH_CHARACTERS = 2**10
"""The longest path that is looked up among the routes, as it is once it is unquoted: ids have 256 characters at most."""
_PIECE = 2**16
_THREAD = ThreadPoolExecutor(1, "reads a body")


def values_in(body: bytes, most: int) -> int:
    """How many values JSON holds: each has a comma, or the bracket or brace of its list or object, before it. Those within texts count too.
    Counts no further than a little beyond `most`.
    """
    count = start = 0
    while start < len(body) and count <= most:
        count += sum(body.count(mark, start, start + _PIECE) for mark in (b",", b"[", b"{"))
        start += _PIECE
    return count


def check_size(body: bytes) -> None:
    """Raises BodyTooLarge where FastAPI is not to read the body, before its values become objects, all in one go."""
    if len(body) > MOST_BYTES:
        raise BodyTooLarge(MOST_BYTES, "bytes of a batch, of events, or with values to be converted that")
    if values_in(body, MOST_VALUES) > MOST_VALUES:
        raise BodyTooLarge(MOST_VALUES, "values")


async def no_unknown_parameters(http: Request) -> None:
    """Raises RequestValidationError where the query names a parameter that the route does not take: a call with a misspelt `tenant` would
    be answered for another one.
    """
    if http.query_params:
        known = {field.alias for field in get_flat_dependant(http.scope["route"].dependant).query_params}
        unknown = [(name, value) for name, value in http.query_params.multi_items() if name not in known]
        if unknown:
            raise RequestValidationError([{"type": "extra_forbidden", "loc": ("query", name), "input": value} for name, value in unknown])


class ReadingRoute(APIRoute):
    """A route that has large bodies made into messages in the thread."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            read = _Read(request.scope, request.receive, self)
            try:
                return await handle(read)
            except RequestValidationError as refused:
                if not read.errors:
                    raise
                others = [error for error in refused.errors() if error["loc"][0] != "body"]
                raise RequestValidationError([*others, *read.errors], body=refused.body) from None

        return read_and_handle


class _Read(Request):
    """A request that gives FastAPI a message for its JSON where that is large, and None where `errors` tell why there is none."""

    def __init__(self, scope: Scope, receive: Receive, route: APIRoute) -> None:
        super().__init__(scope, receive)
        self._route = route
        self.errors: list[Any] = []

    async def json(self) -> Any:
        body = await self.body()
        if len(body) <= SMALL:
            return await super().json()
        message, self.errors = await get_running_loop().run_in_executor(_THREAD, _message, body, self._route)
        return message


@contextmanager
def _giving_way() -> Iterator[None]:
    """Meanwhile other threads wait for the interpreter TURN_S at most, not 5 ms, and no garbage is collected: the ten thousands of objects
    of a body are in no cycle, and each walk over them would hold up all threads for up to 20 ms.
    """
    sys.setswitchinterval(TURN_S)
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@_giving_way()
def _message(body: bytes, route: APIRoute) -> tuple[Any, list[Any]]:
    """The message in a body, or what is wrong with it; neither of `null`, which FastAPI refuses by itself. Raises as `json.loads`."""
    loaded = json.loads(body, parse_int=_whole_number)
    if loaded is None or route.body_field is None:
        return loaded, []
    message, errors = route.body_field.validate(loaded, {}, loc=("body",))
    return message, errors if isinstance(errors, list) else [errors] if errors else []


def _whole_number(text: str) -> int:
    return int(text)
