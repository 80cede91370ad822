"""The tests' own clock: hours pass at once, in the right order, and stand still while a thread works."""

import asyncio
import pickle
import subprocess
import sys
import threading
import time
from time import monotonic, perf_counter

import pytest

from cluster.engines.room import apart
from tests.virtual_time import REAL

virtual = pytest.mark.virtual_time


@virtual
async def test_hours_pass_at_once_on_every_clock():
    before, really = (monotonic(), perf_counter(), time.time()), REAL["monotonic"]()
    await asyncio.sleep(36_000)
    passed = [after - began for after, began in zip((monotonic(), perf_counter(), time.time()), before, strict=True)]
    assert passed == pytest.approx([36_000] * 3)
    assert REAL["monotonic"]() - really < 36_000


@virtual
async def test_timers_run_out_in_their_order_and_on_the_moment():
    seen, began = [], monotonic()

    async def after(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, round(monotonic() - began, 6)))

    await asyncio.gather(*(after(seconds) for seconds in (3, 1, 2, 0.1, 0.15)))
    assert seen == [(seconds, seconds) for seconds in (0.1, 0.15, 1, 2, 3)]


@virtual
async def test_computing_takes_no_time():
    began = monotonic()
    for _ in range(100):
        await asyncio.sleep(0)
    sum(range(100_000))
    assert monotonic() == began


@virtual
async def test_a_timer_waits_for_work_in_a_thread():
    began = monotonic()
    async with asyncio.timeout(0.001):
        assert await asyncio.to_thread(sum, range(1_000_000)) == 499_999_500_000
    assert monotonic() == began


@virtual
async def test_a_timeout_ends_what_never_ends():
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(120):
            await asyncio.Event().wait()


async def test_a_test_without_the_mark_has_real_time():
    began = REAL["monotonic"]()
    assert monotonic() >= began
    await asyncio.sleep(0.001)
    assert REAL["monotonic"]() > began


@virtual
async def test_the_clock_stands_still_for_work_in_a_thread_of_its_own(monkeypatch):
    """Which ends no earlier than the loop has nothing left to do but to wait for the next timer."""
    loop, idles = asyncio.get_running_loop(), threading.Event()
    wait_s = loop.wait_s

    def noted(until_next_timer_s):
        if until_next_timer_s:
            idles.set()
        return wait_s(until_next_timer_s)

    monkeypatch.setattr(loop, "wait_s", noted)
    async with asyncio.timeout(120):
        assert await asyncio.wrap_future(apart(lambda: idles.wait(300)))


@virtual
async def test_other_threads_have_real_time():
    seen = await asyncio.to_thread(lambda: (REAL["monotonic"](), monotonic(), REAL["monotonic"](), threading.current_thread()))
    assert seen[0] <= seen[1] <= seen[2]
    assert seen[3] is not threading.current_thread()


def test_a_clock_that_is_sent_to_another_process_is_that_processs_own():
    sent = pickle.dumps((monotonic, perf_counter, time.time))
    code = "import pickle, sys, time; print(pickle.load(sys.stdin.buffer) == (time.monotonic, time.perf_counter, time.time))"
    assert subprocess.run([sys.executable, "-I", "-c", code], input=sent, capture_output=True, check=True).stdout == b"True\n"
