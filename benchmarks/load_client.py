"""The process behind `benchmarks.load`: reads a plan from standard input, says when it begins, sends, and writes the results.

Called as ``python -m benchmarks.load_client RESULTS.npz``. Requests are bytes that are ready before the first is due, and answers are
looked into with a regular expression, so that the driver takes as little as it can of the processor that it shares with the server.
"""

import asyncio
import re
import sys
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from types import MappingProxyType
from typing import Any, cast
from urllib.parse import urlsplit

import httptools
import numpy as np
import uvloop

from benchmarks.load import COLUMNS, NO_ANSWER, OUT_OF_TIME, Plan

FIRST_DUE_AFTER_S = 0.2
IDLE_AT_MOST_S = 2.0
"""A connection unused for longer is not used again: a server may be about to close it."""
AGAIN = frozenset({NO_ANSWER, 502, 503, 504})
STAGE = re.compile(rb'"stage":"(\w+)","backend":"(\w+)"')
VERSION = re.compile(rb'"model_version":"([^"]*)"')
TIER = re.compile(rb'"tier":"(\w+)"')
DURATION = re.compile(rb'"duration_ms":([0-9.e-]+)')
ITEM = re.compile(rb'"item_id":"([^"]*)"')


@dataclass(slots=True)
class Answer:
    """The parser's callbacks fill it."""

    status: int = NO_ANSWER
    retry_after: float = float("nan")
    body: bytes = b""


class Lost(Exception):
    """The connection ended before the answer did."""


class Connection(asyncio.Protocol):
    """HTTP/1.1, one request at a time."""

    def __init__(self) -> None:
        self.open, self.idle_since = True, 0.0
        self._answer, self._waiting = Answer(), cast("asyncio.Future[Answer] | None", None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpResponseParser(self)

    def ask(self, request: bytes) -> "asyncio.Future[Answer]":
        self._answer, self._waiting = Answer(), asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._waiting

    def close(self) -> None:
        self.open = False
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self._waiting and not self._waiting.done():
            self._waiting.set_exception(Lost(repr(exc)))

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"retry-after":
            self._answer.retry_after = float(value)

    def on_body(self, body: bytes) -> None:
        self._answer.body += body

    def on_message_complete(self) -> None:
        self._answer.status = self._parser.get_status_code()
        self.open = self.open and self._parser.should_keep_alive()
        if self._waiting and not self._waiting.done():
            self._waiting.set_result(self._answer)


@dataclass
class Pool:
    """Connections to one server, as many as there are requests under way, up to a limit."""

    host: str
    port: int
    limit: asyncio.Semaphore
    idle: list[Connection] = field(default_factory=list)

    async def ask(self, request: bytes) -> Answer:
        """Raises OSError or Lost."""
        async with self.limit:
            connection = await self._connection()
            try:
                answer = await connection.ask(request)
            except BaseException:
                connection.close()
                raise
            self._put(connection)
            return answer

    async def _connection(self) -> Connection:
        while self.idle:
            last = self.idle.pop()
            if last.open and monotonic() - last.idle_since < IDLE_AT_MOST_S:
                return last
            last.close()
        _, connection = await asyncio.get_running_loop().create_connection(Connection, self.host, self.port)
        return connection

    def _put(self, connection: Connection) -> None:
        if connection.open:
            connection.idle_since = monotonic()
            self.idle.append(connection)
        else:
            connection.close()


class Words:
    """Strings as small numbers; 0 is none."""

    def __init__(self) -> None:
        self._numbers = {"": 0}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def list(self) -> list[str]:
        return list(self._numbers)


class Driver:
    """A plan being carried out."""

    def __init__(self, plan: Plan) -> None:
        parts = urlsplit(plan.url)
        self._plan, self._words, self._rows = plan, Words(), list[tuple[Any, ...]]()
        self._pool = Pool(parts.hostname or "127.0.0.1", parts.port or 80, asyncio.Semaphore(plan.connections))
        self._requests = [request_bytes(parts.netloc, parts.path + plan.path, body.encode(), plan.headers) for body in plan.bodies]

    async def run(self) -> dict[str, np.ndarray[Any, Any]]:
        self._began = monotonic() + FIRST_DUE_AFTER_S
        print(self._began, flush=True)
        await (self._closed() if self._plan.clients else self._open())
        return self._columns()

    async def _open(self) -> None:
        under_way = set[asyncio.Task[None]]()
        for index, due in enumerate(self._plan.due().tolist()):
            if (early := self._began + due - monotonic()) > 0:
                await asyncio.sleep(early)
            task = asyncio.create_task(self._one(index, due))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
        while under_way:
            await asyncio.wait(list(under_way))

    async def _closed(self) -> None:
        await asyncio.sleep(max(0.0, self._began - monotonic()))
        await asyncio.gather(*(self._client(first) for first in range(self._plan.clients)))

    async def _client(self, index: int) -> None:
        while (now := monotonic() - self._began) < self._plan.seconds:
            await self._one(index, now)
            index += self._plan.clients

    async def _one(self, index: int, due: float) -> None:
        body, attempts, answer = index % len(self._requests), 0, Answer()
        while attempts <= self._plan.retries:
            if attempts:
                await asyncio.sleep(self._plan.retry_pause_s)
            attempts += 1
            answer = await self._attempt(self._requests[body])
            if answer.status not in AGAIN:
                break
        latency = monotonic() - self._began - due
        self._rows.append((due, latency, answer.status, answer.retry_after, attempts, body, *self._seen(answer)))

    async def _attempt(self, request: bytes) -> Answer:
        with suppress(OSError, Lost):
            try:
                async with asyncio.timeout(self._plan.timeout_s):
                    return await self._pool.ask(request)
            except TimeoutError:
                return Answer(OUT_OF_TIME)
        return Answer()

    def _seen(self, answer: Answer) -> tuple[bool, int, int, int, int, float]:
        """What stands in an answer: degraded, version, stages, tier, the items' checksum, the stages' milliseconds."""
        if not self._plan.examine or answer.status != 200:
            return False, 0, 0, 0, 0, 0.0
        text = answer.body
        stages = b" ".join(b"=".join(pair) for pair in STAGE.findall(text))
        number = self._words.number
        return (
            b'"degraded":true' in text,
            number(_first(VERSION, text)),
            number(stages.decode()),
            number(_first(TIER, text)),
            zlib.crc32(b"\n".join(ITEM.findall(text))),
            sum(map(float, DURATION.findall(text))),
        )

    def _columns(self) -> dict[str, np.ndarray[Any, Any]]:
        values = list(zip(*sorted(self._rows), strict=True)) or [()] * len(COLUMNS)
        columns = {name: np.array(column, kind) for (name, kind), column in zip(COLUMNS.items(), values, strict=True)}
        return {**columns, "words": np.array(self._words.list())}


def _first(pattern: re.Pattern[bytes], text: bytes) -> str:
    found = pattern.search(text)
    return found[1].decode() if found else ""


def request_bytes(host: str, path: str, body: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> bytes:
    """A POST, ready to be written."""
    lines = {"Host": host, "Content-Type": "application/json", "Content-Length": str(len(body)), **headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


if __name__ == "__main__":
    columns = uvloop.run(Driver(Plan.parse(sys.stdin.read())).run())
    np.savez(Path(sys.argv[1]), allow_pickle=False, **columns)
