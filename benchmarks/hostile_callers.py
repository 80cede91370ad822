"""Hostile and careless callers, over sockets of their own. Each kind is a function that talks on one connection until it is over.

    python -m benchmarks.hostile_callers --url http://127.0.0.1:8000 --kind "slow headers" --seconds 10

They call from other addresses than the honest callers (127.0.0.2 and on), as strangers do. Prints as JSON how their connections ended,
{"408": 12, "closed": 3, "left": 200}: by an answer with this status, else by which side.
"""

import asyncio
import gzip
import json
import os
import random
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import cycle
from typing import Annotated
from urllib.parse import urlsplit

import typer

ADDRESSES = [f"127.0.0.{last}" for last in range(2, 34)]
PATIENCE_S = 60.0
TRICKLE_S = 1.0
"""Between two bytes of a slow caller."""
MIB = 2**20
BEHAVIOURS = 33_000
MALFORMED = b'{"user_id":"u","behaviours":[' + b'{"item_id":"1","timestamp":1},' * BEHAVIOURS + b"{}]}"
"""As many values, and nearly as many bytes, as a gateway reads: so many behaviours are right, and the one after them is refused, as a list
is read up to its first wrong entry.
"""
LAWFUL = json.dumps({"user_id": "hostile", "behaviours": [], "k": 1000, "strategy": "retrieval", "cache": "bypass"}).encode()


@dataclass(frozen=True, slots=True)
class Line:
    """One connection to the server at `host`, a name with its port."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: str

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answered(self) -> str:
        """The status of what is answered; "closed" where nothing is."""
        async with asyncio.timeout(PATIENCE_S):
            words = (await self.reader.readline()).split()
        return words[1].decode() if len(words) > 1 else "closed"

    def head(self, *headers: str, method: str = "POST", path: str = "/v1/recommend") -> bytes:
        return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {self.host}", "Content-Type: application/json", *headers, "", ""]).encode()

    async def ask(self, body: bytes, *headers: str) -> str:
        await self.send(self.head(f"Content-Length: {len(body)}", *headers) + body)
        return await self.answered()

    async def trickle(self, data: bytes) -> str:
        """A byte at a time, until something is answered."""
        answer = asyncio.ensure_future(self.answered())
        try:
            for byte in data:
                await self.send(bytes([byte]))
                if (await asyncio.wait([answer], timeout=TRICKLE_S))[0]:
                    break
            return await answer
        finally:
            answer.cancel()


async def idle(line: Line) -> str:
    """Says nothing."""
    return await line.answered()


async def slow_headers(line: Line) -> str:
    """One header after the other, without an end."""
    return await line.trickle(line.head()[:-2] + b"X: 1\r\n" * 1000)


async def slow_body(line: Line) -> str:
    """A body that is announced, and comes by the byte."""
    await line.send(line.head("Content-Length: 1000"))
    return await line.trickle(b" " * 999)


async def endless_body(line: Line) -> str:
    """Chunks without a last one, ten a second."""
    await line.send(line.head("Transfer-Encoding: chunked"))
    answer = asyncio.ensure_future(line.answered())
    try:
        while not answer.done():
            await line.send(b"10000\r\n" + b" " * 65536 + b"\r\n")
            await asyncio.wait([answer], timeout=0.1)
        return await answer
    finally:
        answer.cancel()


async def slow_reader(line: Line) -> str:
    """Asks for a stream of a thousand items and reads it by the byte."""
    await line.send(line.head(f"Content-Length: {len(LAWFUL)}", "Accept: text/event-stream") + LAWFUL)
    answer = b""
    while True:
        async with asyncio.timeout(PATIENCE_S):  # not wait_for: of Python 3.11, it may lose the caller's end
            byte = await line.reader.read(1)
        if not byte:
            return answer[9:12].decode() or "closed"
        answer += byte
        await asyncio.sleep(TRICKLE_S / 10)


async def malformed(line: Line) -> str:
    """Nearly as large as is taken, and wrong at its end."""
    return await line.ask(MALFORMED)


async def too_large(line: Line) -> str:
    """Twice as large as is taken."""
    return await line.ask(b'{"user_id":"' + b"u" * 2 * MIB + b'"}')


async def deep(line: Line) -> str:
    """Half a million lists in each other."""
    return await line.ask(b"[" * (MIB // 2 - 1) + b"]" * (MIB // 2 - 1))


async def numbers(line: Line) -> str:
    """Half a million numbers where users and items are expected."""
    return await line.ask(b'{"user_id":"u","behaviours":[' + b"1," * (MIB // 2 - 32) + b"1]}")


async def compressed(line: Line) -> str:
    """A kilobyte that unpacks to a megabyte."""
    return await line.ask(gzip.compress(LAWFUL + b" " * MIB), "Content-Encoding: gzip")


async def pipelined(line: Line) -> str:
    """A hundred requests for recommendations at once, of which one answer is read."""
    await line.send((line.head(f"Content-Length: {len(LAWFUL)}") + LAWFUL) * 100)
    return await line.answered()


async def broken(line: Line) -> str:
    """What is no HTTP."""
    await line.send(random.randbytes(4096) + b"\r\n\r\n")
    return await line.answered()


async def refused_upload(line: Line) -> str:
    """Announces more than is taken and sends the beginning; refused, it neither goes on nor leaves."""
    await line.send(line.head("Content-Length: 2000000") + b" " * 70_000)
    status = await line.answered()
    async with asyncio.timeout(PATIENCE_S):
        await line.reader.read()
    return status


async def unread_page(line: Line) -> str:
    """Asks for a page of 1.5 MB, which needs no key, and does not read it."""
    await line.send(line.head(method="GET", path="/docs/swagger-ui-bundle.js"))
    status = await line.answered()
    await asyncio.sleep(PATIENCE_S)
    return status


async def leaving(line: Line) -> str:
    """Asks, and is gone in one of three phases: amid the headers, amid the body, before the answer."""
    whole = line.head(f"Content-Length: {len(LAWFUL)}") + LAWFUL
    await line.send(whole[: random.choice([40, len(whole) - 20, len(whole)])])
    await asyncio.sleep(random.uniform(0, 0.01))
    line.writer.transport.abort()
    return "left"


@dataclass(frozen=True, slots=True)
class Kind:
    """`connections` at a time, each opened again `pause_s` after it has ended, on average. `window`: bytes that the system takes in for a
    caller that does not read; without one, megabytes.
    """

    talk: Callable[[Line], Awaitable[str]]
    connections: int
    pause_s: float = 0.5
    window: int | None = None


KINDS = {
    "idle": Kind(idle, 1000),
    "slow headers": Kind(slow_headers, 200),
    "slow bodies": Kind(slow_body, 200),
    "bodies without an end": Kind(endless_body, 16),
    "slow readers": Kind(slow_reader, 100),
    "malformed bodies of 1 MiB": Kind(malformed, 8),
    "bodies of 2 MiB": Kind(too_large, 8),
    "lists in lists": Kind(deep, 8),
    "half a million numbers": Kind(numbers, 8),
    "gzip": Kind(compressed, 8),
    "pipelines": Kind(pipelined, 8),
    "no HTTP": Kind(broken, 16),
    "uploads that are refused": Kind(refused_upload, 1000, pause_s=2),
    "pages that are not read": Kind(unread_page, 1000, pause_s=2, window=4096),
    "clients that leave": Kind(leaving, 32),
}


@asynccontextmanager
async def connection(url: str, address: str, window: int | None) -> AsyncIterator[Line]:
    """From this address. Ends at once: what was not read is thrown away."""
    parts, made = urlsplit(url), socket.socket()
    made.setblocking(False)
    if window is not None:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
    made.bind((address, 0))
    try:
        await asyncio.get_running_loop().sock_connect(made, (parts.hostname, parts.port))
    except BaseException:
        made.close()
        raise
    reader, writer = await asyncio.open_connection(sock=made)
    try:
        yield Line(reader, writer, parts.netloc)
    finally:
        writer.transport.abort()


async def call(url: str, kind: Kind, seconds: float) -> Counter[str]:
    """Returns what became of the connections that were over in time."""
    over, addresses = Counter[str](), cycle(ADDRESSES)

    async def caller() -> None:
        while True:
            await asyncio.sleep(random.uniform(0, 2 * kind.pause_s))  # not all of them at one moment
            over[await once(url, next(addresses), kind)] += 1

    async with asyncio.TaskGroup() as group:
        callers = [group.create_task(caller()) for _ in range(kind.connections)]
        await asyncio.sleep(seconds)
        for one in callers:
            one.cancel()
    return over


async def once(url: str, address: str, kind: Kind) -> str:
    """What became of one connection."""
    try:
        async with connection(url, address, kind.window) as line:
            return await kind.talk(line)
    except TimeoutError:
        return "held"
    except OSError:
        return "closed"


def main(
    *,
    url: Annotated[str, typer.Option()],
    kind: Annotated[str, typer.Option(help=f"one of {', '.join(KINDS)}")],
    seconds: Annotated[float, typer.Option()] = 10.0,
) -> None:
    """Call for so long, after honest callers where a core is short."""
    os.nice(10)
    print(json.dumps(asyncio.run(call(url, KINDS[kind], seconds))))


if __name__ == "__main__":
    typer.run(main)
