"""Semantic IDs: unique, balanced, near where vectors are near, and open to new items."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.bundle import BundleError
from cluster.dataset import Catalogue
from cluster.errors import ConfigError, DataError
from cluster.semantic_ids import SemanticIds, read_semantic_ids, write_semantic_ids
from cluster.trie import Trie
from cluster.values import Item
from pipelines.assign_ids import add_items, build_semantic_ids, fitting_codes, fitting_vocabulary, report
from pipelines.balanced_k_means import assign
from pipelines.titles import title_vectors, with_titles


def add_item(ids, vector):
    return add_items(ids, np.asarray(vector)[None])


def unit_vectors(items, dim=8, seed=0):
    vectors = np.random.default_rng(seed).standard_normal((items + 1, dim)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors[0] = 0
    return vectors


def grouped_vectors(groups, each, seed=0):
    """Vectors in tight groups far from each other; item i is of group (i - 1) // each."""
    rng = np.random.default_rng(seed)
    centres = np.eye(groups, 16, dtype=np.float32) * 5
    return np.concatenate([np.zeros((1, 16)), np.repeat(centres, each, axis=0) + 0.1 * rng.standard_normal((groups * each, 16))]).astype(
        "f"
    )


@pytest.mark.parametrize(("items", "levels", "codes"), [(1, 3, None), (7, 2, 8), (300, 3, None), (300, 4, 4), (300, 3, 2), (500, 2, 16)])
def test_every_item_has_a_path_of_its_own_within_the_levels_sizes(items, levels, codes):
    ids = build_semantic_ids(unit_vectors(items), levels=levels, codes=codes)
    assert ids.codes.shape == (items + 1, levels)
    assert len({tuple(path) for path in ids.codes[1:].tolist()}) == items
    assert (ids.codes[1:] < np.array(ids.sizes)).all()
    assert (ids.codes >= 0).all()
    assert Trie.of(ids).view().items == items


def test_first_codes_are_balanced_and_no_cell_holds_more_than_its_share():
    found = report(build_semantic_ids(unit_vectors(1000), levels=3, codes=16))
    first, second, last = found.levels
    assert first.fullest <= np.ceil(1.25 * 1000 / 16)
    assert first.used == second.used == 16
    assert first.perplexity > 15
    assert found.largest_cell <= np.ceil(first.fullest / 16)
    assert last.size == found.largest_cell


def test_the_report_counts_collisions_and_code_use():
    found = report(build_semantic_ids(unit_vectors(64), levels=2, codes=8))
    assert (found.shared, found.largest_cell) == (1.0, found.levels[1].size)
    assert report(build_semantic_ids(unit_vectors(64), levels=3, codes=64)).shared == 0.0


def test_items_whose_vectors_are_near_share_their_first_code():
    groups, each = 8, 20
    codes = build_semantic_ids(grouped_vectors(groups, each), levels=3, codes=8).codes[1:, 0].reshape(groups, each)
    assert (codes == codes[:, :1]).all()
    assert len(set(codes[:, 0])) == groups


def test_the_same_vectors_and_seed_give_the_same_version_and_others_another():
    vectors = unit_vectors(100)
    version = build_semantic_ids(vectors).version
    assert build_semantic_ids(vectors).version == version
    assert build_semantic_ids(unit_vectors(100, seed=1)).version != version


def test_items_with_the_same_vector_are_told_apart_by_the_last_level():
    vectors = np.ones((41, 4), np.float32)
    ids = build_semantic_ids(vectors, levels=3, codes=4)
    assert len({tuple(path) for path in ids.codes[1:].tolist()}) == 40


def test_a_new_item_gets_a_free_path_of_known_codes_beside_its_neighbours():
    vectors = grouped_vectors(8, 20)
    ids = build_semantic_ids(vectors, levels=3, codes=8)
    grown = add_item(ids, vectors[45] + 0.01)
    assert grown.items == 161
    assert (grown.codes[:161] == ids.codes).all()
    assert grown.codes[161, 0] == ids.codes[45, 0]
    assert grown.sizes == ids.sizes
    assert grown.version != ids.version
    assert Trie.of(grown).view().items == 161


def test_new_items_fill_every_path_and_then_are_refused():
    ids = build_semantic_ids(unit_vectors(8), levels=2, codes=4)
    room = int(np.prod(ids.sizes)) - 8
    for number in range(room):
        ids = add_item(ids, unit_vectors(room, seed=3)[number + 1])
    assert Trie.of(ids).view().items == 8 + room
    with pytest.raises(DataError, match="paths are taken; train anew"):
        add_item(ids, np.zeros(8))


def test_new_items_of_a_small_catalogue_take_codes_that_no_item_has_only_once_all_others_are_taken():
    codes = np.array([[0, 0, 0], [0, 0, 0], [1, 1, 0], [0, 1, 0]], np.int32)
    books = np.array([[0.0], [1.0], [2.0]], np.float32), np.array([[0.0], [0.1], [0.2]], np.float32)
    ids = SemanticIds(codes, (3, 3, 1), books)
    grown = add_items(ids, np.full((6, 1), 2.2, np.float32))
    assert grown.codes[4:].tolist() == [[1, 0, 0], [2, 2, 0], [2, 1, 0], [2, 0, 0], [1, 2, 0], [0, 2, 0]]


def test_where_not_all_new_items_find_a_path_the_numbers_are_told_and_a_cure_that_helps_a_catalogue_of_one_item_too():
    few = build_semantic_ids(unit_vectors(5), levels=2, codes=2)
    with pytest.raises(DataError, match="3 new items need a path each, and 5 of 6 paths are taken; train anew, with the new items"):
        add_items(few, unit_vectors(3)[1:])
    assert add_items(few, unit_vectors(1)[1:]).items == 6
    with pytest.raises(DataError, match="a new item needs a path, and 1 of 1 paths are taken; train anew, with the new items"):
        add_items(build_semantic_ids(unit_vectors(1)), unit_vectors(1)[1:])


def test_a_file_gives_the_ids_back_and_a_damaged_one_is_refused(tmp_path):
    ids = build_semantic_ids(unit_vectors(50))
    write_semantic_ids(ids, tmp_path / "ids.npz")
    again = read_semantic_ids(tmp_path / "ids.npz")
    assert (again.version, again.sizes, len(again.codebooks)) == (ids.version, ids.sizes, 2)
    assert add_item(again, ids.codebooks[0][3]).codes[-1].tolist() == add_item(ids, ids.codebooks[0][3]).codes[-1].tolist()
    (tmp_path / "ids.npz").write_bytes(b"no archive")
    with pytest.raises(BundleError, match="does not hold semantic IDs"):
        read_semantic_ids(tmp_path / "ids.npz")


def test_tokens_start_above_0_and_levels_do_not_overlap():
    ids = build_semantic_ids(unit_vectors(100), levels=3, codes=8)
    ranges = [set(ids.tokens[1:, level].tolist()) for level in range(3)]
    assert min(map(min, ranges)) >= 1
    assert max(map(max, ranges)) < ids.vocabulary
    assert len(set.union(*ranges)) == sum(map(len, ranges))


def test_refuses_what_cannot_be_clustered():
    with pytest.raises(ConfigError, match="at least 2 levels"):
        build_semantic_ids(unit_vectors(10), levels=1)
    with pytest.raises(DataError, match="NaN"):
        build_semantic_ids(np.full((11, 4), np.nan, np.float32))


def test_titles_draw_items_of_the_same_words_together():
    kinds = ("space rocket moon", "garden flower bee")
    catalogue = Catalogue([Item(str(number), f"{kinds[number // 10]} the", {"genres": kinds[number // 10]}) for number in range(20)])
    vectors = title_vectors(catalogue)
    assert np.linalg.norm(vectors[1:], axis=1) == pytest.approx(1, abs=1e-5)
    alike, different = vectors[1:11] @ vectors[1:11].T, vectors[1:11] @ vectors[11:].T
    assert alike.min() > 0.99
    assert different.max() < 0.5
    codes = build_semantic_ids(with_titles(np.zeros((21, 4), np.float32), catalogue, 0.5), levels=3, codes=2).codes[1:, 0]
    assert len(set(codes[:10])) == len(set(codes[10:])) == 1
    assert codes[0] != codes[10]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 2**32 - 1))
def test_an_assignment_fills_no_column_above_its_capacity_and_takes_the_nearest_where_there_is_room(rows, columns, seed):
    distances = np.random.default_rng(seed).random((rows, columns)).astype(np.float32)
    capacity = -(-rows // columns)
    code = assign(distances, capacity)
    assert np.bincount(code, minlength=columns).max() <= capacity
    assert (assign(distances, rows) == distances.argmin(axis=1)).all()


@given(st.integers(1, 10**6), st.integers(2, 5))
def test_there_are_two_cells_for_every_item(items, levels):
    assert fitting_codes(items, levels) ** (levels - 1) >= 2 * items


@pytest.mark.parametrize(("items", "levels"), [(1, 2), (5, 3), (20, 3), (300, 2), (300, 3), (300, 4), (2000, 3), (2100, 3)])
def test_the_vocabulary_of_codes_that_fit_is_known_before(items, levels):
    rng = np.random.default_rng(items)
    groups = rng.normal(size=(3, 6))[rng.integers(3, size=items + 1)]
    vectors = (groups + 0.01 * rng.normal(size=groups.shape)).astype(np.float32)
    assert fitting_vocabulary(items, levels) == build_semantic_ids(vectors, levels=levels).vocabulary
