"""Callers of the HTTP interface: their keys, and a client that can leave."""

import asyncio
import hashlib
import json
from collections.abc import Iterable
from typing import Any, Protocol

from starlette.types import ASGIApp, Message

HASHED = {name: hashlib.sha256(f"genrec_{name}".encode()).hexdigest() for name in ("shop", "any", "boss")}
KEYS = [
    {"name": "shop", "sha256": HASHED["shop"], "tenant": "shop"},
    {"name": "any", "sha256": HASHED["any"]},
    {"name": "boss", "sha256": HASHED["boss"], "rights": ["read", "events", "erase", "operate"]},
]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer genrec_{key}"}


def authorization(key: str) -> list[tuple[bytes, bytes]]:
    """The same as raw headers."""
    return [(b"authorization", f"Bearer genrec_{key}".encode())]


class Served(Protocol):
    @property
    def api(self) -> ASGIApp: ...


class Client:
    """One raw ASGI request; its client can leave. The body goes in parts of `chunk` bytes, of which the first `parts` are sent."""

    def __init__(
        self,
        served: Served,
        path: str = "/v1/recommend",
        body: Any = None,
        headers: Iterable[tuple[bytes, bytes]] = (),
        chunk: int = 2**14,
        parts: int | None = None,
        method: str = "POST",
    ) -> None:
        raw = json.dumps({"user_id": "u"} if body is None else body).encode()
        self.scope: dict[str, Any] = {"type": "http", "asgi": {"spec_version": "2.3"}, "http_version": "1.1", "method": method}
        self.scope |= {"scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": ""}
        self.scope["headers"] = [(b"content-type", b"application/json"), *headers]
        self.parts = [raw[start : start + chunk] for start in range(0, len(raw), chunk)]
        self.whole = len(self.parts)
        self.most = len(self.parts) if parts is None else parts
        self.read, self.sent, self.gone = 0, list[Message](), asyncio.Event()
        self.task = asyncio.ensure_future(served.api(self.scope, self.receive, self.send))

    async def receive(self) -> Message:
        if self.read < self.most:
            self.read += 1
            return {"type": "http.request", "body": self.parts[self.read - 1], "more_body": self.read < self.whole}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])
