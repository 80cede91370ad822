"""How many replicas are wanted: the policy by itself, with a clock that the tests set, and behind Serve's own delays."""

import subprocess
import sys
from itertools import pairwise
from math import ceil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.autoscaling_policy import _core_replica_queue_length_policy
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from benchmarks.autoscaling import POLICIES, QUICK, TO_ZERO, arrivals, rare, settings, step
from benchmarks.simulated_serve import Simulation
from cluster.autoscaling import MEMORY, QueuePolicy

ROOT = Path(__file__).resolve().parents[2]
TARGET = 10.0
LOADS = st.lists(st.floats(0, 400), min_size=1, max_size=60)


class Deployment:
    """Follows the policy at once: what it wants is there the next second."""

    def __init__(self, policy: QueuePolicy, at_least: int = 1, at_most: int = 20, replicas: int | None = None) -> None:
        self.policy, self.at_least, self.at_most = policy, at_least, at_most
        self.now, self.state, self.wanted = 1000.0, {}, [at_least if replicas is None else replicas]

    def tick(self, calls: float = 0.0, seconds: float = 1.0, **figures: float) -> int:
        self.now += seconds
        running = self.wanted[-1]
        wanted, self.state = self.policy(self.context(calls, running, running, {name: {"a": value} for name, value in figures.items()}))
        self.wanted.append(wanted)
        return wanted

    def context(self, calls: float, running: int, target: int, figures=None):
        return SimpleNamespace(
            current_time=self.now,
            policy_state=self.state,
            current_num_replicas=running,
            target_num_replicas=target,
            total_num_requests=calls,
            aggregated_metrics=figures,
            capacity_adjusted_min_replicas=self.at_least,
            capacity_adjusted_max_replicas=self.at_most,
            config=SimpleNamespace(get_target_ongoing_requests=lambda: TARGET),
        )

    @property
    def turns(self) -> int:
        ups = [after > before for before, after in pairwise(self.wanted) if before != after]
        return sum(one != other for one, other in pairwise(ups))


OPTIONS = st.builds(
    QueuePolicy,
    down_after_s=st.floats(0, 30),
    band=st.floats(0, 1),
    idle_s=st.floats(0, 30),
    forecast_s=st.floats(0, 30),
    target_utilisation=st.none() | st.floats(0.1, 1),
    target_latency_ms=st.none() | st.floats(1, 500),
)


@given(OPTIONS, LOADS, st.integers(0, 3), st.integers(3, 9))
def test_the_replicas_are_always_within_the_bounds(policy, loads, at_least, at_most):
    deployment = Deployment(policy, at_least, at_most, replicas=3)
    for load in loads:
        deployment.tick(load, utilisation=load / 400, latency_ms=load)
    assert all(at_least <= wanted <= at_most for wanted in deployment.wanted)


@given(OPTIONS, LOADS, st.floats(0, 400), st.floats(0, 400))
def test_more_requests_never_want_fewer_replicas(policy, loads, one, other):
    deployment = Deployment(policy, 0, 50, replicas=3)
    for load in loads:
        deployment.tick(load)
    deployment.now, running = deployment.now + 1, deployment.wanted[-1] or 1
    fewer, more = (policy(deployment.context(requests, running, running))[0] for requests in sorted((one, other)))
    assert fewer <= more


@given(st.floats(5, 300), st.floats(0, 0.3), st.integers(0, 2**32), st.integers(1, 20))
def test_a_constant_load_with_noise_turns_the_direction_once_at_most(load, noise, seed, replicas):
    """What comes down from too many, or goes up from too few, stays where it arrives, as the band is wider than the noise."""
    deployment = Deployment(QueuePolicy(down_after_s=10, band=2 * noise / (1 - noise) + 0.01), at_most=100, replicas=replicas)
    for factor in np.random.default_rng(seed).uniform(1 - noise, 1 + noise, 300):
        deployment.tick(load * factor)
    enough = ceil(load * (1 - noise) / TARGET - 1e-6)
    assert deployment.wanted[-1] >= enough
    assert deployment.turns <= 1
    steps = [after > before for before, after in pairwise(deployment.wanted) if before != after]
    assert steps == sorted(steps), "down first, and after a step up never down again"


@given(st.integers(0, 2**32))
def test_a_forecast_does_not_make_noise_a_trend(seed):
    deployment = Deployment(QueuePolicy(down_after_s=30, band=0.6, forecast_s=10), at_most=100, replicas=10)
    for factor in np.random.default_rng(seed).uniform(0.85, 1.15, 400):
        deployment.tick(100.0 * factor)
    assert deployment.turns == 0


@given(OPTIONS, st.lists(st.floats(0, 3), min_size=1, max_size=80))
def test_zero_is_wanted_only_when_nothing_was_asked_for_long(policy, loads):
    deployment, quiet = Deployment(policy, at_least=0, replicas=1), 0.0
    for load in loads:
        quiet = quiet + 1.0 if load == 0 else 0.0
        assert deployment.tick(load) > 0 or quiet >= policy.idle_s or deployment.wanted[-2] == 0


def test_it_goes_up_at_once_and_as_far_as_the_load_says():
    deployment = Deployment(QueuePolicy())
    assert [deployment.tick(load) for load in (4, 10, 10.1, 75, 1000)] == [1, 1, 2, 8, 20]


def test_it_goes_down_only_after_the_load_has_been_lower_for_a_while_and_keeps_some_room():
    deployment = Deployment(QueuePolicy(down_after_s=30, band=0.25))
    deployment.tick(80)
    assert [deployment.tick(40) for _ in range(29)] == [8] * 29
    assert deployment.tick(40) == 5, "4 replicas, and a quarter"
    assert [deployment.tick(load) for load in [40] * 20 + [10] * 29] == [5] * 49
    assert deployment.tick(10) == 2


def test_a_clock_that_is_set_back_holds_no_replica_for_as_long():
    deployment = Deployment(QueuePolicy(down_after_s=20, forecast_s=10))
    for second in range(30):
        deployment.tick(5.0 * second)
    deployment.now -= 86_400
    for _ in range(60):
        deployment.tick(5)
    assert deployment.wanted[-1] == 1
    assert deployment.tick(80) == 8


@pytest.mark.parametrize("seconds", [60, 86_400], ids=["the controller stalls", "the clock is set forward"])
def test_a_leap_of_the_time_alone_costs_no_replica(seconds):
    """At the first look afterwards, nothing happens to be under way."""
    deployment = Deployment(QueuePolicy(down_after_s=20, idle_s=30), at_least=0, replicas=4)
    for _ in range(30):
        deployment.tick(40)
    deployment.now += seconds
    assert [deployment.tick(load) for load in [0] * 3 + [40] * 10] == [4] * 13
    assert [deployment.tick(0) for _ in range(60)][-1] == 0, "it goes down as ever once nothing is asked for"


def test_a_short_pause_in_the_load_costs_no_replica():
    deployment = Deployment(QueuePolicy(down_after_s=30))
    assert {deployment.tick(load) for load in [80] * 5 + [0] * 25 + [80] * 5 + [0] * 25 + [80] * 5} == {8}


@pytest.mark.parametrize(
    ("figures", "wanted"),
    [
        ({}, 1),
        ({"waiting": 192.0}, 3),
        ({"waiting": 128.0, "kv_cache_usage": 2.4}, 3),
        ({"utilisation": 2.8}, 4),
        ({"requests": 70.0}, 7),
        ({"a figure it does not know": 1e9}, 1),
    ],
)
def test_the_figure_that_is_furthest_above_its_target_counts(figures, wanted):
    assert Deployment(QueuePolicy(target_utilisation=0.7)).tick(5, **figures) == wanted


def test_requests_that_go_together_in_few_calls_count_each_and_their_trend_is_seen():
    """The calls of a few gateways are as many whatever the load."""
    deployment = Deployment(QueuePolicy(forecast_s=10))
    for second in range(30):
        deployment.tick(4, requests=2.0 * second)
    assert deployment.wanted[-1] > 6, "58 requests, and more to come"


def test_requests_in_calls_of_many_count_where_latency_is_judged():
    deployment = Deployment(QueuePolicy(target_latency_ms=100, settle_s=5), at_most=2, replicas=2)
    for _ in range(60):
        deployment.tick(1, requests=200.0, latency_ms=900)
    assert deployment.state[MEMORY].limit.requests == TARGET, "they are slow because they are many"


def test_a_figure_without_a_target_does_not_count():
    assert (
        Deployment(QueuePolicy(target_waiting=None, target_kv_cache_usage=None)).tick(5, waiting=1e9, kv_cache_usage=9, utilisation=9) == 1
    )


def test_a_latency_above_its_target_lowers_what_a_replica_may_have_and_that_is_remembered():
    deployment = Deployment(QueuePolicy(target_latency_ms=100, settle_s=5, down_after_s=10), replicas=2)
    for _ in range(4):
        assert deployment.tick(16, latency_ms=150) == 2, "the replicas are too new to judge them"
    for _ in range(3):
        deployment.tick(16, latency_ms=150)
    assert deployment.wanted[-1] == 3, "8 each were 1.5 times too slow: at most 5.3 each"
    assert {deployment.tick(16, latency_ms=60) for _ in range(40)} == {3}, "good as it is now, with two it would be bad again"
    for _ in range(20):
        deployment.tick(2, latency_ms=60)
    assert deployment.wanted[-1] == 1


@pytest.mark.parametrize("seconds", [12, -86_400], ids=["the controller stalls", "the clock is set back"])
def test_what_a_latency_has_taught_outlasts_a_leap_of_the_time(seconds):
    deployment = Deployment(QueuePolicy(target_latency_ms=100, settle_s=5, down_after_s=10), replicas=2)
    for _ in range(7):
        deployment.tick(16, latency_ms=150)
    assert deployment.wanted[-1] == 3
    deployment.now += seconds
    assert {deployment.tick(16, latency_ms=60) for _ in range(40)} == {3}
    for _ in range(20):
        deployment.tick(2, latency_ms=60)
    assert deployment.wanted[-1] == 1, "it goes down as ever"


def test_a_replica_that_comes_after_eight_days_at_zero_may_have_as_many_requests_as_before_any_latency():
    deployment = Deployment(QueuePolicy(target_latency_ms=100, settle_s=5, idle_s=20), at_least=0, replicas=2)
    for _ in range(7):
        deployment.tick(16, latency_ms=150)
    assert deployment.state[MEMORY].limit.requests < TARGET
    deployment.wanted.append(0)
    for _ in range(8 * 86_400 // 10):
        deployment.now += 10
        _, deployment.state = deployment.policy(deployment.context(0.0, running=0, target=0))
    deployment.wanted.append(1)
    assert deployment.tick(2) == 1
    assert deployment.state[MEMORY].limit.requests == TARGET


def test_a_latency_that_comes_of_too_many_requests_asks_for_nothing_more():
    """It says nothing of a replica with as many as it should have."""
    deployment = Deployment(QueuePolicy(target_latency_ms=100, settle_s=5), at_most=2, replicas=2)
    for _ in range(60):
        deployment.tick(100, latency_ms=900)
    assert deployment.state[MEMORY].limit.requests == TARGET


@pytest.mark.parametrize("requests", [0, 1 / 60])
def test_calls_so_brief_that_hardly_one_is_counted_say_nothing_of_how_many_a_replica_may_have(requests):
    deployment = Deployment(QueuePolicy(target_latency_ms=4, settle_s=5))
    for _ in range(6000):
        deployment.tick(requests, latency_ms=5)
    assert deployment.state[MEMORY].limit.requests == TARGET
    assert [deployment.tick(2, latency_ms=5) for _ in range(3)] == [1, 1, 1]


def test_a_forecast_starts_replicas_before_a_ramp_needs_them_and_is_bounded():
    """At 10 replicas for a load of 80, a replica that takes 10 s to start must have been wanted when the load was 70."""
    ahead, without = (Deployment(QueuePolicy(forecast_s=forecast_s)) for forecast_s in (10, 0))
    for load in range(100):
        ahead.tick(load)
        without.tick(load)
    led = [one - other for one, other in zip(ahead.wanted, without.wanted, strict=True)]
    assert min(led) == 0
    assert max(led[50:]) == 1
    assert ahead.tick(1e-9) <= 11


def test_one_wild_sample_is_no_trend():
    deployment = Deployment(QueuePolicy(forecast_s=60, down_after_s=0), at_most=100)
    for load in [20.0] * 60 + [200.0] + [20.0] * 3:
        deployment.tick(load)
    assert deployment.wanted[-1] <= 3


def test_it_goes_to_zero_after_the_idle_time_and_not_while_engines_compute_what_is_not_counted():
    policy = QueuePolicy(idle_s=20, down_after_s=5)
    idle, computing, asked = (Deployment(policy, 0, replicas=1) for _ in range(3))
    needed = Deployment(policy, 1)
    assert [idle.tick() for _ in range(21)] == [1] * 20 + [0]
    assert {computing.tick(utilisation=0.01) for _ in range(60)} == {1}
    assert {asked.tick(utilisation=0.0, latency_ms=40) for _ in range(60)} == {1}, "an engine in another process has no utilisation"
    assert {needed.tick() for _ in range(60)} == {1}, "min_replicas is 1"


def test_a_replica_that_was_started_from_zero_is_given_time():
    deployment = Deployment(QueuePolicy(idle_s=20), at_least=0)
    deployment.now += 1
    starting, deployment.state = deployment.policy(deployment.context(0.0, running=0, target=1))
    assert starting == 1
    deployment.wanted.append(1)
    assert [deployment.tick() for _ in range(20)] == [1] * 20


@pytest.mark.parametrize(
    "wrong",
    [
        {"band": -1},
        {"idle_s": float("inf")},
        {"target_latency_ms": 0},
        {"trend_s": 0},
        {"trend_s": float("inf")},
        {"down_after_s": float("nan")},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        QueuePolicy(**wrong)


def test_serves_controller_can_make_and_run_it_without_genrec(tmp_path: Path):
    policy = AutoscalingPolicy(policy_function="cluster.autoscaling:QueuePolicy", policy_kwargs={"forecast_s": 10})
    (tmp_path / "policy.pickle").write_bytes(policy.get_serialized_policy_def())
    code = """if True:
        import pickle, sys
        from types import SimpleNamespace as Given
        policy = pickle.load(open('policy.pickle', 'rb'))(forecast_s=10)
        given = dict(current_num_replicas=1, target_num_replicas=1, total_num_requests=30.0,
                     aggregated_metrics={'waiting': {'a': 320.0}}, capacity_adjusted_min_replicas=1,
                     capacity_adjusted_max_replicas=9, config=Given(get_target_ongoing_requests=lambda: 10))
        _, state = policy(Given(current_time=1.0, policy_state={}, **given))
        replicas, _ = policy(Given(current_time=2.0, policy_state=state, **given))
        print(replicas, 'cluster' in sys.modules)
    """
    done = subprocess.run([sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == (["5", "False"], 0), done.stderr


def test_what_ray_config_gives_the_policy_is_what_it_takes():
    (application,) = yaml.safe_load((ROOT / "ray_config.yaml").read_text())["applications"]
    configs = [AutoscalingConfig(**one["autoscaling_config"]) for one in application["deployments"] if "autoscaling_config" in one]
    policies = [config.policy for config in configs if config.policy.policy_function.startswith("cluster.autoscaling")]
    assert policies
    assert all(isinstance(policy.get_policy()(**policy.policy_kwargs).band, float) for policy in policies)


def test_at_a_step_fewer_wait_than_by_serves_default_policy_and_replicas_go_when_it_is_over():
    times = arrivals(step, 600.0)
    ours, default = (Simulation(times, *POLICIES[name]()).run(640.0) for name in ("QueuePolicy", "Serve's default"))
    assert len(ours.waits_s) == len(default.waits_s) == len(times), "everybody is served"
    assert np.percentile(ours.waits_s, 99) < np.percentile(default.waits_s, 99) / 2
    assert ours.replica_s < default.replica_s
    assert ours.wanted[-1] <= 4 < 10 < max(ours.wanted)


def test_between_rare_requests_nothing_runs_and_the_next_ones_are_served_all_the_same():
    times = arrivals(rare, 800.0)
    outcome = Simulation(times, *POLICIES[TO_ZERO](), patience_s=5.0).run(800.0)
    assert len(outcome.waits_s) == len(times)
    assert outcome.left < 0.4 * len(times)
    assert outcome.serving.count(0) > 0.4 * len(outcome.serving)


def test_the_simulation_applies_serves_own_delay():
    times = arrivals(lambda at: 200.0 if at >= 60 else 1.0, 90.0)
    config = settings(**{**QUICK, "upscale_delay_s": 20.0})
    wanted = Simulation(times, _core_replica_queue_length_policy, config).run(90.0).wanted
    assert 800 <= next(tick for tick, replicas in enumerate(wanted) if replicas > 1) < 830
