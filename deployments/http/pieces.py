"""An answer that may be large. A server takes all of one message at once, and holds what a slow reader leaves of it: so a connection sends
pieces, each as the one before is taken (connection.py). `computed` reports the answer's size to the request's place (places.py), which
counts it.
"""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE = 2**16


class InPieces(Response):
    """A JSON answer. Where it is sent in several pieces, `computed` is given its size in bytes before the first."""

    media_type = "application/json"

    def __init__(self, content: bytes, computed: Callable[[int], object] = lambda _: None) -> None:
        super().__init__(content)
        self._computed = computed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if len(self.body) > PIECE:
            self._computed(len(self.body))
        await send({"type": "http.response.body", "body": self.body})
