"""When a gateway says that it is ready, and what it says of switches and erasures, by what the switchboard answers."""

import asyncio
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from cluster.engines.snapshots import StageSnapshot
from cluster.errors import BackendUnavailable
from cluster.fleet.switchboard import StageStatus, Switchboard
from deployments.admin_api import HELD_S, AdminApi
from deployments.fleet.switchboard import TTL_S, SwitchboardDeployment
from tests.fakes.clock import Clock
from tests.fakes.handles import NEVER, Handle, ScriptedHandle
from tests.waiting import settled

ENCODER = StageStatus("encoder", 1, ("encoder=torch",), ())
SERVED_BY_TORCH = StageStatus("generator", 1, ("generator=torch_beam (vllm: is being loaded)",), (), settled=False)
SERVED_BY_VLLM = StageStatus("generator", 1, ("generator=vllm",), ())


class Rig:
    """An operator's side of a model that has a decoder, or has none, beside a switchboard that shows what a test has it show."""

    def __init__(self, decoder: str | None = None) -> None:
        self.handle = Handle(None)
        bundle = SimpleNamespace(version="tiny/1", manifest=SimpleNamespace(stages=("encoder", "generator") if decoder else ("encoder",)))
        self.operation = AdminApi(self.handle, lambda: bundle)

    async def ready(self, *statuses: StageStatus) -> bool:
        self.handle.replica = SimpleNamespace(status=lambda: statuses, once_settled=frozenset, settled=lambda: True)
        return (await self.operation.readiness()).ready

    async def ready_without_a_switchboard(self) -> bool:
        self.handle.replica = None
        return (await self.operation.readiness()).ready


async def test_it_is_ready_once_the_first_choice_is_loaded_and_stays_so_while_it_is_loaded_anew():
    rig = Rig(decoder="fake")
    assert not await rig.ready(ENCODER)
    assert not await rig.ready(ENCODER, SERVED_BY_TORCH)
    assert await rig.ready(ENCODER, SERVED_BY_VLLM)
    assert await rig.ready(ENCODER, SERVED_BY_TORCH)
    assert await rig.ready(ENCODER), "retrieved items are the answer while there is no generator"
    assert await rig.ready_without_a_switchboard(), "a lost switchboard stops no request"
    assert not await rig.ready(SERVED_BY_VLLM), "without an encoder there is little to answer with"


async def test_a_gateway_that_starts_while_the_generator_is_scaled_to_zero_is_ready_where_it_was_there_before():
    rig, board = Rig(decoder="fake"), Switchboard(ttl_s=5.0)
    rig.handle.replica = SimpleNamespace(status=lambda: board.status(now=60), once_settled=lambda: board.once_settled)
    board.report("encoder", "a", StageSnapshot("encoder", "encoder=torch", ()), 0, {}, now=60)
    assert not (await rig.operation.readiness()).ready, "it may still be loading"
    board.report("generator", "b", StageSnapshot("generator", "generator=vllm", ()), 0, {}, now=1)
    said = await rig.operation.readiness()
    assert (said.ready, {one.stage: one.ready for one in said.stages}) == (True, {"encoder": True, "generator": False})


async def test_a_gateway_that_was_ready_stays_so_until_a_fresh_switchboard_has_had_the_time_to_hear_of_encoders(tmp_path):
    rig, new, clock = Rig(), Rig(), Clock(60.0)
    assert await rig.ready(ENCODER)
    rig.handle.replica = new.handle.replica = SwitchboardDeployment({"model_dir": str(tmp_path)}, clock)
    said = await rig.operation.readiness()
    assert (said.ready, said.stages[0].ready) == (True, True)
    assert not (await new.operation.readiness()).ready, "it knows of no encoder"
    clock.advance(TTL_S + 1)
    assert not (await rig.operation.readiness()).ready
    assert await rig.ready(ENCODER)


async def test_a_model_without_a_decoder_waits_for_no_generator():
    assert await Rig().ready(ENCODER)
    assert await Rig().ready(ENCODER, SERVED_BY_TORCH)


@pytest.mark.virtual_time
@pytest.mark.parametrize(("call", "turn"), [("forget", (ExitStack(),)), ("drop_answers", ())], ids=["forget", "drop_answers"])
async def test_an_erasure_that_the_switchboard_has_taken_is_not_everywhere_while_it_does_not_say_so(call, turn):
    """Serve's controller may keep it waiting for longer than a gateway waits for it."""

    async def erase(*answers):
        operation = AdminApi(ScriptedHandle(*answers), lambda: None)
        try:
            return await getattr(operation, call)("default", "ada", *turn)
        finally:
            await operation.close()

    number = 7
    assert not await erase(number, NEVER, NEVER)
    assert await erase(number, NEVER, True), "it is asked again"
    with pytest.raises(BackendUnavailable, match="answered within 2 s"):
        await erase(NEVER)


def told_turn() -> tuple[ExitStack, list[ExitStack]]:
    """A caller's turn, and the list in which it is once it has ended."""
    turn, ended = ExitStack(), list[ExitStack]()
    turn.callback(ended.append, turn)
    return turn, ended


class Follows:
    """A switchboard that takes erasures, numbers them from 1 on, and knows which of them are followed: those up to `reached`."""

    def __init__(self):
        self.last, self.reached, self.asked = 0, 0, 0

    async def erase(self, tenant, user):
        self.last += 1
        return self.last

    async def erased(self, number):
        self.asked += 1
        return number <= self.reached


@pytest.mark.virtual_time
@pytest.mark.parametrize("stays", [True, False])
async def test_a_callers_turn_lasts_until_its_erasure_is_followed_though_the_caller_has_left_or_been_answered(stays):
    board, turns = Follows(), [ExitStack() for _ in range(20)]
    ended = []
    for turn in turns:
        turn.callback(ended.append, turn)
    operation = AdminApi(Handle(board), lambda: None)
    calls = [asyncio.create_task(operation.forget("default", f"user-{place}", turn)) for place, turn in enumerate(turns)]
    await settled()
    for call in calls if not stays else ():
        call.cancel()
    await asyncio.sleep(600)
    assert [call.cancelled() or call.result() for call in calls] == [not stays] * 20, "it is not everywhere"
    assert (board.last, len(ended), board.asked) == (20, 0, pytest.approx(6000, rel=0.05)), "one asks for all of them"
    board.reached = 15
    await asyncio.sleep(1)
    assert len(ended) == 15
    board.reached = 20
    await asyncio.sleep(1)
    asked = board.asked
    await asyncio.sleep(60)
    assert (len(ended), board.asked) == (20, asked)
    await operation.close()


@pytest.mark.virtual_time
async def test_a_callers_turn_is_over_in_time_though_the_switchboard_never_counts_so_far():
    turn, ended = told_turn()
    operation = AdminApi(Handle(board := Follows()), lambda: None)
    assert not await operation.forget("default", "ada", turn)
    await asyncio.sleep(HELD_S - 10)
    assert not ended
    await asyncio.sleep(20)
    asked = board.asked
    await asyncio.sleep(60)
    assert (len(ended), board.asked) == (1, asked)
    await operation.close()


@pytest.mark.virtual_time
async def test_a_callers_turn_is_over_where_the_switchboard_does_not_take_its_erasure():
    turn, ended = told_turn()
    with pytest.raises(BackendUnavailable):
        await AdminApi(ScriptedHandle(NEVER), lambda: None).forget("default", "ada", turn)
    assert len(ended) == 1
