"""Which processes benchmarks/kill_caches.py kills while requests go on."""

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.kill_caches import Tally, kill_until
from tests.waiting import until


class Listing:
    """Gateways as Serve lists them: also those that were killed, until it has seen so. `looks`: how often the list was asked for.

    `pid`: a process without cache actors.
    """

    def __init__(self, pid: int, gateways: set[int]) -> None:
        self.pid, self.gateways, self.looks = pid, gateways, 0

    def running(self, _: str) -> set[int]:
        self.looks += 1
        return set(self.gateways)


@pytest.fixture
def three() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes that wait to be killed."""
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen(["sleep", "600"])) for _ in range(3)]
        for one in started:
            stack.callback(one.kill)
        yield started


async def test_the_last_gateway_is_left_alone_while_serve_still_lists_one_that_was_killed(three: list[subprocess.Popen[bytes]]) -> None:
    other, *gateways = three
    serving, tally, over = Listing(other.pid, {one.pid for one in gateways}), Tally(times=[1.0] * 8), asyncio.Event()
    done = asyncio.create_task(over.wait())
    killing = asyncio.create_task(kill_until(done, serving, tally, every=1))
    await until(lambda: killing.done() or serving.looks == 4)
    over.set()
    await killing
    assert tally.killed["gateway"] == 1
    await until(lambda: [one.poll() is None for one in gateways].count(True) == 1)
