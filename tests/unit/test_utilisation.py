import asyncio
from threading import Event

import pytest

from cluster.traffic.utilisation import Uncounted, Utilisation
from tests.waiting import until


def test_it_is_the_share_of_the_window_that_was_busy():
    meter = Utilisation(now=0.0, window_s=4.0)
    assert meter.share(1.0, 0.5) == pytest.approx(0.5)
    assert meter.share(2.0, 0.5) == pytest.approx(0.25)
    for second in range(3, 8):
        share = meter.share(float(second), 0.5)
    assert share == 0.0, "what was busy lies before the window"


def test_asked_twice_at_the_same_moment_it_says_nothing_new():
    meter = Utilisation(now=5.0, busy_s=3.0)
    assert meter.share(5.0, 3.0) == 0.0


async def test_work_that_does_not_count_is_told_while_it_goes_on_and_afterwards():
    uncounted, may_end = Uncounted(), Event()

    def burn():
        while not may_end.is_set():
            pass

    burning = asyncio.create_task(uncounted.run(burn))
    await until(lambda: uncounted.spent_s > 0.05)
    may_end.set()
    await burning
    assert uncounted.spent_s > 0.05


async def test_work_that_does_not_count_may_fail():
    uncounted = Uncounted()
    with pytest.raises(ZeroDivisionError):
        await uncounted.run(divmod, 1, 0)
    spent_s = uncounted.spent_s
    assert await uncounted.run(divmod, 7, 2) == (3, 1)
    assert uncounted.spent_s >= spent_s
