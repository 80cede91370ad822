"""When a gateway says that it is ready, and what it says of switches and erasures, by what the switchboard answers."""

from types import SimpleNamespace

import pytest

from cluster.engines.snapshots import StageSnapshot
from cluster.errors import BackendUnavailable
from cluster.fleet.switchboard import StageStatus, Switchboard
from deployments.admin_api import AdminApi
from deployments.fleet.switchboard import TTL_S, SwitchboardDeployment
from tests.fakes.clock import Clock
from tests.fakes.handles import NEVER, Handle, ScriptedHandle

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
@pytest.mark.parametrize("call", ["forget", "drop_answers"])
async def test_an_erasure_that_the_switchboard_has_taken_is_not_everywhere_while_it_does_not_say_so(call):
    """Serve's controller may keep it waiting for longer than a gateway waits for it."""

    def erase(*answers):
        return getattr(AdminApi(ScriptedHandle(*answers), lambda: None), call)("default", "ada")

    number = 7
    assert not await erase(number, NEVER, NEVER)
    assert await erase(number, NEVER, True), "it is asked again"
    with pytest.raises(BackendUnavailable, match="answered within 2 s"):
        await erase(NEVER)
