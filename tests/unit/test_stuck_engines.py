"""When Serve ends a replica that computes for long: its health checks over a model with a busy thread, in virtual time."""

import asyncio
from time import monotonic
from types import SimpleNamespace

import pytest
from ray.serve._private.constants import REPLICA_HEALTH_CHECK_UNHEALTHY_THRESHOLD as FAILURES

from cluster.config_file import read_document
from deployments.replicas.stage_model import STUCK_AFTER_S, StageModel
from tests.documents import ROOT

pytestmark = pytest.mark.virtual_time
ENCODER = next(one for one in read_document(ROOT / "ray_config.yaml")["applications"][0]["deployments"] if one["name"] == "encoder")


class Busy:
    """An engine thread that computes one call after another; what else is to run waits for the end of the call that runs."""

    def __init__(self, call_s: float, calls: float) -> None:
        self.call_s, self.until = call_s, monotonic() + calls * call_s

    async def run(self, work):
        if (left_s := self.until - monotonic()) > 0:
            await asyncio.sleep(left_s % self.call_s or self.call_s)
        return work()


async def failures_in_a_row(call_s: float, calls: float) -> int:
    """The most health checks that fail in a row while so many calls take so long, each of Serve's checks a second after the last: with
    calls of 31 s, just as the next one has begun.
    """
    model = SimpleNamespace(_turn=None, controller=SimpleNamespace(thread=Busy(call_s, calls)))
    until, row, most = monotonic() + calls * call_s + 60, 0, 0
    while monotonic() < until:
        try:
            await asyncio.wait_for(StageModel.check(model), ENCODER["health_check_timeout_s"])
            row = 0
        except TimeoutError:
            row += 1
        most = max(most, row)
        await asyncio.sleep(ENCODER["health_check_period_s"])
    return most


@pytest.mark.parametrize(("call_s", "calls", "failures"), [(29, 20, 0), (31, 1, 1), (31, 20, 1), (60, 20, 2)])
async def test_an_engine_that_computes_for_longer_than_a_check_waits_is_not_ended_for_it(call_s, calls, failures):
    assert await failures_in_a_row(call_s, calls) <= failures < FAILURES


async def test_an_engine_that_does_not_return_is_ended():
    assert await failures_in_a_row(FAILURES * (STUCK_AFTER_S + 2), 1) == FAILURES
