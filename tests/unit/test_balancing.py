"""Who is the least loaded, and who is soonest done; and the routers of Serve that ask."""

import asyncio
from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from ray.serve._private.common import ReplicaID, RequestMetadata
from ray.serve.config import RequestRouterConfig
from ray.serve.request_router import PendingRequest
from ray.serve.schema import DeploymentSchema

from cluster.errors import ConfigError
from cluster.traffic.balancing import filled, least_loaded, weighted
from cluster.values import EncodeRequest, Together
from deployments.routers import LeastLoadedRouter, RankingRouter, WeightedRouter
from tests.bundles import random_sequence
from tests.fakes.routers import ENCODER, Replica, routed, router_of

pytestmark = pytest.mark.virtual_time

LOADS = st.dictionaries(st.text(min_size=1), st.integers(0, 200), max_size=12)
WEIGHTS = st.dictionaries(st.text(min_size=1), st.floats(0.01, 100), max_size=12)


@given(LOADS, st.randoms(use_true_random=False))
def test_the_least_loaded_is_first_and_everybody_is_listed_once(loads, random):
    order = least_loaded(loads, random)
    assert sorted(order) == sorted(loads)
    assert [loads[name] for name in order] == sorted(loads.values())


def test_equals_take_turns():
    firsts = Counter(least_loaded({"one": 3, "two": 3, "three": 4}, Random(seed))[0] for seed in range(200))
    assert set(firsts) == {"one", "two"}
    assert min(firsts.values()) > 60


@given(LOADS.filter(bool), WEIGHTS, st.randoms(use_true_random=False))
def test_nobody_expects_a_shorter_delay_than_the_first(loads, weights, random):
    delays = [(loads[name] + 1) / filled(loads, weights)[name] for name in weighted(loads, weights, random)]
    assert delays == sorted(delays)
    assert len(delays) == len(loads)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(0, 2**32))
def test_requests_that_stay_are_shared_in_proportion_to_the_weights(weights, seed):
    of, random = {f"{number}": weight for number, weight in enumerate(weights)}, Random(seed)
    loads = dict.fromkeys(of, 0)
    for _ in range(20 * sum(weights)):
        loads[weighted(loads, of, random)[0]] += 1
    assert loads == {name: pytest.approx(20 * weight, abs=1) for name, weight in of.items()}


@given(LOADS.filter(bool), st.integers(0, 2**32))
def test_with_equal_weights_it_is_the_least_loaded(loads, seed):
    assert (
        weighted(loads, {}, Random(seed)) == weighted(loads, dict.fromkeys(loads, 3.0), Random(seed)) == least_loaded(loads, Random(seed))
    )


@pytest.mark.parametrize("nothing", [None, 0, -1.0, float("nan"), float("inf"), True, "4"])
def test_what_is_no_weight_counts_as_the_mean_of_the_others(nothing):
    assert filled(["one", "two", "three"], {"one": 2, "two": nothing, "three": 4.0}) == {"one": 2.0, "two": 3.0, "three": 4.0}
    assert filled(["one", "two"], {"one": nothing, "another": 9}) == {"one": 1.0, "two": 1.0}


def pending(*args: object) -> PendingRequest:
    return PendingRequest(args=[*args], kwargs={}, metadata=RequestMetadata(request_id="of-all", internal_request_id="of-all"))


async def burst(router: RankingRouter, requests: int) -> Counter[str]:
    """Who got how many of a burst in which none was sent before the last was routed, all made within one HTTP request."""
    async with asyncio.timeout(120):
        found = await asyncio.gather(*(routed(router, pending()) for _ in range(requests)))
    return Counter(one.replica_id.unique_id for one in found)


async def test_a_burst_is_spread_evenly_by_the_least_loaded():
    assert await burst(await router_of(LeastLoadedRouter, *map(Replica, "abc")), 30) == {"a": 10, "b": 10, "c": 10}


async def test_who_is_busy_gets_less_of_a_burst():
    router = await router_of(LeastLoadedRouter, *map(Replica, "abc"))
    router.on_new_queue_len_info(ReplicaID("a", ENCODER), 6)
    for _ in range(2):  # once a request is sent, the cache counts it, which is told of none here
        assert await burst(router, 30) == {"a": 6, "b": 12, "c": 12}


async def test_a_burst_is_shared_by_what_replicas_report():
    replicas = Replica("a", {"weight": 3.0}), Replica("b", {"weight": 1.0}), Replica("new")
    assert await burst(await router_of(WeightedRouter, *replicas), 36) == {"a": 18, "b": 6, "new": 12}
    throughput = Replica("a", {"throughput": 3.0}), Replica("b", {"throughput": 1.0, "weight": 99})
    assert await burst(await router_of(WeightedRouter, *throughput, figure="throughput"), 36) == {"a": 27, "b": 9}


async def test_the_weights_of_the_configuration_count_before_those_that_are_reported():
    replicas = Replica("a", {"weight": 9.0}, zone="near"), Replica("b", node="big", zone="far"), Replica("c", {"weight": 1.0}, zone="else")
    assert await burst(await router_of(WeightedRouter, *replicas, weights={"near": 2, "big": 3}), 36) == {"a": 12, "b": 18, "c": 6}


async def test_a_replica_that_is_full_passes_the_request_on():
    full, free = Replica("full", {"weight": 1000.0}), Replica("free")
    router = await router_of(WeightedRouter, full, free)
    full.max_ongoing_requests = 1
    full.queue = 1
    router.on_new_queue_len_info(full.replica_id, 1)
    assert await burst(router, 5) == {"free": 5}


@pytest.mark.parametrize("kind", [LeastLoadedRouter, WeightedRouter])
@pytest.mark.parametrize("together", [False, True])
async def test_a_copy_goes_where_no_earlier_attempt_went_however_idle_and_quick_those_replicas_are(kind, together):
    """A replica without a sound engine answers at once."""
    replicas = {name: Replica(name) for name in "abc"}
    router, original, asked = await router_of(kind, *replicas.values()), EncodeRequest(random_sequence(3), top_n=5, user_id="ada"), []
    for attempt in range(4):
        for name, replica in replicas.items():
            replica.routing_stats = {"weight": 1000.0 if name in asked else 1.0}
            router.on_new_queue_len_info(replica.replica_id, 0 if name in asked else 50)
        request = replace(original, attempt=attempt)
        sent = await routed(router, pending(Together(((request, 1.0),)) if together else request))
        asked.append(sent.replica_id.unique_id)
    assert sorted(asked[:3]) == ["a", "b", "c"]
    assert asked[3] in replicas, "once all were asked, any of them is tried again"


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (LeastLoadedRouter, {"bound": 2}),
        (WeightedRouter, {"wieghts": {}}),
        (WeightedRouter, {"weights": {"near": 0}}),
        (WeightedRouter, {"weights": {"near": "2"}}),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused_with_what_is_wrong(kind, wrong):
    router = kind.__new__(kind)
    with pytest.raises(ConfigError, match=r"bound|wieghts|near"):
        router.initialize_state(**wrong)


@pytest.mark.parametrize("name", ["LeastLoadedRouter", "WeightedRouter"])
def test_serve_accepts_the_routers_in_its_configuration_and_finds_the_class(name):
    schema = DeploymentSchema(name="encoder", request_router_config={"request_router_class": f"deployments.routers:{name}"})
    assert RequestRouterConfig(**schema.request_router_config).get_request_router_class().__name__ == name


async def test_a_replica_that_says_nothing_gets_nothing_until_it_answers(monkeypatch: pytest.MonkeyPatch):
    now, again = [10.0], asyncio.Event()
    monkeypatch.setitem(RankingRouter.choose_replicas.__globals__, "monotonic", lambda: now[0])  # Serve's configuration reloads the module

    async def queue_len(*, deadline_s: float) -> int:
        await again.wait()
        return 0

    stopped = Replica("stopped")
    router = await router_of(LeastLoadedRouter, stopped, Replica("well"))
    stopped.get_queue_len = queue_len
    router.on_send_request(stopped.replica_id)
    assert await burst(router, 5) == {"stopped": 2, "well": 3}, "it may still say something"
    now[0] += 1.5
    assert await burst(router, 6) == {"well": 6}
    again.set()
    now[0] += 1.5
    await burst(router, 1)
    await asyncio.sleep(0.05)
    assert (await burst(router, 6))["stopped"] > 0


async def test_where_all_say_nothing_all_are_tried(monkeypatch: pytest.MonkeyPatch):
    now = [10.0]
    monkeypatch.setitem(RankingRouter.choose_replicas.__globals__, "monotonic", lambda: now[0])  # Serve's configuration reloads the module
    only = Replica("only")
    router = await router_of(LeastLoadedRouter, only)
    only.get_queue_len = lambda *, deadline_s: asyncio.sleep(deadline_s, 0)
    router.on_send_request(only.replica_id)
    now[0] += 5
    assert await burst(router, 3) == {"only": 3}


@pytest.mark.parametrize("kind", [LeastLoadedRouter, WeightedRouter])
@pytest.mark.parametrize("user", ["ada", "bob", "eve", "kim", ""])
async def test_where_an_attempt_that_is_not_sent_yet_would_go_is_not_guessed_by_the_users_order(kind, user):
    """These routers do not go by it."""
    router = await router_of(kind, Replica("busy"), idle := Replica("idle"))
    router.on_new_queue_len_info(Replica("busy").replica_id, 50)
    router.on_new_queue_len_info(idle.replica_id, 0)
    copy = replace(EncodeRequest(random_sequence(3), top_n=5, user_id=user), attempt=1)
    assert (await routed(router, pending(copy))).replica_id == idle.replica_id
