"""Drives a genrec endpoint: callers that ask again as soon as they are answered, and the time of each answer, or of its first item.

It is a closed loop: the server sets the pace, and requests that an independent caller would send during a stall are sent only after it.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from time import perf_counter
from typing import Any

import httpx

from cluster.errors import ConfigError
from deployments.cli.bench_figures import Answer, Reading, Run, Seen, Served
from deployments.cli.bench_processes import Usage
from deployments.cli.server import server_url

PATH = "/v1/recommend"
SSE = "text/event-stream"
FIRST_ITEM, LAST_EVENTS = b"event: item\n", (b"event: answer\n", b"event: error\n")
STREAMED_SHARE = 4
"""There is one streamed answer for so many plain ones, and at least one for each caller."""
READ_EVERY_S = 0.25
"""How often it is read what the server uses. Linux counts a process's time in hundredths of a second."""
MOST_ITEMS = (1000, 100, 10)
"""How many items are asked for, to learn item ids: the first number that the server's limit allows."""


class Endpoint:
    """A genrec server at `client`'s base URL."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, body: bytes) -> Seen:
        """The answer, all at once."""
        began = perf_counter()
        try:
            response = await self._client.post(PATH, content=body, headers=_headers("application/json"))
        except httpx.HTTPError as error:
            return Seen(_ms_since(began), problem=_lost(error))
        took = _ms_since(began)
        return _seen(took, response.status_code, response.content)

    async def ask_streamed(self, body: bytes) -> Seen:
        """The answer as server-sent events; the first item may come with the answer itself."""
        began, first, content = perf_counter(), None, b""
        try:
            async with self._client.stream("POST", PATH, content=body, headers=_headers(SSE)) as response:
                async for chunk in response.aiter_bytes():
                    content += chunk
                    if first is None and (FIRST_ITEM in content or any(event in content for event in LAST_EVENTS)):
                        first = _ms_since(began)
        except httpx.HTTPError as error:
            return Seen(_ms_since(began), problem=_lost(error))
        took = _ms_since(began)
        seen = _seen(took, response.status_code, _last_event(content) if response.status_code == 200 else content)
        return replace(seen, first_item_ms=first if seen.answer and seen.answer.items else None)

    async def item_ids(self) -> list[str]:
        """Items that the server recommends to a new user. Raises ConfigError where it recommends none."""
        for k in MOST_ITEMS:
            response = await self._sent(json.dumps({"user_id": "bench-new", "behaviours": [], "k": k}).encode())
            answer = _answer(response.content) if response.status_code == 200 else None
            if answer and answer.items:
                return [str(item["item_id"]) for item in response.json()["items"]]
        raise ConfigError(f"{self._client.base_url} names no items: {_told(response)}; give the model's directory: --model-dir")

    async def check(self, body: bytes) -> Answer:
        """One answer, before many requests are sent. Raises ConfigError with the server's message where it gives none."""
        response = await self._sent(body)
        answer = _answer(response.content) if response.status_code == 200 else None
        if answer is None:
            raise ConfigError(f"{self._client.base_url} does not answer as genrec does: {_told(response)}")
        return answer

    async def _sent(self, body: bytes) -> httpx.Response:
        try:
            return await self._client.post(PATH, content=body, headers=_headers("application/json"))
        except httpx.HTTPError as error:
            told = str(error) or type(error).__name__
            raise ConfigError(f"{self._client.base_url} cannot be asked: {told}; start it (genrec serve) or give another --url") from error


def connect(url: str, *, callers: int = 1, key: str | None = None, timeout_s: float = 30.0) -> httpx.AsyncClient:
    """A client that keeps one connection for each caller, and uses no proxy, as the server is measured. Raises ConfigError."""
    limits = httpx.Limits(max_connections=callers, max_keepalive_connections=callers)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(base_url=server_url(url), headers=headers, timeout=timeout_s, limits=limits, trust_env=False)


async def measure(
    endpoint: Endpoint, bodies: Sequence[bytes], *, callers: int, warm_up: int, iterations: int, look: Callable[[], Usage | None]
) -> Run:
    """Send `warm_up` requests that do not count, `iterations` plain ones, and a share of them once more as streams. `look` says what the
    server uses while the plain ones are sent; it is called in a thread.
    """
    await closed_loop(endpoint.ask, bodies, callers, warm_up)
    watch = Watch(look)
    async with watch.kept():
        plain, seconds = await closed_loop(watch.counted(endpoint.ask), bodies, callers, iterations)
    await closed_loop(endpoint.ask_streamed, bodies, callers, min(warm_up, callers))
    streamed, _ = await closed_loop(endpoint.ask_streamed, bodies, callers, max(callers, iterations // STREAMED_SHARE))
    return Run(plain, seconds, streamed, watch.readings)


class Watch:
    """Reads what the server uses and how many requests it has answered, again and again while `kept`."""

    def __init__(self, look: Callable[[], Usage | None]) -> None:
        self.readings: list[Reading] = []
        self._look = look
        self._answered = 0

    def counted(self, ask: Callable[[bytes], Awaitable[Seen]]) -> Callable[[bytes], Awaitable[Seen]]:
        """`ask`, which counts its answers here."""

        async def asked(body: bytes) -> Seen:
            seen = await ask(body)
            self._answered += seen.answer is not None
            return seen

        return asked

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """Read at the beginning, every `READ_EVERY_S`, and at the end."""
        await self._read()
        ended = asyncio.Event()
        reading = asyncio.create_task(self._read_until(ended))
        try:
            yield
        finally:
            ended.set()
            await reading

    async def _read_until(self, ended: asyncio.Event) -> None:
        while not ended.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), READ_EVERY_S)
            await self._read()

    async def _read(self) -> None:
        usage = await asyncio.to_thread(self._look)
        self.readings.append(Reading(perf_counter(), self._answered, usage))


async def closed_loop(
    ask: Callable[[bytes], Awaitable[Seen]], bodies: Sequence[bytes], callers: int, count: int
) -> tuple[list[Seen], float]:
    """Send `count` requests, the bodies in turns, each as soon as a caller is free; returns their outcomes, and the seconds in all."""
    seen: list[Seen] = []
    numbers = iter(range(count))

    async def caller() -> None:
        for number in numbers:
            one = await ask(bodies[number % len(bodies)])
            seen.append(one)

    began = perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(callers):
            group.create_task(caller())
    return seen, perf_counter() - began


def _seen(duration_ms: float, status: int, content: bytes) -> Seen:
    if status != 200:
        return Seen(duration_ms, problem=f"status {status}")
    answer = _answer(content)
    return Seen(duration_ms, answer, "" if answer else "no answer of genrec")


def _answer(content: bytes) -> Answer | None:
    """The answer in a response's content; None where that is no answer."""
    try:
        tree: Any = json.loads(content)
        stages = tuple(Served(one["stage"], one["backend"], float(one["duration_ms"])) for one in tree["stages"])
        tier = tree["cache"]["tier"] if tree["cache"] else "none"
        return Answer(len(tree["items"]), bool(tree["degraded"]), tier, stages, tree["model_version"])
    except (ValueError, KeyError, TypeError):
        return None


def _last_event(content: bytes) -> bytes:
    """The data of the last server-sent event."""
    _, _, data = content.rstrip(b"\n").rpartition(b"\ndata: ")
    return data


def _told(response: httpx.Response) -> str:
    """A response in words, cut short."""
    return f"status {response.status_code}, {response.text[:200]!r}"


def _lost(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.TimeoutException):
        return "out of time"
    return "no connection" if isinstance(error, httpx.ConnectError) else "connection lost"


def _headers(accept: str) -> dict[str, str]:
    return {"content-type": "application/json", "accept": accept, "accept-encoding": "identity"}


def _ms_since(began: float) -> float:
    return (perf_counter() - began) * 1e3
