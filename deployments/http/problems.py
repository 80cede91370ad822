"""Errors as problem+json (RFC 9457) that say what to do.

    HTTPException                     its own status and headers: 401, 403, 429 and 503 are made here; BodyTooLarge 413, TooSlow 408,
                                      TooLate 504; 404 by the route that did not find what its path names
    InvalidRequest                    422, with the field
    what pydantic refuses             422, with the fields
    BackendError, BundleError         503, Retry-After
    anything else                     500; the log has the trace

`problem_of` decides for direct routes and streams; `install` has FastAPI's routes decide the same.
"""

import logging
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from http import HTTPStatus
from itertools import islice
from math import ceil
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import Send

from cluster.engines.skipped import kind_of
from cluster.errors import BackendError, BundleError, InvalidRequest
from cluster.few_lines import TOLD_EVERY_S, FewLines
from deployments.http import for_haproxy
from deployments.http.messages import ONE, SEVERAL, FieldProblem, Problem

MEDIA_TYPE = "application/problem+json"
CHALLENGE = 'Bearer realm="genrec"'
_TITLES = {
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not found",
    405: "Method not allowed",
    408: "Too slow",
    413: "Body too large",
    422: "Invalid request",
    429: "Too many requests",
    500: "Internal error",
    503: "Not available now",
    504: "No answer in time",
}
_NO_ROUTE = {
    404: "there is nothing at this path; see /docs for the paths there are",
    405: "this path does not take {}; see /docs for the methods it takes",
}
_SHORTER = "send the most recent behaviours only, or events, requests and candidates in several calls"
_SHOWN_ERRORS = 20
_SHOWN_CHARACTERS = 100
_log = logging.getLogger(__name__)
_damaged = FewLines(most=1, within_s=TOLD_EVERY_S)


class _Beginning(reprlib.Repr):
    """Shows one value by its beginning alone: to write out a megabyte takes as long as to read it."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxdict = self.maxstring = self.maxlong = self.maxother = self._left = _SHOWN_CHARACTERS

    def repr1(self, x: Any, level: int) -> str:
        """A value within the one that is shown; what comes after the characters that are shown is not written out."""
        if self._left <= 0:
            return self.fillvalue
        text = super().repr1(x, level)
        self._left -= len(text)
        return text

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        return super().repr_dict(dict(islice(x.items(), self.maxdict + 1)), level)  # else all of its keys are sorted


def shown(value: object) -> str:
    """The beginning of a value, as Python writes it."""
    return _Beginning().repr(value)[:_SHOWN_CHARACTERS]


class BodyTooLarge(HTTPException):
    """The body has more bytes, or values, than are read. An HTTPException: FastAPI makes any other error of reading a body a 400."""

    def __init__(self, most: int, of: str = "bytes") -> None:
        self.field = "body"
        self.problem = f"has more than the {most} {of} this service takes; {_SHORTER}"
        super().__init__(413, f"{self.field}: {self.problem}")

    def __str__(self) -> str:
        return self.detail


class TooSlow(HTTPException):
    """The body was not there in time."""

    def __init__(self) -> None:
        super().__init__(408, "the body did not arrive in time; send it at once")


class TooLate(HTTPException):
    """The request was there, and its answer was not in time. No refusal: the request was worked on."""

    def __init__(self) -> None:
        super().__init__(504, "no answer was there in time; ask for less, or give a recommendation a shorter deadline_ms")


def unauthorized(detail: str, error: str = "") -> HTTPException:
    """The caller's key is missing or unknown. `error`: a code of RFC 6750."""
    return HTTPException(401, detail, {"WWW-Authenticate": CHALLENGE + (f', error="{error}"' if error else "")})


def forbidden(detail: str, *, has_key: bool = True) -> HTTPException:
    """The caller's key does not allow the call. Without one the answer asks for it, as one of 401 does."""
    return HTTPException(403, detail, None if has_key else {"WWW-Authenticate": CHALLENGE})


def too_many(tenant: str, wait_s: float, headers: Mapping[str, str]) -> HTTPException:
    """The tenant's tokens are used up for `wait_s` seconds."""
    detail = f"tenant {tenant!r} has used up its rate limit; ask again in {ceil(wait_s)} s"
    return HTTPException(429, detail, {"Retry-After": str(ceil(wait_s)), **headers})


def overloaded(detail: str, wait_s: float) -> HTTPException:
    """There is no place for the request; one may be free in `wait_s` seconds."""
    return HTTPException(503, detail, {"Retry-After": str(max(1, ceil(wait_s)))})


def problem_of(path: str, error: Exception, route: str | None = None, *, operates: bool = False) -> Problem:
    """The problem that tells of an error, to a caller that `operates` with its whole text; an unexpected error is also logged, by `route`
    where the path may name a user or an item.
    """
    match error:
        case HTTPException():
            status, detail = error.status_code, str(error.detail)
        case InvalidRequest():
            status, detail = 422, str(error)
        case BackendError() | BundleError():
            status, detail = 503, str(error) if operates else kind_of(error)
            if isinstance(error, BundleError) and (more := _damaged.more()) is not None:
                _log.error("the model cannot be read%s: %s", more, error)
        case _:
            status, detail = 500, _told(route or path, error)
    errors = [FieldProblem(field=error.field, problem=error.problem)] if isinstance(error, InvalidRequest | BodyTooLarge) else []
    return _problem(path, status, detail, errors)


def headers_of(error: Exception) -> Mapping[str, str]:
    """The headers of this error's response, beside its type and length."""
    match error:
        case HTTPException():
            return error.headers or {}
        case BackendError() | BundleError():
            return {"Retry-After": "2"}
        case _:
            return {}


async def send(error: Exception, path: str, send: Send, *, unread: bool = False, operates: bool = False) -> None:
    """Answer an ASGI request with an error, at the least cost. `operates`: as of `problem_of`. `unread`: the body may still be on its way,
    and HAProxy is told the answer too.
    """
    problem, headers = problem_of("" if unread else path, error, operates=operates), headers_of(error)
    body = problem.model_dump_json().encode()
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    raw += [for_haproxy.unread(body)] if unread else []
    raw += [(b"content-type", MEDIA_TYPE.encode()), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})


def install(app: FastAPI) -> None:
    """Answer every error of `app` as a problem."""
    app.add_exception_handler(RequestValidationError, _invalid_message)
    app.add_exception_handler(HTTPException, _http_error)
    for kind in (InvalidRequest, BackendError, BundleError, Exception):  # BundleError: of a file that cannot be read
        app.add_exception_handler(kind, _as_problem)


def field_path(location: Sequence[Any]) -> str:
    """``("body", "behaviours", 3, "timestamp")`` -> ``behaviours[3].timestamp``."""
    steps = [step for step in location if step not in {ONE, SEVERAL}]
    steps = steps[1:] if steps and steps[0] in {"body", "path", "query", "header"} else steps
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step[:_SHOWN_CHARACTERS]}" for step in steps).removeprefix(".")
    return text.encode("utf-8", "backslashreplace").decode() or "body"  # a key may hold what JSON cannot carry back


async def _as_problem(request: Request, error: Exception) -> JSONResponse:
    route = getattr(request.scope.get("route"), "path", "a path without a route")
    caller = getattr(request.state, "caller", None)  # none on open paths
    operates = caller is not None and caller.may("operate")
    return _response(problem_of(request.scope["path"], error, route, operates=operates), headers_of(error))


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if error.detail == HTTPStatus(error.status_code).phrase and (told := _NO_ROUTE.get(error.status_code)):
        headers = {"Allow": _allowed(request)} if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED else error.headers
        error = HTTPException(error.status_code, told.format(request.method), headers)
    if error.status_code != 400:
        return await _as_problem(request, error)
    problem = "cannot be read: it is not UTF-8, is nested too deeply, has an endless number, or was cut off"
    found = FieldProblem(field="body", problem=problem)  # 400 is FastAPI's word for a body that Python's JSON parser gave up on
    return _response(_problem(request.scope["path"], 422, f"body: {problem}", [found]))


def _allowed(request: Request) -> str:
    """The methods of all routes of the path: where several have it, the framework names those of the first alone."""
    there = (route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return ", ".join(sorted({method for route in there for method in getattr(route, "methods", None) or ()}))


async def _invalid_message(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    found = error.errors()
    problems = [_field_problem(e) for e in found[:_SHOWN_ERRORS]]
    detail = f"{problems[0].field}: {problems[0].problem}" + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")
    return _response(_problem(request.scope["path"], 422, detail, problems))


def _field_problem(error: dict[str, Any]) -> FieldProblem:
    field, value = field_path(error["loc"]), shown(error.get("input"))
    if isinstance(error.get("input"), bytes):  # FastAPI reads no body of another type, and none without one
        return FieldProblem(field=field, problem="is not read as JSON; send it with the header Content-Type: application/json", value=value)
    match error["type"]:
        case "extra_forbidden":
            return FieldProblem(
                field=field, problem="there is no such field; remove it, or see /docs for the fields there are", value=value
            )
        case "missing":
            return FieldProblem(field=field, problem="is required; add it, or see /docs for what it holds", value=value)
        case "json_invalid":
            position, cause = error["loc"][-1], error.get("ctx", {}).get("error", error["msg"])
            return FieldProblem(field="body", problem=f"is not JSON: {cause} at character {position}")
        case _:
            return FieldProblem(field=field, problem=str(error["msg"]).removeprefix("Value error, "), value=value)


def _problem(path: str, status: int, detail: str, errors: Sequence[FieldProblem] = ()) -> Problem:
    title = _TITLES.get(status) or HTTPStatus(status).phrase
    return Problem(title=title, status=status, detail=detail, instance=path, errors=list(errors))


def _response(problem: Problem, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse(problem.model_dump(), problem.status, headers, MEDIA_TYPE)


def _told(route: str, error: Exception) -> str:
    """The text for a caller at an unexpected error; the log gets the trace."""
    _log.error("unexpected error while answering %s", route, exc_info=error)
    return "genrec failed in a way it does not know; the server's log has the trace"


_DESCRIPTIONS = {
    401: "An API key is missing, not known, or has expired",
    403: "The API key does not allow it: it lacks a right, or is another tenant's",
    404: "There is no such thing",
    408: "The body did not arrive in time",
    413: "The body has more bytes than this service takes",
    422: "The request cannot be answered as asked",
    429: "The tenant's rate limit is reached; `Retry-After` says for how many seconds",
    503: "Too much is asked of this service just now, or a part of it does not answer; `Retry-After` says for how many seconds",
    504: "The answer was not there in time; the work is cancelled",
}
_HEADERS = {
    401: {"WWW-Authenticate": "the scheme: Bearer"},
    429: {"Retry-After": "seconds until a request may be sent"},
    503: {"Retry-After": "seconds until it may be sent again"},
}


def documented(statuses: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI's `responses` of problems with these statuses. `DocumentedApi` describes what they refer to."""
    return {status: _documented(status) for status in statuses}


def _documented(status: int) -> dict[str, Any]:
    headers = {name: {"description": text, "schema": {"type": "string"}} for name, text in _HEADERS.get(status, {}).items()}
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": _DESCRIPTIONS[status], "content": {MEDIA_TYPE: {"schema": schema}}, "headers": headers}


EVERYWHERE = documented([401, 403, 408, 413, 422, 429, 503, 504])
"""The problems that any route behind the edge may answer."""
