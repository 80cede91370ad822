"""Twice the load from callers with little patience: the places and the batches go to requests that can still be answered in time."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import pytest

from cluster.config import AdmissionSettings, BatchingSettings
from cluster.traffic.admission import Admission, Standing
from deployments.replicas.batching import engine_batcher
from tests.waiting import passed

pytestmark = pytest.mark.virtual_time
CAPACITY = 16 / 0.106
"""Requests a second, in batches of 16."""
PATIENCE_S = 0.4
LATE = "too late"


@dataclass
class Request:
    deadline: float | None


class Gateway:
    """Its admission before an engine that takes 10 ms a batch and 6 ms a request. `answered`: when, for each real answer."""

    def __init__(self) -> None:
        self.held, self.engine = Admission(AdmissionSettings(), target_s=1.0), asyncio.Lock()
        self.batcher = engine_batcher(self.compute, BatchingSettings(), lambda _: 10, lambda: LATE, lambda *_: None)
        self.answered = list[float]()

    async def compute(self, requests):
        async with self.engine:
            await passed(0.01 + 0.006 * len(requests))
        return ["answer"] * len(requests)

    async def ask(self, deadline: float | None) -> None:
        ticket, _ = self.held.arrive(monotonic(), 3)
        if ticket.standing is not Standing.RUNNING:  # refused, or to be refused soon
            self.held.leave(ticket, monotonic())
            return
        first_byte_s = None
        try:
            answer = LATE
            with suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    answer = await self.batcher.submit(Request(deadline))
            first_byte_s = monotonic() - ticket.started
            if answer != LATE:
                self.answered.append(monotonic())
        finally:
            self.held.leave(ticket, monotonic(), first_byte_s)


async def test_callers_with_deadlines_get_real_answers_at_twice_the_load():
    gateway, began, asked = Gateway(), monotonic(), set[asyncio.Task[None]]()
    for number in range(int(15 * 2 * CAPACITY)):
        await passed(began + number / (2 * CAPACITY) - monotonic())
        asked.add(asyncio.create_task(gateway.ask(monotonic() + PATIENCE_S)))
    await asyncio.wait(asked)
    assert sum(at - began >= 5 for at in gateway.answered) >= 10 * CAPACITY / 2
