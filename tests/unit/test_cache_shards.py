"""How many shards the shared cache has: the decision by itself, with times that the tests give, and its way to the gateways and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.cache.layout import Layout, ShardsSeen
from cluster.fleet.board import Presence
from cluster.fleet.cache_shards import CacheShards, ShardPolicy
from cluster.fleet.heartbeat import Report
from deployments.fleet.switchboard import TTL_S, SwitchboardDeployment
from tests.fakes.clock import Clock
from tests.fakes.processes import only
from tests.unit.test_moving_shards import KEYS, NAME, Place, cache_of, found, put, stored

POLICY = ShardPolicy(target_busy=0.5, up_after_s=10.0, down_after_s=60.0, band=0.25)
LOADS = st.lists(st.tuples(st.floats(0, 20), st.floats(0, 8)), min_size=1, max_size=40)


class Cluster:
    """Gateways that follow at once; the load is shared out."""

    def __init__(self, least=1, most=8, policy=POLICY):
        self.now = 1000.0
        self.board = CacheShards(least, most, TTL_S, policy, now=self.now)
        self.layout, self.owners = Layout(0, least), []
        self.tick(0.0)
        self.now += 2 * TTL_S

    def tick(self, busy, seconds=2.0, **seen):
        self.now += seconds
        self.board.report("gateway/a", ShardsSeen(**{"layout": self.layout, "busy": busy, "moving": False} | seen), now=self.now)
        self.layout = self.board.layout
        self.owners.append(self.layout.owners)
        return self.layout.owners

    def during(self, seconds, busy):
        return [self.tick(busy) for _ in range(int(seconds / 2))]


def test_a_load_that_lasts_gets_the_shards_it_needs():
    cluster = Cluster()
    assert set(cluster.during(8, 1.4)) == {1}
    assert cluster.during(10, 1.4)[-1] == 3


def test_a_peak_that_passes_gets_none():
    cluster = Cluster()
    for _ in range(20):
        cluster.during(8, 3.0)
        cluster.tick(0.1)
    assert set(cluster.owners) == {1}


def test_shards_go_once_fewer_have_been_enough_for_a_while_with_some_to_spare():
    cluster = Cluster()
    cluster.during(20, 1.4)
    assert set(cluster.during(50, 0.5)) == {3}
    assert cluster.during(20, 0.5)[-1] == 2, "0.5 cores and a quarter more are beyond what one may use"
    assert cluster.during(80, 0.3)[-1] == 1


@given(st.floats(0, 8))
def test_a_steady_load_never_makes_it_flap(busy):
    cluster = Cluster()
    cluster.during(300, busy)
    changes = [(before, after) for before, after in zip(cluster.owners, cluster.owners[1:], strict=False) if before != after]
    assert len(changes) <= 1


@given(LOADS, st.integers(1, 3), st.integers(3, 9))
def test_the_shards_are_always_within_the_bounds(loads, least, most):
    cluster = Cluster(least, most)
    for seconds, busy in loads:
        cluster.tick(busy, seconds)
    assert all(least <= owners <= most for owners in cluster.owners)


@given(LOADS, st.integers(1, 9), st.floats(0, 8))
def test_more_load_never_wants_fewer_shards(loads, owners, more):
    at, history = 0.0, []
    for seconds, busy in loads:
        at += seconds
        history.append((at, busy))
    heavier = [(when, busy + more) for when, busy in history]
    assert POLICY.owners(heavier, owners, (1, 9), now=at) >= POLICY.owners(history, owners, (1, 9), now=at)


@pytest.mark.parametrize("seen", [{"moving": True}, {"layout": Layout(-1, 1)}], ids=["moves", "has not heard of the last change"])
def test_nothing_is_decided_while_a_gateway(seen):
    cluster = Cluster()
    for _ in range(40):
        cluster.tick(4.0)
        cluster.board.report("gateway/b", ShardsSeen(**{"layout": cluster.layout, "moving": False} | seen), now=cluster.now)
    assert set(cluster.owners) == {1}
    cluster.now += 2 * TTL_S
    assert cluster.during(20, 4.0)[-1] == 8, "one that is silent is not waited for"


def test_what_a_move_costs_is_not_counted_as_load():
    cluster = Cluster()
    cluster.during(20, 1.4)
    for _ in range(30):
        cluster.tick(4.0, moving=True)
    assert cluster.during(30, 1.4)[-1] == 3


def test_a_restarted_board_adopts_what_the_gateways_follow_and_decides_nothing_before_it_has_heard_from_all():
    cluster = Cluster()
    cluster.during(20, 1.4)
    followed = cluster.layout
    restarted = CacheShards(1, 8, TTL_S, ShardPolicy(up_after_s=0.0, down_after_s=0.0), now=cluster.now)
    restarted.report("gateway/a", ShardsSeen(Layout(0, 1), 0.0, moving=False), now=cluster.now)
    restarted.report("gateway/b", ShardsSeen(followed, 0.0, moving=False), now=cluster.now)
    assert restarted.layout == followed


def test_a_decision_looks_at_no_more_loads_however_often_gateways_report():
    """As they do with every erasure: each changes their orders, and they report at once."""
    looked_at = []

    class Counting(ShardPolicy):
        def owners(self, loads, *given, **named):
            looked_at.append(len(loads))
            return super().owners(loads, *given, **named)

    cluster = Cluster(policy=Counting(down_after_s=60.0))
    for number in range(10_000):
        cluster.tick(0.5, seconds=0.01)
        cluster.board.report(f"gateway/{number % 20}", ShardsSeen(cluster.layout, 0.5, moving=False), now=cluster.now)
    assert max(looked_at) <= 60 + 2


def test_where_the_number_is_fixed_it_stays():
    cluster = Cluster(2, 2)
    cluster.during(600, 8.0)
    cluster.during(600, 0.0)
    assert set(cluster.owners) == {2}


@pytest.mark.virtual_time
async def test_a_busy_cache_gets_a_second_shard_by_the_orders_of_the_heartbeat_and_every_gateway_still_hits(three_versions):
    place, clock = Place(), Clock(1000.0)
    board = SwitchboardDeployment({"model_dir": str(three_versions), "cache": {"l2_max_shards": 2}}, clock, only("a"))
    gateways = [await cache_of(place, 1, 2), await cache_of(place, 1, 2)]
    await put(gateways[0], stored())
    for shard in place.shards.values():
        shard._busy = lambda: 0.9  # noqa: SLF001 - a shard in this process uses no core of its own
    followed = []
    for _ in range(20):
        clock.advance(2.0)
        for name, cache in enumerate(gateways):
            await cache.statistics()
            told = Report({f"gateway/{name}": Presence("gateway", {}, shards=cache.seen)})
            orders = await board.beat(str(name), told, -1, 0.0)
            cache.follow(orders.layout)
            await cache.settled()
        followed.append(tuple(cache.seen.layout.owners for cache in gateways))
    assert followed[0] == (1, 1)
    assert followed[-1] == (2, 2)
    assert sorted(place.shards) == [f"{NAME}-0", f"{NAME}-1"]
    for cache in gateways:
        assert await found(cache) == stored(KEYS)
