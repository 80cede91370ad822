"""One request's connection to its client: reads a little ahead, and ends the work when the client has gone.

Serve's proxy and uvicorn tell of that by `http.disconnect`, once the body has been read. Serve cancels the request by itself then, unless
the header `x-request-disconnect-disabled` forbids it; this does so in any case, and while the request still waits for its place.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from starlette.types import Message, Receive, Send

from deployments.http.problems import BodyTooLarge

READ_AHEAD = 64 * 1024
"""Bytes of a body that are held while nobody reads it; beyond, the client is not watched, and TCP makes it wait."""


class Connection:
    """Give its `receive` and `send` to the application, and `carry` the application's coroutine."""

    def __init__(self, receive: Receive, send: Send, *, max_bytes: int, clock: Callable[[], float]) -> None:
        self._receive, self._send, self._max_bytes, self._clock = receive, send, max_bytes, clock
        self._inbox: deque[Message | Exception] = deque()
        self._news, self._taken = asyncio.Event(), asyncio.Event()
        self._held = self._received = 0
        self._body_over = self._responded = self._cancelled = self._left = False
        self.first_byte_at: float | None = None
        self.headers: Callable[[], Sequence[tuple[bytes, bytes]]] = tuple  # further ones of the response, asked for as it starts

    async def carry(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work; return early where the client leaves before its answer is complete."""
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        watcher = asyncio.create_task(self._watch(task))
        try:
            await work
        except asyncio.CancelledError:
            if not self._cancelled or task.cancelling() - before > 1:  # somebody else wants it to end, too
                raise
        finally:
            watcher.cancel()
            if self._cancelled:
                task.uncancel()

    async def receive(self) -> Message:
        """The next message of the client. Raises BodyTooLarge."""
        while not self._inbox:
            if self._left:
                return {"type": "http.disconnect"}
            self._news.clear()
            await self._news.wait()
        message = self._inbox.popleft()
        if isinstance(message, Exception):
            raise message
        self._held -= len(message.get("body", b""))
        self._taken.set()
        self._received += len(message.get("body", b""))
        if self._received > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.first_byte_at = self._clock()
            message["headers"] = [*message.get("headers", ()), *self.headers()]
        elif not message.get("more_body", False):
            self._responded = True  # what a server tells after that is the end of the exchange, not a client that left
        await self._send(message)

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        try:
            while (message := await self._receive())["type"] != "http.disconnect":
                if self._body_over:
                    return  # no server sends more; whoever does is not asked again and again
                self._put(message)
                await self._room()
        except Exception as error:  # noqa: BLE001 - raised where the application reads
            self._put(error)
            return
        self._left = True
        self._news.set()
        if not self._responded:
            self._cancelled = True
            task.cancel()

    def _put(self, message: Message | Exception) -> None:
        if not isinstance(message, Exception):
            self._held += len(message.get("body", b""))
            self._body_over = not message.get("more_body", False)
        self._inbox.append(message)
        self._news.set()

    async def _room(self) -> None:
        while self._held > READ_AHEAD and not self._body_over:
            self._taken.clear()
            await self._taken.wait()
