"""Calls between deployments, over a handle that behaves as Ray Serve's do."""

import asyncio
import pickle
from types import SimpleNamespace

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from msgspec.structs import replace
from ray.exceptions import ActorDiedError, RayError, RayTaskError
from ray.serve.exceptions import BackPressureError

from cluster.engines.skipped import passed_over
from cluster.errors import BackendFailed, BackendUnavailable, DeadlineExceeded, InvalidRequest, UnknownChoice
from cluster.few_lines import FewLines
from cluster.fleet.switchboard import StageStatus
from cluster.traffic.paces import KNOWN, LATEST, Paces
from cluster.traffic.retry_budget import RetryBudget
from cluster.values import EncodeRequest
from deployments.admin_api import AdminApi
from deployments.calls.remote import TRIES, StageCaller, ask
from tests.bundles import random_sequence
from tests.fakes.handles import NEVER, Raw, ScriptedHandle
from tests.waiting import settled

pytestmark = pytest.mark.virtual_time


def raised(cause: Exception) -> RayTaskError:
    return RayTaskError("encode", "the trace", cause)


OUT_OF_ROOM = AioRpcError(StatusCode.RESOURCE_EXHAUSTED, Metadata(), Metadata(), details="the message is too large")
as_raised = pytest.mark.parametrize("raised_as", [raised, Raw], ids=["ray", "grpc"])


async def test_a_replica_that_dies_with_a_call_costs_a_try():
    assert await ask(ScriptedHandle(ActorDiedError(), "answer"), "encode", within_s=1, tries=2) == "answer"
    with pytest.raises(BackendUnavailable, match="no replica of encoder could be reached"):
        await ask(ScriptedHandle(ActorDiedError(), ActorDiedError()), "encode", within_s=1, tries=2)


@as_raised
async def test_an_error_of_ours_comes_through_and_another_is_a_broken_backend(raised_as):
    with pytest.raises(UnknownChoice):
        await ask(ScriptedHandle(raised_as(UnknownChoice("encoder", "trt", ["torch"]))), "encode", within_s=1)
    with pytest.raises(BackendFailed, match="encoder raised ZeroDivisionError"):
        await ask(ScriptedHandle(raised_as(ZeroDivisionError("no"))), "encode", within_s=1)


async def test_a_connection_that_fails_is_a_replica_that_cannot_be_reached():
    with pytest.raises(BackendUnavailable, match="RESOURCE_EXHAUSTED: the message is too large"):
        await ask(ScriptedHandle(Raw(OUT_OF_ROOM)), "encode", within_s=1)
    asking, _ = caller([Raw(OUT_OF_ROOM)])
    with pytest.raises(BackendUnavailable, match="RESOURCE_EXHAUSTED"):
        await streamed(asking)


ADDRESS = "10.0.0.7:30001"
DIED = RayError(f"the actor 1f00 at {ADDRESS} has died")
REFUSED = Raw(AioRpcError(StatusCode.UNAVAILABLE, Metadata(), Metadata(), details=f"failed to connect to {ADDRESS}"))


@pytest.mark.parametrize("outcome", [DIED, REFUSED], ids=["ray", "grpc"])
async def test_where_a_replica_was_that_cannot_be_reached_is_told_to_operators_and_the_log_and_to_no_other_caller(
    outcome, monkeypatch, caplog
):
    monkeypatch.setattr("deployments.calls.remote._lines", {"encoder": FewLines(most=1, within_s=1e9)})
    with pytest.raises(BackendUnavailable, match=ADDRESS) as failed:
        await ask(ScriptedHandle(outcome), "encode", within_s=1)
    sent_on = pickle.loads(pickle.dumps(failed.value))
    assert passed_over("encoder", sent_on).reason == "no replica of encoder could be reached"
    served = SimpleNamespace(manifest=SimpleNamespace(stages=["encoder"]), version="m/1")
    ready = await AdminApi(ScriptedHandle(outcome, outcome), lambda: served).readiness()
    assert [one.detail for one in ready.stages] == ["no replica of encoder could be reached"]
    assert len([record for record in caplog.records if ADDRESS in record.getMessage()]) == 1, "not for each call"


@as_raised
async def test_what_a_replica_raised_is_told_by_its_kind(raised_as):
    with pytest.raises(BackendFailed) as failed:
        await ask(ScriptedHandle(raised_as(ConnectionRefusedError(ADDRESS))), "encode", within_s=1)
    assert str(failed.value) == "encoder raised ConnectionRefusedError; its log has the trace"


async def test_a_call_that_the_callee_cancelled_is_broken_and_cancels_no_caller():
    with pytest.raises(BackendFailed, match="encoder cancelled the call"):
        await ask(ScriptedHandle(Raw(asyncio.CancelledError())), "encode", within_s=1)
    for pieces in ([Raw(asyncio.CancelledError())], ["a", Raw(asyncio.CancelledError())]):
        asking, handle = caller(pieces)
        with pytest.raises(BackendFailed, match="encoder cancelled the call"):
            await streamed(asking)
        assert handle.responses[0].cancelled()


async def test_a_caller_that_is_cancelled_is_so_whatever_it_waits_for():
    for outcome, call in ((NEVER, lambda asking: asking.ask(REQUEST, within_s=10)), (["a", NEVER], streamed)):
        asking, handle = caller(outcome)
        waiting = asyncio.create_task(call(asking))
        await settled()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)
        assert handle.responses[0].cancelled()
        assert waiting.cancelled()


async def test_a_call_that_nobody_waits_for_any_more_is_cancelled():
    handle = ScriptedHandle(NEVER)
    with pytest.raises(BackendUnavailable, match=r"no replica of encoder answered within 0\.01 s"):
        await ask(handle, "encode", within_s=0.01)
    assert handle.responses[0].cancelled()
    handle = ScriptedHandle(NEVER)
    caller = asyncio.create_task(ask(handle, "encode", within_s=10))
    await asyncio.sleep(0.01)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert handle.responses[0].cancelled()


async def test_a_lost_switchboard_stops_no_request_so_what_was_ready_stays_so():
    encoder = StageStatus("encoder", 1, ("encoder=torch",), ())
    bundle = SimpleNamespace(version="tiny/1", manifest=SimpleNamespace(stages=("encoder",)))
    operation = AdminApi(ScriptedHandle((), (encoder,), ActorDiedError(), ActorDiedError(), (), False, (), True), lambda: bundle)
    assert not (await operation.readiness()).ready, "no replica has reported yet"
    assert (await operation.readiness()).stages[0].detail == "encoder=torch"
    assert (await operation.readiness()).ready, "the switchboard is away"
    assert (await operation.readiness()).ready, "it is back, and has not heard of all replicas"
    assert not (await operation.readiness()).ready, "it has had the time, and no replica reports"


REQUEST = EncodeRequest(random_sequence(3), 5, user_id="ada")
BROKEN = "what stands for an error"


def caller(*outcomes, repeatable=False):
    handle = ScriptedHandle(*outcomes)
    asking = StageCaller(handle, RetryBudget(least_per_s=100), repeatable=repeatable, poor=lambda answer: answer == BROKEN)
    return asking, handle


async def test_a_replica_is_told_the_time_that_is_left():
    asking, handle = caller(ActorDiedError(), "answer")
    assert await asking.ask(REQUEST, within_s=1) == "answer"
    (_, first), (_, second) = handle.calls
    assert second < first <= 1
    assert asking.figures == {"requests": 1, "copies": 1, "hedges": 0, "refused": 0}


async def test_a_replica_that_is_stopped_does_not_keep_a_request_waiting_while_another_answers():
    asking, handle = caller(NEVER, "answer")
    assert await asking.ask(REQUEST, within_s=0.1) == "answer"
    await asyncio.sleep(0)
    assert handle.responses[0].cancelled()


async def test_a_copy_says_that_it_is_one_so_that_no_router_brings_it_home_to_the_stopped_replica():
    asking, handle = caller(NEVER, "answer")
    await asking.ask(REQUEST, within_s=0.1)
    assert [(request.user_id, request.attempt) for request, _ in handle.calls] == [("ada", 0), ("ada", 1)]


@pytest.mark.parametrize(
    "broken",
    [
        raised(ZeroDivisionError("no")),
        raised(BackendFailed("it broke")),
        Raw(ZeroDivisionError("no")),
        Raw(BackendFailed("it broke")),
        Raw(asyncio.CancelledError()),
    ],
    ids=["bug", "engine", "bug by gRPC", "engine by gRPC", "cancelled by gRPC"],
)
async def test_what_only_computes_is_asked_of_another_replica_and_what_may_break_it_too_is_not(broken):
    asking, _ = caller(broken, "answer", repeatable=True)
    assert await asking.ask(REQUEST, within_s=1) == "answer"
    asking, handle = caller(broken, "answer")
    with pytest.raises(BackendFailed):
        await asking.ask(REQUEST, within_s=1)
    assert len(handle.calls) == 1


@pytest.mark.parametrize("repeatable", [True, False])
async def test_a_poor_answer_is_bettered_by_another_replica(repeatable):
    asking, _ = caller(BROKEN, "answer", repeatable=repeatable)
    assert await asking.ask(REQUEST, within_s=1) == "answer"


@pytest.mark.parametrize(("asked", "slow"), [(["quick"], set()), (["quick", "other"], {"usual"})], ids=["once", "with a copy"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_replica_that_refuses_at_once_is_no_yardstick_for_the_pace_of_others(stream, asked, slow):
    paces = Paces()
    paces.keep(["usual", "quick"], 0.0)
    for _ in range(KNOWN):
        paces.answered("quick", 0.002, 0.0)
    request = replace(REQUEST, asked=asked)
    if stream:
        asking, _ = caller([BROKEN], ["answer"])
        assert [piece async for piece in asking.ask_stream(request, within_s=5)] == ["answer"]
    else:
        asking, _ = caller(BROKEN, "answer")
        assert await asking.ask(request, within_s=1) == "answer"
    paces.answered("quick", 0.002, 0.0)
    for _ in range(2 * LATEST):
        paces.answered("usual", 0.02, 0.0)
    assert paces.slow(0.0) == slow


@as_raised
async def test_a_request_that_is_wrong_is_wrong_everywhere(raised_as):
    asking, handle = caller(raised_as(InvalidRequest("k", "is wrong")), "answer", repeatable=True)
    with pytest.raises(InvalidRequest):
        await asking.ask(REQUEST, within_s=1)
    assert len(handle.calls) == 1


@as_raised
async def test_what_was_too_late_at_one_replica_is_so_at_all(raised_as):
    asking, handle = caller(raised_as(DeadlineExceeded("too late")), "answer", repeatable=True)
    with pytest.raises(DeadlineExceeded):
        await asking.ask(REQUEST, within_s=1)
    assert len(handle.calls) == 1


async def test_a_repeatable_call_is_repeated_after_a_connection_that_failed_and_not_after_serve_refused_it():
    asking, _ = caller(Raw(OUT_OF_ROOM), "answer", repeatable=True)
    assert await asking.ask(REQUEST, within_s=1) == "answer"
    asking, handle = caller(Raw(BackPressureError(1, 1)), "answer", repeatable=True)
    with pytest.raises(BackendUnavailable):
        await asking.ask(REQUEST, within_s=1)
    assert len(handle.calls) == 1


async def test_where_every_replica_gives_a_poor_answer_that_is_the_answer():
    asking, _ = caller(*[BROKEN] * TRIES, repeatable=True)
    assert await asking.ask(REQUEST, within_s=1) == BROKEN


async def test_replicas_that_all_die_are_an_error_of_ours():
    asking, _ = caller(*[ActorDiedError()] * TRIES)
    with pytest.raises(BackendUnavailable, match="no replica of encoder could be reached"):
        await asking.ask(REQUEST, within_s=1)


async def streamed(asking, **more):
    return [piece async for piece in asking.ask_stream(REQUEST, **{"within_s": 5, **more})]


async def test_a_stream_comes_piece_by_piece_and_an_empty_one_ends():
    asking, handle = caller(["a", "b"])
    assert await streamed(asking) == ["a", "b"]
    assert handle.responses[0].cancelled()
    asking, _ = caller([])
    assert await streamed(asking) == []


@pytest.mark.parametrize("first", [ActorDiedError(), NEVER], ids=["died", "stopped"])
async def test_a_stream_that_has_not_begun_is_begun_by_another_replica(first):
    asking, handle = caller([first, "never"], ["a", "b"])
    assert await streamed(asking, within_s=0.2) == ["a", "b"]
    await asyncio.sleep(0)
    assert all(response.cancelled() for response in handle.responses)


async def test_a_stream_that_breaks_off_is_not_begun_again():
    asking, handle = caller(["a", ActorDiedError()], ["a", "b"])
    with pytest.raises(BackendUnavailable):
        await streamed(asking)
    assert len(handle.calls) == 1
