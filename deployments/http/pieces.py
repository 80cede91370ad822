"""A large answer, sent piece by piece: a server takes all of one message at once, and holds what a slow reader leaves of it."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

PIECE = 2**16


class InPieces(Response):
    """A JSON answer, sent as fast as its reader takes it: the call ends no earlier than all pieces but the last are read. Where there are
    several pieces, `computed` is given the size of the answer in bytes before the first.
    """

    media_type = "application/json"

    def __init__(self, content: bytes, computed: Callable[[int], object] = lambda _: None) -> None:
        super().__init__(content)
        self._computed = computed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if len(self.body) > PIECE:
            self._computed(len(self.body))
        for start in range(0, len(self.body), PIECE):
            piece, more = self.body[start : start + PIECE], start + PIECE < len(self.body)
            await send({"type": "http.response.body", "body": piece, "more_body": more})
