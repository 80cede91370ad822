"""Calls between deployments, over a handle that behaves as Ray Serve's do."""

import asyncio
from types import SimpleNamespace

import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from cluster.errors import BackendFailed, BackendUnavailable, UnknownChoice
from cluster.switchboard import StageStatus
from deployments.operation import Operation
from deployments.remote import ask


class Handle:
    """Answers each call with the next of `outcomes`: a value, an exception to raise, or None for never."""

    deployment_name = "encoder"

    def __init__(self, *outcomes):
        self.outcomes, self.responses = list(outcomes), []

    def __getattr__(self, method):
        return SimpleNamespace(remote=self._remote)

    def _remote(self, *args):
        response, outcome = asyncio.get_running_loop().create_future(), self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            response.set_exception(outcome)
        elif outcome is not None:
            response.set_result(outcome)
        self.responses.append(response)
        return response


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("encode", "the trace", cause)


async def test_a_replica_that_dies_with_a_call_costs_a_try():
    assert await ask(Handle(ActorDiedError(), "answer"), "encode", within_s=1, tries=2) == "answer"
    with pytest.raises(BackendUnavailable, match="no replica of encoder could be reached"):
        await ask(Handle(ActorDiedError(), ActorDiedError()), "encode", within_s=1, tries=2)


async def test_an_error_of_ours_comes_through_and_another_is_a_broken_backend():
    with pytest.raises(UnknownChoice):
        await ask(Handle(raised(UnknownChoice("encoder", "trt", ["torch"]))), "encode", within_s=1)
    with pytest.raises(BackendFailed, match="ZeroDivisionError"):
        await ask(Handle(raised(ZeroDivisionError("no"))), "encode", within_s=1)


async def test_a_call_that_nobody_waits_for_any_more_is_cancelled():
    handle = Handle(None)
    with pytest.raises(BackendUnavailable, match=r"no replica of encoder answered within 0\.01 s"):
        await ask(handle, "encode", within_s=0.01)
    assert handle.responses[0].cancelled()
    handle = Handle(None)
    caller = asyncio.create_task(ask(handle, "encode", within_s=10))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert handle.responses[0].cancelled()


async def test_a_lost_switchboard_stops_no_request_so_what_was_ready_stays_so():
    encoder = StageStatus("encoder", 1, ("encoder=torch",), ())
    operation = Operation(Handle((), (encoder,), ActorDiedError(), ActorDiedError(), ()), "tiny/1")
    assert not (await operation.readiness()).ready, "no replica has reported yet"
    assert (await operation.readiness()).stages[0].detail == "encoder=torch"
    assert (await operation.readiness()).ready, "the switchboard is away"
    assert not (await operation.readiness()).ready, "it is back, and no replica reports"
