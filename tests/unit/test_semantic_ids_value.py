"""Semantic IDs as a value: tokens, version, file."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import BundleError
from cluster.semantic_ids import SemanticIds, read_semantic_ids, write_semantic_ids
from tests.bundles import random_semantic_ids


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.integers(1, 60), st.integers(0, 99))
def test_every_code_has_a_token_of_its_own_and_zero_is_none(sizes, items, seed):
    ids = random_semantic_ids(items, tuple(sizes), seed)
    meanings = [(level, code) for level, size in enumerate(ids.sizes) for code in range(size)]
    tokens = [ids.first_tokens[level] + code for level, code in meanings]
    assert tokens == list(range(1, ids.vocabulary))
    named = dict(zip(tokens, meanings, strict=True))
    for item in range(1, items + 1):
        assert [named[token] for token in ids.tokens[item].tolist()] == list(enumerate(ids.codes[item].tolist()))
    assert not ids.tokens[0].any()


def test_counts_items_and_levels_without_the_padding():
    ids = random_semantic_ids(30, (4, 3))
    assert (ids.items, ids.levels) == (30, 3)
    assert ids.tokens.shape == (31, 3)


def test_the_version_depends_on_every_code_and_on_the_sizes_and_on_nothing_else():
    ids = random_semantic_ids(30, (4, 3))
    other_codes = ids.codes.copy()
    other_codes[17, 1] += 1
    assert ids.version == SemanticIds(ids.codes.astype(np.int64), ids.sizes, (np.ones((4, 2), np.float32),)).version
    assert len({ids.version, replace(ids, codes=other_codes).version, replace(ids, sizes=(4, 3, 99)).version}) == 3


def test_reads_what_was_written(tmp_path):
    ids = replace(random_semantic_ids(30, (4, 3)), codebooks=(np.ones((4, 2), np.float32), np.zeros((3, 2), np.float32)))
    write_semantic_ids(ids, tmp_path / "ids.npz")
    read = read_semantic_ids(tmp_path / "ids.npz")
    assert (read.codes == ids.codes).all()
    assert (read.sizes, read.version) == (ids.sizes, ids.version)
    assert [book.tolist() for book in read.codebooks] == [book.tolist() for book in ids.codebooks]


@pytest.mark.parametrize("kept", [0, 1, 30, 0.5, 0.99])
def test_refuses_a_file_that_was_cut_off(tmp_path, kept):
    path = tmp_path / "ids.npz"
    write_semantic_ids(random_semantic_ids(500, (16, 16)), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: kept if isinstance(kept, int) else int(kept * len(whole))])
    with pytest.raises(BundleError, match="does not hold semantic IDs"):
        read_semantic_ids(path)


@pytest.mark.parametrize("place", range(100, 400, 40))
def test_refuses_a_file_with_a_changed_byte_in_its_arrays(tmp_path, place):
    path = tmp_path / "ids.npz"
    write_semantic_ids(random_semantic_ids(500, (16, 16)), path)
    changed = bytearray(path.read_bytes())
    changed[place] ^= 0xFF
    path.write_bytes(changed)
    with pytest.raises(BundleError, match="does not hold semantic IDs"):
        read_semantic_ids(path)


def test_refuses_a_file_that_holds_something_else(tmp_path):
    np.savez(tmp_path / "other.npz", weights=np.ones(3))
    with pytest.raises(BundleError, match="codes"):
        read_semantic_ids(tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("codes", "sizes"), [([[0, 0], [1, 4]], (2, 4)), ([[0, 0], [-1, 0]], (2, 4)), ([[0, 0], [1, 0]], (2, 4, 4)), ([0, 1], (2,))]
)
def test_refuses_codes_that_do_not_fit_the_levels(tmp_path, codes, sizes):
    np.savez(tmp_path / "ids.npz", codes=np.array(codes, np.int32), sizes=np.array(sizes, np.int32))
    with pytest.raises(BundleError, match="do not fit"):
        read_semantic_ids(tmp_path / "ids.npz")
