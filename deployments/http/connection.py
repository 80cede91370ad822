"""One request's connection to its client: its body, its answer, and that the work ends when the client has gone.

Serve's proxy and uvicorn tell of that by `http.disconnect`, once the body has been read. Serve cancels the request by itself then, unless
the header `x-request-disconnect-disabled` forbids it; a Connection does so in any case, and while the request still waits for its place.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from starlette.types import Message, Receive, Send

from deployments.http.problems import BodyTooLarge

WATCH_AFTER_S = 0.05
"""How long a request is at work before its client is watched: most answers are sent by then, and a watch costs a task."""
READ_AHEAD = 64 * 1024
"""Bytes of a body that are held while the request waits for its place; beyond, the client is not watched, and TCP makes it wait."""


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


class Connection:
    """Either read the `body`, or give `receive` and `send` to an ASGI application; in both cases `carry` the coroutine that does so.

    `status`: of the response, 0 until it starts. `first_byte_at`: when it started, on `clock`.
    """

    def __init__(self, receive: Receive, send: Send, *, max_bytes: int, clock: Callable[[], float]) -> None:
        self._receive, self._send, self._max_bytes, self._clock = receive, send, max_bytes, clock
        self.status = 0
        self.first_byte_at: float | None = None
        self.headers: Callable[[], Sequence[tuple[bytes, bytes]]] = tuple  # further ones of the response, asked for as it starts
        self._received = 0
        self._body_over = self._responded = self._cancelled = self._left = False
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._watch_later: asyncio.TimerHandle | None = None
        self._inbox: deque[Message | Exception] = deque()
        self._news, self._taken = asyncio.Event(), asyncio.Event()
        self._held = 0

    async def carry(self, work: Coroutine[Any, Any, None]) -> None:
        """Do the work; return early where the client leaves before its answer is complete."""
        task = self._task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        try:
            await work
        except ClientLeft:
            return
        except asyncio.CancelledError:
            if not self._cancelled or task.cancelling() - before > 1:  # the server ends it, too
                raise
        finally:
            if self._watch_later is not None:
                self._watch_later.cancel()
            if self._watcher is not None:
                self._watcher.cancel()
            if self._cancelled:
                task.uncancel()

    def watch(self) -> None:
        """From now on read ahead, and cancel the work when the client leaves."""
        if self._watcher is None and self._task is not None:
            self._watcher = asyncio.create_task(self._watch(self._task))

    async def body(self) -> bytes:
        """All of the request's body; `WATCH_AFTER_S` later the client is watched. Raises BodyTooLarge and ClientLeft."""
        receive = self._receive if self._watcher is None else self.receive
        parts, more = list[bytes](), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            if self._watcher is None:
                self._count(message)
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        self._body_over = True
        if self._watcher is None:
            self._watch_later = asyncio.get_running_loop().call_later(WATCH_AFTER_S, self.watch)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_again(self, body: bytes) -> None:
        """Have `receive` give the whole body, for an application that reads what `body` has read already."""
        self._received, self._held = 0, len(body)
        self._inbox.appendleft({"type": "http.request", "body": body, "more_body": False})

    async def receive(self) -> Message:
        """The next message of the client. Raises BodyTooLarge."""
        self.watch()
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
        self._count(message)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.first_byte_at = message["status"], self._clock()
            message["headers"] = [*message.get("headers", ()), *self.headers()]
        elif not message.get("more_body", False):
            self._responded = True  # what a server tells after that is the end of the exchange, not a client that left
        await self._send(message)

    async def respond(self, body: bytes) -> None:
        """Send a whole answer in JSON, 200."""
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
        await self.send({"type": "http.response.start", "status": 200, "headers": headers})
        await self.send({"type": "http.response.body", "body": body})

    def _count(self, message: Message) -> None:
        self._received += len(message.get("body", b""))
        if self._received > self._max_bytes:
            raise BodyTooLarge(self._max_bytes)

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        try:
            while (message := await self._receive())["type"] != "http.disconnect":
                if self._body_over:
                    return  # a server that sends more than the body is not asked again and again
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
