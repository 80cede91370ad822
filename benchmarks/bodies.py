"""What does a body cost a gateway that is made to cost much? Its time, the event loop's longest turn, and its memory.

    python -m benchmarks.bodies [--rounds 3]

Each body is one request to the HTTP interface as a gateway has it, before a service that answers at once; its settings allow bodies of
16 MiB and the longest lists. "filled": as many values as fit into the size. "at the limits": what the gateway still reads, and the most of
it. CPU: of the whole process, collections of garbage included. loop: the most of it between two turns of the event loop, so that other
processes do not count, and a thread that keeps the loop from its turn does. Both are the least of the rounds; memory is the peak of one
more, the body itself apart.
Writes benchmarks/results/bodies_cpu_DATE.md.
"""

import asyncio
import os
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from starlette.types import Message

from benchmarks.reporting import Machine, dated, table
from cluster.config import MOST_ENTRIES, MOST_REQUESTS, GatewaySettings
from cluster.engines.heap import collect_rarely, freeze_loaded
from cluster.events.rules import LARGEST_BATCH
from cluster.values import Recommendation, RecommendRequest
from deployments.http.api import create_api
from deployments.http.event_messages import EventsOut
from deployments.http.interface import HttpInterface

SIZES = {"64 KiB": 2**16 + 2**10, "1 MiB": 2**20, "16 MiB": 2**24}
BEHAVIOUR, NUMBERED = b'{"item_id":"1","timestamp":1}', b'{"item_id":1,"timestamp":1}'
EVENT = b'{"user_id":"a","item_id":1,"timestamp":"5"}'
DEEP = b"[" * 900 + b"]" * 900


class Body(NamedTuple):
    """`more`: what follows the list of `times` units."""

    name: str
    path: str
    before: bytes
    unit: bytes
    times: int
    more: bytes = b"]}"

    @property
    def content(self) -> bytes:
        return self.before + b",".join([self.unit] * self.times) + self.more


def filled(size: int) -> Iterator[Body]:
    """Bodies of nearly so many bytes."""
    unknown, events = b'{"user_id":"a","x":[', b'{"events":['
    for name, path, before, unit in (
        ("lists in lists, 900 deep", "/v1/recommend", unknown, DEEP),
        ("objects with a list in a list", "/v1/recommend", unknown, b'{"a":[[]]}'),
        ("objects", "/v1/events", unknown, b'{"a":0}'),
        ("numbers", "/v1/recommend", b'{"user_id":"a","behaviours":[', b"0"),
        ("numbers of 4,300 digits", "/v1/events", unknown, b"9" * 4300),
        ("events to be converted", "/v1/events", events, EVENT),
        ("behaviours to be converted", "/v1/recommend", b'{"user_id":"a","behaviours":[', NUMBERED),
        ("behaviours", "/v1/recommend", b'{"user_id":"a","behaviours":[', BEHAVIOUR),
    ):
        yield Body(name, path, before, unit, (size - 60) // (len(unit) + 1))
    fields = (size - 20) // len(b'"0000000":0,')
    yield Body("unknown fields", "/v1/events", b'{"a":0' + b"".join(b',"%07d":0' % number for number in range(fields)), b"", 0, b"}")
    yield Body("a text with one emoji", "/v1/recommend", b'{"user_id":"' + b"a" * (size - 30) + "\U0001f600".encode(), b"", 0, b'"}')


def at_the_limits() -> Iterator[Body]:
    """The most that is read: 100,000 values, 6 MiB, by msgspec the longest lists."""
    unknown, most, most_bytes = b'{"user_id":"a","x":[', 99_900, 6 * 2**20
    yield Body("lists in lists, 900 deep", "/v1/recommend", unknown, DEEP, most // 901)
    yield Body("objects", "/v1/events", unknown, b'{"a":0}', most // 2)
    fields = b"".join(b',"%07d":0' % number for number in range(most))
    yield Body("unknown fields", "/v1/events", b'{"a":0' + fields, b"", 0, b"}")
    yield Body("numbers of 4,300 digits", "/v1/events", unknown, b"9" * 4300, most_bytes // 4302)
    yield Body("fractions of 80 digits", "/v1/events", unknown, b"0." + b"9" * 80, most_bytes // 84)
    text = b"a" * (most_bytes - 40)
    yield Body("a text with one emoji", "/v1/events", b'{"user_id":"' + text + "\U0001f600".encode(), b"", 0, b'"}')
    yield Body("10,000 events to be converted", "/v1/events", b'{"events":[', EVENT, LARGEST_BATCH)
    yield Body("33,000 behaviours to be converted", "/v1/recommend", b'{"user_id":"a","behaviours":[', NUMBERED, 33_000)
    yield Body("a batch of 256 times 128 such", "/v1/recommend:batch", b'{"requests":[', _request(NUMBERED, 128), 256)
    yield Body("a batch of 4,096 times 4 such", "/v1/recommend:batch", b'{"requests":[', _request(NUMBERED, 4), MOST_REQUESTS)
    names = b",".join([b'"%d"' % number for number in range(MOST_ENTRIES)])
    more = b'],"blocked":[%b],"allowed":[%b]}' % (names, names)
    yield Body("the longest lists, by msgspec", "/v1/recommend", b'{"user_id":"a","behaviours":[', BEHAVIOUR, MOST_ENTRIES, more)


def _request(unit: bytes, count: int) -> bytes:
    return b'{"user_id":1,"behaviours":[' + b",".join([unit] * count) + b"]}"


class Service:
    """Answers with nothing, at once."""

    async def recommend(self, request: RecommendRequest) -> Recommendation:
        return Recommendation(request.user_id, (), (), "none/1", degraded=False)

    async def append(self, events: list[Any]) -> EventsOut:
        return EventsOut(stored=len(events), duplicates=0, unknown_items=[], events=[])


def interface() -> HttpInterface:
    settings = {
        "max_body_bytes": max(SIZES.values()),
        "max_behaviours": MOST_ENTRIES,
        "max_listed_items": MOST_ENTRIES,
        "max_batch": MOST_REQUESTS,
        "max_events": LARGEST_BATCH,
        "slow_bytes_per_s": 2**40,
        "admission": {"max_held_entries": MOST_REQUESTS},
    }
    service: Any = Service()
    return create_api(service, service, GatewaySettings.model_validate(settings))


async def ask(api: HttpInterface, body: Body, content: bytes) -> int:
    """The status of the answer."""
    statuses, given = list[int](), False

    async def receive() -> Message:
        nonlocal given
        if given:
            await asyncio.get_running_loop().create_future()
        given = True
        return {"type": "http.request", "body": content, "more_body": False}

    async def send(message: Message) -> None:
        statuses.append(message.get("status", 0))

    headers = [(b"host", b"localhost"), (b"content-length", b"%d" % len(content)), (b"content-type", b"application/json")]
    scope: dict[str, Any] = {"type": "http", "asgi": {"spec_version": "2.3"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    scope |= {"path": body.path, "raw_path": body.path.encode(), "query_string": b"", "root_path": "", "headers": headers}
    await api(scope, receive, send)
    return statuses[0]


async def measured(api: HttpInterface, body: Body, rounds: int) -> tuple[str, ...]:
    """A row of the table."""
    content, cpu, turns_s = body.content, list[float](), list[float]()
    for _ in range(rounds):
        turns = asyncio.create_task(_longest_turn())
        await asyncio.sleep(0)
        began = time.process_time()
        status = await ask(api, body, content)
        cpu.append(time.process_time() - began)
        turns.cancel()
        turns_s.append(await turns)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    await ask(api, body, content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    print(body.name, len(content), status, min(cpu), min(turns_s), peak - before, flush=True)
    size = f"{len(content) / 2**20:.2f}"
    return body.name, size, str(status), f"{min(cpu) * 1e3:.0f}", f"{min(turns_s) * 1e3:.0f}", f"{(peak - before) / 2**20:.0f}"


async def _longest_turn() -> float:
    """The most of the processor's time between two turns of the loop, until it is cancelled."""
    longest, last = 0.0, time.process_time()
    while True:
        try:
            await asyncio.sleep(5e-4)
        except asyncio.CancelledError:
            return max(longest, time.process_time() - last)
        now = time.process_time()
        longest, last = max(longest, now - last), now


def main(
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/bodies_cpu_DATE.md")] = None,
) -> None:
    load_before = os.getloadavg()[0]
    lines = ["# What a body costs a gateway", "", *asyncio.run(_tables(rounds))]
    machine = Machine.now("benchmarks.bodies", ("fastapi", "pydantic", "msgspec"), load_before)
    (out or dated("bodies_cpu", "md")).write_text("\n".join([*lines, *machine.lines()]) + "\n")


async def _tables(rounds: int) -> list[str]:
    api, lines = interface(), list[str]()
    for body in filled(2**10):
        await ask(api, body, body.content)
    freeze_loaded()
    collect_rarely()
    columns = ["body", "MiB", "status", "CPU (ms)", "loop (ms)", "peak (MB)"]
    for name, bodies in {**{f"Filled, {name}": filled(size) for name, size in SIZES.items()}, "At the limits": at_the_limits()}.items():
        lines += [f"## {name}", "", *table(columns, [await measured(api, body, rounds) for body in bodies]), ""]
    return lines


if __name__ == "__main__":
    typer.run(main)
