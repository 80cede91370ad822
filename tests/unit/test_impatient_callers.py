"""Twice the load from callers with little patience: the places and the batches go to requests that can still be answered in time."""

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

import pytest

from cluster.config import AdmissionSettings, BatchingSettings
from cluster.traffic.admission import Admission, Standing
from deployments.replicas.batching import engine_batcher

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
            await asyncio.sleep(0.01 + 0.006 * len(requests))
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
            self.held.leave(ticket, monotonic(), first_byte_s, in_vain=first_byte_s is None)


async def answers_a_second(*, leaving: bool, seconds: float = 15.0, counted: float = 10.0) -> float:
    """Callers leave, or get a fallback at their deadlines, after PATIENCE_S."""
    gateway, began, asked = Gateway(), monotonic(), set[asyncio.Task[None]]()

    async def ask() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S if leaving else None):
                await gateway.ask(None if leaving else monotonic() + PATIENCE_S)

    for number in range(int(seconds * 2 * CAPACITY)):
        await asyncio.sleep(began + number / (2 * CAPACITY) - monotonic())
        asked.add(asyncio.create_task(ask()))
    await asyncio.wait(asked)
    return sum(at - began >= seconds - counted for at in gateway.answered) / counted


async def test_callers_with_deadlines_get_real_answers_at_twice_the_load():
    assert await answers_a_second(leaving=False) >= CAPACITY / 2


async def test_callers_that_leave_without_an_answer_get_answers_at_twice_the_load():
    assert await answers_a_second(leaving=True) >= CAPACITY / 2


async def test_a_tenants_clients_that_leave_take_no_places_from_others_that_wait_for_their_answers():
    """200 of one tenant are answered after .5 s each, 60 of another leave after .26 s."""
    held, answered, until = Admission(AdmissionSettings(), target_s=1.0), 0, monotonic() + 30

    async def ask(tenant: str, takes_s: float, *, leaves: bool) -> None:
        nonlocal answered
        while monotonic() < until:
            ticket, _ = held.arrive(monotonic(), 3, tenant, tenant)
            while ticket.standing is Standing.WAITING:
                await asyncio.sleep(0.02)
                held.expire(monotonic())
            if ticket.standing is Standing.REFUSED:
                await asyncio.sleep(0.1)
                continue
            await asyncio.sleep(takes_s)
            held.leave(ticket, monotonic(), None if leaves else takes_s, in_vain=leaves)
            answered += not leaves

    await asyncio.gather(*(ask("a", 0.5, leaves=False) for _ in range(200)), *(ask("b", 0.26, leaves=True) for _ in range(60)))
    assert (held.places, answered >= 0.9 * 166 * 30) == (128, True)
