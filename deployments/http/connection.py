"""One request's connection to its client: the body, the answer, and the end of the work when the client leaves.

    with connection:                the client leaves -> the work is cancelled, and the block ends quietly
        await connection.read(...)  the whole body
        ...                         `respond`, or an ASGI application over `receive` and `send`

Serve's proxy and uvicorn tell of a client that left by `http.disconnect`, once the body has been read.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from time import monotonic
from types import TracebackType
from typing import Any, Self
from weakref import ref

from starlette.types import Message, Receive, Send

from cluster.config import GatewaySettings
from deployments.http import pieces
from deployments.http.problems import BodyTooLarge, TooLate, TooSlow, overloaded

SMALL = 2**16
"""A body of at most so many bytes takes no turn: reading it costs no more than answering it."""
WATCH_AFTER_S = 0.25
"""How long a request is at work before its client is watched: most answers are sent by then, and a watch costs a task."""
NO_STORE = (b"cache-control", b"no-store")
"""Of every answer that names no other: it tells of a user, or of the moment, and a cache on its way may keep what forbids nothing."""

_current: ContextVar["ref[Connection] | None"] = ContextVar("connection", default=None)
"""The request's connection. A timer keeps the context in which it was set, for long after it is cancelled, and shall keep no body."""


def current() -> "Connection | None":
    """The connection of the request in this context."""
    connection = _current.get()
    return None if connection is None else connection()


class ClientLeft(Exception):
    """The client closed the connection before its request was complete."""


class BodyBudget:
    """The bytes of bodies, and of answers that wait for other answers or for a slow reader, that one process holds: `held`, and at most
    `most`. The large bodies of one caller hold at most as many as are free, so that one caller never takes the room of all others. Answers
    hold at most half, and leave an eighth of all to bodies.
    """

    def __init__(self, most: int) -> None:
        self.most, self.held, self._answers = most, 0, 0
        self._large: Counter[str | None] = Counter()
        """Lane -> the bytes of its bodies beyond the first `SMALL` of each."""

    def take(self, size: int, connection: "Connection") -> None:
        """Take `size` bytes for the connection's body. Raises HTTPException (503) where the process, or the caller, would hold too many."""
        free = self.most - self.held
        if size > free:
            raise overloaded(f"the bodies of other requests take up the {self.most} bytes there are for them; ask again later", wait_s=1)
        if connection.held + size > SMALL:
            if self._large[connection.lane] + size > free:
                raise overloaded(
                    f"other large bodies of this caller take up half of the {self.most} bytes there are; ask again later", wait_s=1
                )
            self._large[connection.lane] += size
            connection.large += size
        self.held += size
        connection.held += size

    def give_back(self, connection: "Connection") -> None:
        """What the connection has taken is free again."""
        self.held -= connection.held
        self._answers -= connection.answers
        if connection.large:
            self._large[connection.lane] -= connection.large
            self._large = +self._large  # without the lanes that hold none

    def keep(self, size: int, connection: "Connection") -> bool:
        """Take `size` bytes for the connection's answer if there is room; returns whether they were taken."""
        fits = self._answers + size <= self.most / 2 and self.held + size <= self.most * 7 / 8
        if fits:
            self.held += size
            self._answers += size
            connection.held += size
            connection.answers += size
        return fits


class Connection:
    """`status`: of the response, 0 until it starts; of a stream that broke, its failure's. `answered_at`: when the response started; of a
    stream, when its last part was computed, and None where it broke off. `headers`: gives further headers of it, and is called as it
    starts. `whole`: the body has been read. `held`: bytes that it has taken of its process's `BodyBudget`; `large`, `answers`: those of
    them that are a large body's, and its answer's. `lane`: under which name these count; None for all callers without keys.
    """

    def __init__(self, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.status, self.body, self.held, self.large, self.answers, self.whole = 0, b"", 0, 0, 0, False
        self.lane: str | None = None
        self.answered_at: float | None = None
        self.headers: Callable[[], Sequence[tuple[bytes, bytes]]] = tuple
        self._given = False  # the body, to an ASGI application
        self._responded = False  # the last part of the answer was handed to the server
        self._left = self._late = False  # why the work was cancelled: the client left, or the time was over
        self._cancelling = 0  # cancellations of the task that others had asked for before the block
        self._within_s = 0.0  # for the work, once the client is watched
        self._task: asyncio.Task[Any] | None = None  # while the block lasts
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> Self:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling = self._task.cancelling()
        _current.set(ref(self))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        """Suppresses the end of the work where the client left; raises TooSlow or TooLate where the time was over, for the body or for
        the work, and no answer has begun.
        """
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        task, self._task = self._task, None
        if kind is ClientLeft:
            return True
        if task is None or not (self._left or self._late) or task.cancelling() <= self._cancelling:
            return False
        others = task.uncancel() > self._cancelling  # the server ends it, too
        if kind is not asyncio.CancelledError or others:
            return False
        if self._late and not self.status:
            raise (TooLate if self.whole else TooSlow) from None
        return True

    async def read(self, limits: GatewaySettings, budget: BodyBudget) -> None:
        """Read the whole body, of which every part is taken from the budget. `WATCH_AFTER_S` later the client is watched.

        Raises BodyTooLarge, ClientLeft and the budget's error; the block raises TooSlow after `limits.body_within_s`, and TooLate where
        the answer is not there after `limits.request_within_s`.
        """
        loop, self._within_s = asyncio.get_running_loop(), limits.request_within_s
        self._timer = loop.call_later(limits.body_within_s, self._too_slow)
        parts, more = list[bytes](), True
        while more:
            message = await self._receive()
            parts.append(self._part(message, limits.max_body_bytes, budget))
            more = message.get("more_body", False)
        self._timer.cancel()
        self._timer = loop.call_later(WATCH_AFTER_S, self.watch)
        self.body, self.whole = parts[0] if len(parts) == 1 else b"".join(parts), True

    def _part(self, message: Message, max_bytes: int, budget: BodyBudget) -> bytes:
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part: bytes = message.get("body", b"")
        if self.held + len(part) > max_bytes:
            raise BodyTooLarge(max_bytes)
        budget.take(len(part), self)
        return part

    @property
    def late(self) -> bool:
        """Whether the work was cancelled as its time was over."""
        return self._late

    @property
    def gone(self) -> bool:
        """Whether the work was cancelled as the client had left, or as its time was over."""
        return self._left or self._late

    def watch(self) -> None:
        """Watch the client: from now on, its leaving cancels the work."""
        if self._watcher is None and self._task is not None:
            self._watcher = asyncio.get_running_loop().create_task(self._watch())

    async def receive(self) -> Message:
        """What an ASGI application receives: the body, then the client's end."""
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self.body, "more_body": False}
        self.watch()
        if self._watcher is not None:
            await asyncio.wait([self._watcher])
        if not self._left and not self._responded:  # the server sent more than the body, and is not asked again and again
            await asyncio.get_running_loop().create_future()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """What an ASGI application sends. A large body goes in pieces: the call ends no earlier than all but the last are read."""
        if message["type"] == "http.response.start":
            self.status, self.answered_at = message["status"], monotonic()
            headers = message.get("headers", ())
            message["headers"] = [*headers, *(() if NO_STORE[0] in dict(headers) else (NO_STORE,)), *self.headers()]
            await self._send(message)
            return
        body, more, start = message.get("body", b""), message.get("more_body", False), 0
        while len(body) - start > pieces.PIECE:  # each piece is copied, and never the rest
            await self._send({"type": "http.response.body", "body": body[start : start + pieces.PIECE], "more_body": True})
            start += pieces.PIECE
        self._responded = not more  # what a server tells after that is the end of the exchange, not a client that left
        await self._send({"type": "http.response.body", "body": body[start:], "more_body": more})

    async def respond(self, body: bytes) -> None:
        """Send a whole answer in JSON, 200."""
        self.status, self.answered_at, self._responded = 200, monotonic(), True
        headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json"), NO_STORE, *self.headers()]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": body})

    async def _watch(self) -> None:
        try:
            async with asyncio.timeout(self._within_s):
                message = await self._receive()
        except TimeoutError:
            self._too_slow()
            return
        if message["type"] == "http.disconnect" and not self._responded and self._task is not None:
            self._left = True
            self._task.cancel()

    def _too_slow(self) -> None:
        if self._task is not None:
            self._late = True
            self._task.cancel()
