"""Which processes live: told by Serve and not by their silence, and by a clock that no step of the system's changes."""

import pytest

from cluster.errors import BackendUnavailable
from cluster.fleet.board import READY, Presence
from cluster.fleet.clock import steady
from cluster.fleet.erasures import NO_PLACE
from cluster.fleet.heartbeat import Report
from deployments.fleet.processes import listed, processes
from deployments.fleet.switchboard import ASK_INTERVAL_S, TTL_S, SwitchboardDeployment
from tests.fakes.clock import Clock
from tests.fakes.processes import only

NOW = 1_760_000_000.0


async def heard_of(board: SwitchboardDeployment, *names: str) -> None:
    """The board hears of these gateways, which have carried out all that they know of."""
    for name in names:
        place = (await board.beat(name, Report(), 0, 0.0)).erasures.place
        await board.beat(name, Report({f"gateway/{name}": Presence("gateway", {1: READY})}, place=place), 0, 0.0)


@pytest.mark.parametrize("silent_s", [TTL_S + 1, 3600.0])
async def test_an_erasure_is_not_everywhere_while_a_process_is_stopped_however_long(tmp_path, silent_s):
    clock, lives = Clock(NOW), {"stopped": True, "alive": True}

    async def live():
        return dict(lives)

    board = SwitchboardDeployment({"model_dir": str(tmp_path)}, clock, live)
    await heard_of(board, *lives)
    number = await board.erase("default", "ada")
    await heard_of(board, "alive")
    clock.advance(silent_s)
    assert not await board.erased(number)
    del lives["stopped"]
    clock.advance(ASK_INTERVAL_S)
    assert await board.erased(number), "Serve has ended it"


async def test_while_serve_does_not_say_which_processes_live_no_erasure_is_everywhere(tmp_path, caplog):
    clock = Clock(NOW)
    board = SwitchboardDeployment({"model_dir": str(tmp_path)}, clock)
    await heard_of(board, "a")
    number = await board.erase("default", "ada")
    await heard_of(board, "a")
    clock.advance(3600)
    assert not await board.erased(number)
    assert "whether erasures have reached every process is not known: Serve's controller does not say" in caplog.text
    with pytest.raises(BackendUnavailable, match="may only be called from within a Ray Serve deployment"):
        await processes()


async def test_serve_is_asked_again_only_after_a_while(tmp_path):
    clock, asked = Clock(NOW), []

    async def live():
        asked.append(clock())
        return {"a": True}

    board = SwitchboardDeployment({"model_dir": str(tmp_path)}, clock, live)
    number = await board.erase("default", "ada")
    for _ in range(10):
        assert not await board.erased(number)
        clock.advance(ASK_INTERVAL_S / 4)
    assert asked == [NOW, NOW + ASK_INTERVAL_S, NOW + 2 * ASK_INTERVAL_S]


def test_a_replica_lives_that_serve_lists_and_whose_actor_is_there():
    replicas = [
        {"replica_id": "serves", "state": "RUNNING", "actor_name": "encoder#serves"},
        {"replica_id": "ends", "state": "STOPPING", "actor_name": "encoder#ends"},
        {"replica_id": "loads", "state": "STARTING", "actor_name": "encoder#loads"},
        {"replica_id": "died", "state": "RUNNING", "actor_name": "encoder#died"},
    ]
    door = [{"replica_id": "door", "state": "RUNNING", "actor_name": "zeromq#door"}]
    application = {"deployments": {"encoder": {"replicas": replicas}, "zeromq": {"replicas": door}}}
    actors = {"encoder#serves", "encoder#ends", "encoder#loads", "zeromq#door", "of another"}
    assert listed(application, actors) == {"serves": True, "ends": True, "loads": False, "door": False}
    assert listed({}, actors) == {}


async def test_a_step_of_the_systems_clock_empties_no_board(tmp_path):
    day, running = Clock(NOW), Clock(7.0)
    board = SwitchboardDeployment({"model_dir": str(tmp_path)}, steady(day, running), only("a", "b"))
    await heard_of(board, "a", "b")
    for step_s in (3600.0, -7200.0):
        day.advance(step_s)
        running.advance(1.0)
        assert (await board.beat("a", Report(place=NO_PLACE), 0, 0.0)).fleet.gateways == 2
    running.advance(TTL_S + 1)
    assert (await board.beat("c", Report(), 0, 0.0)).fleet.gateways == 1, "at least one, but those that are silent count no more"


def test_the_clock_begins_at_the_time_of_day_and_goes_on_by_itself():
    day, running = Clock(NOW), Clock(7.0)
    clock = steady(day, running)
    day.advance(-1e6)
    running.advance(2.5)
    assert clock() == NOW + 2.5
