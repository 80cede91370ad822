"""Clocks of machines that are minutes apart: what they do to kept answers, rates and the order of events, and what they do not."""

import pytest

from cluster.cache.codec import Codec
from cluster.cache.entry import Key
from cluster.cache.memory import MemoryCache
from cluster.cache.shard import CacheShard
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.cache.tier_values import Computed, TierSettings
from cluster.cache.tiered import TieredCache
from tests.fakes.clock import Clock

APART_S = 300.0
ADA = Key("shop", "ada", "1")
CODEC = Codec(str.encode, lambda raw: bytes(raw).decode())
TTL_S, STALE_S = 60.0, 300.0
pytestmark = pytest.mark.virtual_time


class Gateways:
    """Two gateways, `fast` and `slow` by their clocks, over one shard on a machine that has the right time."""

    def __init__(self) -> None:
        self.clocks = {"fast": Clock(1000 + APART_S), "slow": Clock(1000), "shard": Clock(1000 + APART_S / 2)}
        shard = ShardedCache({"one": CacheShard(MemoryCache(clock=self.clocks["shard"]))}, SharedSettings(deadline_s=5))
        settings = TierSettings(ttl_s=TTL_S, stale_s=STALE_S, jitter=0.0)
        self.caches = {
            name: TieredCache(MemoryCache(clock=self.clocks[name]), shard, settings, CODEC, clock=self.clocks[name])
            for name in ("fast", "slow")
        }
        self.computed = 0

    def pass_s(self, seconds):
        for clock in self.clocks.values():
            clock.advance(seconds)

    async def ask(self, name):
        async def compute():
            self.computed += 1
            return Computed(f"answer {self.computed}")

        found = await self.caches[name].get_or_compute(ADA, compute)
        await self.caches[name].flush()
        return found


async def test_an_answer_is_given_for_as_long_as_the_clocks_are_apart_more_and_no_longer():
    both = Gateways()
    await both.ask("fast")
    both.pass_s(TTL_S + APART_S - 1)
    assert not (await both.ask("slow")).stale, "the one behind takes it for fresh"
    both.pass_s(STALE_S + 2)
    assert (await both.ask("slow")).tier == "computed"


async def test_the_gateway_ahead_computes_an_answer_once_more_and_then_both_are_content():
    both = Gateways()
    await both.ask("slow")
    for _ in range(5):
        both.pass_s(1)
        for name in ("fast", "slow"):
            await both.ask(name)
    for cache in both.caches.values():
        await cache.close()
    assert both.computed <= 2


async def test_an_erasure_holds_whatever_the_clocks_say():
    both = Gateways()
    await both.ask("fast")
    await both.ask("slow")
    await both.caches["slow"].invalidate("shop", "ada")
    both.caches["fast"].forget("shop", "ada")
    assert (await both.ask("fast")).tier == "computed"
    assert (await both.ask("slow")).value == "answer 2"
