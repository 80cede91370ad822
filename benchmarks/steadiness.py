"""Whether a gateway stays as fast and as small as it is: the longest stalls of its event loop, with their stacks, and its memory.

    python -m benchmarks.steadiness                          # with the demo's model (run `make demo ONCE=1` before)
    python -m benchmarks.steadiness --requests 1000000

A colocated gateway in this process, without Serve and without a proxy: `CALLERS` callers ask again as soon as they are answered, for 64
users, strategy retrieval, nothing cached. A stall is a time of at least `STALL_S` in which the loop runs no callback that is due; another
thread notes what the loop does meanwhile. No request is refused, however slow the machine is. Writes
benchmarks/results/steadiness_cpu_DATE.md.
"""

import asyncio
import gc
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
import uvloop

from benchmarks.load_bodies import bodies
from benchmarks.reporting import Machine, dated, table
from cluster.config import Settings, parse
from deployments.fleet.heartbeat import Heartbeat
from deployments.fleet.switchboard import SwitchboardDeployment
from deployments.gateway import Gateway
from deployments.http.exchange import HttpRequest
from deployments.replicas.encoder import Encoder
from deployments.replicas.generator import Generator
from deployments.replicas.ranker import Ranker
from deployments.stages import ColocatedStages
from tests.fakes.handles import Handle

CALLERS = 16
WARM_UP = 5_000
PARTS = 10
STALL_S = 0.005
LOOK_S = 0.001
SHOWN = 10
FRAMES = 4


@dataclass(frozen=True)
class Stall:
    """How long it took in seconds, how much of that was garbage collection, and the innermost frames, outermost first."""

    seconds: float
    collecting_s: float
    frames: tuple[str, ...]


@dataclass(frozen=True)
class Part:
    """A part of the requests: how many a second, and the process's resident memory in bytes at its end."""

    per_s: float
    resident: int


class Watch:
    """Counts stalls of the loop that it is constructed in, until `stop`, and keeps the longest: all would be memory that grows."""

    def __init__(self) -> None:
        self.count, self.longest = 0, list[Stall]()
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._seen, self._collecting_s, self._began = time.perf_counter(), 0.0, 0.0
        self._over = threading.Event()
        gc.callbacks.append(self._collected)
        self._tick()
        self._thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()
        gc.callbacks.remove(self._collected)

    def _tick(self) -> None:
        self._seen = time.perf_counter()
        if not self._over.is_set():
            self._loop.call_later(LOOK_S, self._tick)

    def _collected(self, phase: str, _: object) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self._collecting_s += now - self._began

    def _watch(self) -> None:
        while not self._over.wait(LOOK_S):
            seen, collecting_s = self._seen, self._collecting_s
            if time.perf_counter() - seen < STALL_S:
                continue
            frames = _innermost(sys._current_frames().get(self._thread_id))  # noqa: SLF001 - the documented way to another thread's stack
            while self._seen == seen and not self._over.wait(LOOK_S):
                pass
            self.count += 1
            self.longest.append(Stall(self._seen - seen, self._collecting_s - collecting_s, frames))
            self.longest = sorted(self.longest, key=lambda one: one.seconds, reverse=True)[:SHOWN]


def _innermost(frame: FrameType | None) -> tuple[str, ...]:
    stack = traceback.extract_stack(frame)[-FRAMES:] if frame else []
    return tuple(f"{Path(one.filename).name}:{one.lineno} {one.name}" for one in stack)


@asynccontextmanager
async def colocated(settings: Settings) -> AsyncIterator[Gateway]:
    """A gateway that computes all stages, in this process."""
    board: Any = Handle(SwitchboardDeployment(settings.model_dump(mode="json")))
    board.calls = deque(maxlen=1)  # or each report would stay in memory
    heartbeat = Heartbeat(settings, board, "steadiness")
    stages = ColocatedStages(Encoder(settings, heartbeat), Generator(settings, heartbeat), Ranker(settings, heartbeat))
    gateway = Gateway(settings, board, heartbeat, stages)
    await gateway.start()
    gc.collect()
    gc.freeze()  # as Serve does once a replica is constructed
    try:
        yield gateway
    finally:
        await gateway.close()


async def ask(gateway: Gateway, asked: Sequence[bytes], requests: int) -> float:
    """Requests a second of `CALLERS` callers that never wait."""

    async def caller(first: int) -> None:
        for number in range(first, requests, CALLERS):
            answered = await gateway.exchange(HttpRequest("POST", "/v1/recommend", body=asked[number % len(asked)]))
            if answered.status != 200:
                raise SystemExit(f"a request was answered {answered.status}: {answered.body!r}")

    began = time.perf_counter()
    await asyncio.gather(*(caller(first) for first in range(CALLERS)))
    return requests / (time.perf_counter() - began)


async def measured(settings: Settings, asked: Sequence[bytes], requests: int) -> tuple[int, list[Part], Watch]:
    """The resident memory after the warm-up, the parts one after the other, and what was seen of stalls."""
    async with colocated(settings) as gateway:
        await ask(gateway, asked, WARM_UP)
        before, watch, parts = resident(), Watch(), list[Part]()
        for _ in range(PARTS):
            per_s = await ask(gateway, asked, requests // PARTS)
            parts.append(Part(per_s, resident()))
        watch.stop()
        return before, parts, watch


def resident() -> int:
    """Resident memory of the process, in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def report(requests: int, before: int, parts: Sequence[Part], watch: Watch, machine: Machine) -> str:
    """As Markdown."""
    first, last = parts[0], parts[-1]
    lines = [
        "# A gateway that goes on",
        "",
        f"{requests:,} retrievals of {CALLERS} callers that never wait, for 64 users, nothing cached, colocated, without Serve.",
        f"Resident memory: {before / 1e6:.1f} MB after {WARM_UP:,} requests of warm-up, {last.resident / 1e6:.1f} MB at the end,",
        f"{(last.resident - before) / requests:+.0f} bytes a request. Requests/s, last tenth over first: {last.per_s / first.per_s:.2f}.",
        "",
        *table(
            ["tenth", "requests/s", "resident, MB"],
            [[str(number), f"{one.per_s:.0f}", f"{one.resident / 1e6:.1f}"] for number, one in enumerate(parts, 1)],
        ),
        "",
        f"{watch.count} stalls of the event loop of {STALL_S * 1e3:.0f} ms or more; the longest:",
        "",
        *table(
            ["ms", "of it garbage collection, ms", "what the loop did, the innermost call last"],
            [
                [f"{one.seconds * 1e3:.1f}", f"{one.collecting_s * 1e3:.1f}", " > ".join(f"`{frame}`" for frame in one.frames)]
                for one in watch.longest
            ],
        ),
        "",
        *machine.lines(),
    ]
    return "\n".join(lines)


def main(
    *,
    model_dir: Annotated[Path, typer.Option()] = Path("models/ml-100k"),
    requests: Annotated[int, typer.Option(min=PARTS, help="after the warm-up")] = 100_000,
    out: Annotated[Path | None, typer.Option(help="default: benchmarks/results/steadiness_cpu_DATE.md")] = None,
) -> None:
    """Ask, watch, print and write."""
    load = os.getloadavg()[0]
    tree = {
        "model_dir": str(model_dir),
        "placement": "colocated",
        "events": {"enabled": False},
        "generator": {"order": ["torch_beam"]},
        "gateway": {"deadline_s": 60, "request_within_s": 300, "admission": {"target_ms": 60_000, "max_wait_ms": 60_000}},
    }
    asked = [body.encode() for body in bodies(model_dir, strategy="retrieval", cache="bypass")]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        before, parts, watch = runner.run(measured(parse(tree), asked, requests))
    page = report(requests, before, parts, watch, Machine.now("benchmarks.steadiness", ("torch", "onnxruntime", "uvloop"), load))
    (out or dated("steadiness_cpu", "md")).write_text(page)
    print(page)


if __name__ == "__main__":
    typer.run(main)
