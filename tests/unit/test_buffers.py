"""Buffers that are used again."""

import numpy as np
import pytest

from cluster.engines.buffers import SMALLEST, BufferPool, tier


@pytest.mark.parametrize(("size", "least"), [(0, SMALLEST), (1, SMALLEST), (64, 64), (65, 128), (1000, 1024), (1024, 1024), (1025, 2048)])
def test_sizes_come_in_powers_of_two(size, least):
    assert tier(size) == least


def test_what_was_there_is_there_again_for_what_fits():
    pool = BufferPool()
    first = pool.array("items", (3, 100), np.int64)
    first[...] = 7
    again = pool.array("items", (2, 50), np.int64)
    assert (again == 7).all()
    assert np.shares_memory(first, again)
    assert not np.shares_memory(pool.array("items", (6, 100), np.int64), first)


def test_names_do_not_share_and_arrays_are_of_the_type_and_shape_asked_for():
    pool = BufferPool()
    items, times = pool.array("items", (4, 5), np.int64), pool.array("times", (4, 5), np.int32)
    assert not np.shares_memory(items, times)
    assert [(one.shape, one.dtype, one.flags.c_contiguous) for one in (items, times)] == [
        ((4, 5), np.int64, True),
        ((4, 5), np.int32, True),
    ]


def test_zeros_are_zeros_whatever_was_there():
    pool = BufferPool()
    pool.array("kt", (10,))[...] = np.nan
    assert (pool.zeros("kt", (7,)) == 0).all()


def test_counts_what_it_had_and_what_it_had_to_make():
    pool = BufferPool()
    for size in (60, 64, 65, 100, 10):
        pool.array("items", (size,), np.int64)
    assert pool.statistics() == {"buffer_hits": 3, "buffer_misses": 2, "buffer_held_bytes": 128 * 8, "buffer_peak_bytes": 128 * 8}
    pool.clear()
    assert pool.statistics() == {"buffer_hits": 3, "buffer_misses": 2, "buffer_held_bytes": 0, "buffer_peak_bytes": 128 * 8}


def test_a_copy_lies_in_one_piece_in_memory_that_the_next_one_takes():
    pool, source = BufferPool(), np.arange(200.0).reshape(10, 20)
    first = pool.copied("past", source[:, :7])
    assert (first == source[:, :7]).all()
    assert first.flags.c_contiguous
    assert np.shares_memory(first, pool.copied("past", source[:, 1:8]))
