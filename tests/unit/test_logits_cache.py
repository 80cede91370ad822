from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from integrations.torch_beam.logits_cache import CacheStatistics, LogitsCache, Prefix, size_bytes


def prefix(*tokens, model="m1", prompt=b"ada"):
    return Prefix(model, prompt, tokens)


ROW = torch.arange(256, dtype=torch.float32)
ROW_BYTES = size_bytes(prefix(1), ROW)


def test_gives_back_what_was_put_and_counts_hits_and_misses():
    cache = LogitsCache(10 * ROW_BYTES)
    assert prefix(1) not in cache
    assert cache.get(prefix(1)) is None
    cache.put(prefix(1), ROW)
    assert prefix(1) in cache
    assert torch.equal(cache.get(prefix(1)), ROW)
    assert cache.statistics() == CacheStatistics(1, 1, 0, 1, ROW_BYTES, 10 * ROW_BYTES)


@pytest.mark.parametrize(
    "other", [prefix(1, 3), prefix(1), prefix(2, 1), prefix(1, 2, 3), prefix(1, 2, model="m2"), prefix(1, 2, prompt=b"bob")]
)
def test_answers_the_exact_prefix_of_the_same_model_only(other):
    cache = LogitsCache(10 * ROW_BYTES)
    cache.put(prefix(1, 2), ROW)
    assert cache.get(other) is None


def test_neither_the_giver_nor_a_taker_can_change_what_is_held():
    cache, given = LogitsCache(10 * ROW_BYTES), ROW.clone().requires_grad_()
    cache.put(prefix(1), given)
    with torch.no_grad():
        given.fill_(-1)
    taken = cache.get(prefix(1))
    assert not taken.requires_grad
    taken.fill_(float("-inf"))
    assert torch.equal(cache.get(prefix(1)), ROW)


def test_a_row_of_a_batch_does_not_keep_the_batch():
    cache, batch = LogitsCache(10 * ROW_BYTES), torch.zeros(1000, 256)
    cache.put(prefix(1), batch[3])
    assert cache.get(prefix(1)).untyped_storage().nbytes() == 1024
    assert cache.statistics().used_bytes == ROW_BYTES


def test_evicts_what_was_asked_for_longest_ago_when_the_budget_is_spent():
    cache = LogitsCache(3 * ROW_BYTES)
    for token in (1, 2, 3):
        cache.put(prefix(token), ROW)
    cache.get(prefix(1))
    cache.put(prefix(4), ROW)
    assert [token for token in (1, 2, 3, 4) if cache.get(prefix(token)) is not None] == [1, 3, 4]
    assert cache.statistics().evictions == 1
    assert cache.statistics().used_bytes == 3 * ROW_BYTES


def test_evicts_as_many_as_a_large_entry_needs_and_keeps_none_larger_than_the_budget():
    cache = LogitsCache(3 * ROW_BYTES)
    for token in (1, 2, 3):
        cache.put(prefix(token), ROW)
    cache.put(prefix(4), ROW.repeat(2))
    assert cache.statistics().entries == 2
    cache.put(prefix(5), ROW.repeat(100))
    assert cache.get(prefix(5)) is None
    assert cache.get(prefix(4)) is not None


def test_putting_a_prefix_again_replaces_it_and_counts_it_once():
    cache = LogitsCache(3 * ROW_BYTES)
    cache.put(prefix(1), ROW)
    cache.put(prefix(1), ROW + 1)
    assert torch.equal(cache.get(prefix(1)), ROW + 1)
    assert cache.statistics().used_bytes == ROW_BYTES
    assert cache.statistics().evictions == 0


def test_when_it_is_cleared_everything_is_gone_and_its_room_is_free():
    cache = LogitsCache(3 * ROW_BYTES)
    for token in (1, 2):
        cache.put(prefix(token), ROW)
    assert cache.clear() == 2
    assert cache.get(prefix(1)) is None
    assert (cache.statistics().entries, cache.statistics().used_bytes, cache.statistics().evictions) == (0, 0, 0)
    assert cache.clear() == 0


def test_a_budget_of_0_keeps_nothing_and_one_below_is_refused():
    cache = LogitsCache(0)
    cache.put(prefix(1), ROW)
    assert cache.get(prefix(1)) is None
    with pytest.raises(ValueError, match="-1"):
        LogitsCache(-1)


def test_threads_may_share_it():
    cache = LogitsCache(20 * ROW_BYTES)

    def work(thread):
        for step in range(500):
            token = (step * 7 + thread) % 40
            cache.put(prefix(token), torch.full((256,), float(token)))
            held = cache.get(prefix(token))
            assert held is None or held.eq(token).all()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    seen = cache.statistics()
    assert seen.hits + seen.misses == 2000
    assert seen.entries * ROW_BYTES == seen.used_bytes <= seen.budget_bytes
