"""One HTTP exchange without a connection: for a front door that is not HTTP, or in a test. All checks before the routes are made too."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from starlette.types import ASGIApp, Message


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request. `target`: the path, quoted as in a URL, and the query, if any; names of headers are in lower case."""

    method: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class HttpResponse:
    status: int
    headers: Mapping[str, str]
    body: bytes


async def exchange(app: ASGIApp, request: HttpRequest) -> HttpResponse:
    """The whole answer of `app`. Raises what `app` raises before its answer is whole, and RuntimeError where it ends without one."""
    client = _Client(request.body)
    try:
        await app(scope_of(request), client.receive, client.send)
    except Exception:
        if not client.whole:
            raise  # otherwise the answer tells the caller, and the error has been logged
    if not client.whole:
        raise RuntimeError(f"{request.method} {request.target}: the application returned without a whole answer")
    return HttpResponse(client.status, client.headers, b"".join(client.parts))


def scope_of(request: HttpRequest) -> dict[str, Any]:
    path, _, query = request.target.partition("?")
    sent = {"content-type": "application/json", **request.headers, "content-length": str(len(request.body))}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent.items()],
        "client": None,
        "server": None,
    }


class _Client:
    """The client's end of the exchange, which stays until it has its answer."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body
        self.status, self.whole = 0, False
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []

    async def receive(self) -> Message:
        if self._body is None:
            await asyncio.get_running_loop().create_future()  # until this task is cancelled
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message.get("headers", ())}
        else:
            self.parts.append(message.get("body", b""))
            self.whole = not message.get("more_body", False)
            if not self.whole:
                await asyncio.sleep(0)  # between two parts others have a turn of the loop, as they have where a server sends them
