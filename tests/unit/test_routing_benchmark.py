"""The cluster with a fake clock that routing is measured on, and what is read from the notes of a real one."""

import json

import pytest

from benchmarks.routing import moved
from benchmarks.routing_live import Notes, Phase
from benchmarks.simulated_routing import Simulation, World, simulate
from cluster.traffic.user_router import in_order_of

SMALL = World(gateways=2, replicas=3, users=60, rate=150.0, seconds=6.0, room=2.0)
HOMES = [f"encoder-{number}" for number in range(SMALL.replicas)]


def slow_down(cluster: Simulation) -> None:
    cluster.replicas[0].slower = 10.0


def share_of(outcome, replica: str, since_s: float) -> float:
    replicas = [one for one, began in zip(outcome.replicas, outcome.began_s, strict=True) if began >= since_s]
    return replicas.count(replica) / len(replicas)


def test_in_a_calm_cluster_every_request_finds_its_users_states_at_home():
    outcome = simulate(SMALL)
    assert len(outcome.took_s) > 500
    assert outcome.failed == 0
    assert outcome.home_share(HOMES) == outcome.kept_share() == 1.0


@pytest.mark.parametrize(("gateways", "replicas"), [(1, 2), (8, 2), (2, 4)])
@pytest.mark.parametrize("seed", range(2))
def test_in_a_calm_small_cluster_new_users_make_no_replica_slow_and_one_that_is_slow_is_found(gateways, replicas, seed):
    world = World(gateways=gateways, replicas=replicas, rate=60.0 * replicas, seconds=12.0, seed=seed)
    calm = simulate(world)
    assert 0.5 < calm.kept_share() < 0.95
    assert calm.home_share([f"encoder-{number}" for number in range(replicas)]) > 0.99
    assert share_of(simulate(world, {8.0: slow_down}), "encoder-0", since_s=10.0) < 0.1 < share_of(calm, "encoder-0", since_s=10.0)


def test_a_slow_replica_is_left_out_after_a_few_answers_and_only_its_users_move():
    outcome = simulate(SMALL, {2.0: slow_down})
    assert outcome.failed == 0
    assert share_of(outcome, "encoder-0", since_s=3.0) < 0.02 < share_of(simulate(SMALL), "encoder-0", since_s=3.0)
    homes = {user: in_order_of(user, HOMES)[0] for user in set(outcome.users)}
    assert {homes[user] for user, replica in zip(outcome.users, outcome.replicas, strict=True) if replica != homes[user]} == {"encoder-0"}


def test_replicas_that_are_added_take_their_share_though_they_compute_everything_anew():
    outcome = simulate(SMALL, {2.0: lambda cluster: cluster.add(1)})
    assert outcome.failed == 0
    assert outcome.home_share([*HOMES, "encoder-3"]) > outcome.home_share(HOMES)
    assert share_of(outcome, "encoder-3", since_s=2.0) == pytest.approx(0.25, abs=0.1)


def test_a_run_is_the_same_again_from_the_same_seed():
    assert simulate(SMALL).took_s == simulate(SMALL).took_s


@pytest.mark.parametrize("gateways", [1, 4])
def test_users_of_a_home_that_is_overrun_go_elsewhere_while_others_idle(gateways):
    """A call carries so many requests that few calls overrun it. No slow replica is left out, which would relieve it, too."""
    crowd = World(gateways=gateways, replicas=4, users=60, rate=4000.0, seconds=0.5, hottest=0.9, options={"slow_times": 0})
    outcome = simulate(crowd)
    assert outcome.failed == 0
    assert outcome.busiest() < 3 < 0.9 * crowd.replicas, "the mean is a quarter, and the crowd's home has nine tenths of the users"


def test_a_hot_user_makes_one_replica_the_busiest():
    assert simulate(World(gateways=2, replicas=4, users=60, rate=150.0, seconds=4.0, hottest=0.5)).busiest() > 1.5


def test_one_replica_more_moves_about_its_share_of_the_users():
    assert moved(users=2000, replicas=8) == pytest.approx(1 / 9, rel=0.2)


def test_a_phase_has_what_the_engines_noted_since_the_phase_before(tmp_path):
    replicas, notes = ("a", "b"), Notes(tmp_path)
    home, other = in_order_of("red/1", replicas)

    def note(replica: str, users: list[str], hits: int, misses: int) -> None:
        with (tmp_path / f"noted-{replica}").open("a") as file:
            file.write(json.dumps({"users": users, "hits": hits, "misses": misses}) + "\n")

    note(home, ["", ""], 0, 2)
    notes.into(Phase("warm-up"))
    note(home, ["red/1", "red/1", "red/1"], 2, 1)
    note(other, ["red/1"], 0, 1)
    phase = Phase("calm")
    notes.into(phase)
    assert (phase.at_home(replicas), phase.share_of(other), phase.hits, phase.lookups) == (0.75, 0.25, 2, 4)
