"""A cache takes the memory that it says: what Python has allocated for what it holds, beside `used_bytes`."""

import gc
import time
import tracemalloc
from contextlib import contextmanager
from itertools import count

import pytest
from msgspec.structs import replace

from cluster.cache.admission import admission_of
from cluster.cache.entry import Entry, Key, weight_of
from cluster.cache.hot_keys import HotKeys
from cluster.cache.memory import MemoryCache
from cluster.cache.policy import POLICIES
from cluster.cache.shard import CacheShard
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.cache.tier_values import Computed, TierSettings
from cluster.cache.tiered import TieredCache
from cluster.dataset import Catalogue
from cluster.titled_items import TitledItems
from cluster.values import Explanation, Item, Recommendation, SimilarItem, StageReport
from deployments.http.answer_json import answer_json
from pipelines.answer_codec import ANSWER_CODEC

MOST = 1.15
"""How many times what it counts a cache may take: versions of Python differ."""
SIZES = [1, 10, 100]
CATALOGUE = Catalogue([Item(f"{1000 + number}", f"Film no. {number} (1977) \U0001f3ac", {"year": "1977"}) for number in range(100)])
SEEN = CATALOGUE[1]


@pytest.fixture(scope="module", autouse=True)
def _json_of_the_items():
    """Is made once, and belongs to the catalogue."""
    answer_json(answer_of(0, 100))


def key_of(number):
    return Key("".join(("a ", "tenant")), f"user {number:09}", f"{number:032x}")


def answer_of(number, k, *, explained=False):
    items = TitledItems(CATALOGUE, [*range(1, k + 1)], [-1.2345678901 - number - rank for rank in range(k)], "encode")
    if explained:
        items = tuple(replace(one, explanation=Explanation(one.score, similar=(SimilarItem(SEEN, one.score / 2),) * 3)) for one in items)
    stages = (StageReport("history", "sqlite", 0.1 + number), StageReport("encode", "onnxruntime", 1.1 + number))
    return Recommendation(f"user {number:09}", items, stages, "ml-100k/1", degraded=False)


@contextmanager
def weighed():
    """A list that has, afterwards, the bytes that were allocated within the block and are still held."""
    allocated = []
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        yield allocated
        gc.collect()
        allocated.append(tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("minimum_hit_rate", [0.0, 0.05])
@pytest.mark.parametrize("k", SIZES[:2])
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_full_shard_takes_no_more_than_its_capacity(policy, k, minimum_hit_rate):
    payload, capacity = ANSWER_CODEC.encode(answer_of(0, k)), 2**21
    admission = admission_of(minimum_hit_rate)  # its counters are of a fixed size, and not of what it holds
    with weighed() as allocated:
        memory = MemoryCache(policy, capacity, admission=admission)
        for number in count():
            copied = bytes(bytearray(payload))
            memory.get(key_of(number))
            memory.put(key_of(number), Entry.lasting(copied, weight_of(len(copied)), now=time.time(), fresh_s=600.0 + number))
            if number > 1.5 * capacity / weight_of(len(payload)):
                break
        del copied
    assert memory.statistics().evictions + memory.statistics().rejections > 0
    assert allocated[0] <= MOST * memory.statistics().used_bytes <= MOST * capacity


@pytest.mark.parametrize("explained", [False, True], ids=["plain", "explained"])
@pytest.mark.parametrize("k", SIZES)
@pytest.mark.parametrize("whence", ["computed here", "decoded from the shared cache"])
async def test_a_gateways_memory_takes_no_more_than_it_counts(whence, k, explained):
    shard, entries = CacheShard(MemoryCache()), 3000 // (10 + k)

    def replica(shared):
        second = ShardedCache({"only": shard}, SharedSettings(deadline_s=60)) if shared else None
        return TieredCache(MemoryCache(), second, TierSettings(), ANSWER_CODEC, hot_keys=HotKeys(capacity=1))

    async def answered(cache):
        for number in range(entries):

            async def compute(number=number):
                return Computed(answer_of(number, k, explained=explained))

            found = await cache.get_or_compute(key_of(number), compute)
            assert found.tier == ("computed" if cache is first else "l2")
            answer_json(found.value)
        await cache.flush()

    first, second = replica(whence != "computed here"), replica(True)
    if whence != "computed here":
        await answered(first)
    cache = first if whence == "computed here" else second
    with weighed() as allocated:
        await answered(cache)
    held = (await cache.statistics()).l1
    assert held.entries == entries
    assert allocated[0] <= MOST * held.used_bytes
