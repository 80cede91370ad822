"""The trie and its views, against sets of paths held in plain Python."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.errors import DataError
from cluster.semantic_ids import SemanticIds
from cluster.trie import NO_NODE, Trie
from tests.bundles import random_semantic_ids

SIZES = (3, 4, 5)


def semantic_ids(paths, sizes=SIZES):
    """Item i + 1 has the path `paths[i]`."""
    return SemanticIds(np.array([(0,) * len(sizes), *paths], np.int32), sizes)


def some_paths():
    codes = st.tuples(*(st.integers(0, size - 1) for size in SIZES))
    return st.lists(codes, min_size=1, max_size=40, unique=True)


def restrictions():
    items = st.lists(st.integers(-3, 50), max_size=60)
    return st.tuples(st.none() | items, st.none() | items)


def array(items):
    return None if items is None else np.array(items, np.int32)


def permitted(paths, among, blocked):
    """Item -> its path as tokens, computed without numpy."""
    first = [1 + sum(SIZES[:level]) for level in range(len(SIZES))]
    tokens = {item: tuple(code + start for code, start in zip(path, first, strict=True)) for item, path in enumerate(paths, 1)}
    return {item: path for item, path in tokens.items() if (among is None or item in among) and item not in (blocked or [])}


def walk(view):
    """Every path that the view's children lead to, as tokens, with its leaf's item."""
    found = {(): 0}
    for level in range(view.trie.levels):
        children = {path: view.children(level, node) for path, node in found.items()}
        found = {
            (*path, token): node
            for path, nodes in children.items()
            for token, node in zip(view.tokens(level, nodes).tolist(), nodes.tolist(), strict=True)
        }
    return {int(view.trie.items[leaf]): path for path, leaf in found.items()}


@given(some_paths(), restrictions())
def test_leads_to_every_item_that_may_be_named_and_to_no_other(paths, restriction):
    view = Trie.of(semantic_ids(paths)).view(*map(array, restriction))
    expected = permitted(paths, *restriction)
    assert walk(view) == expected
    assert view.items == len(expected)


@given(some_paths(), restrictions())
def test_leads_nowhere_from_where_nothing_may_be_named(paths, restriction):
    view = Trie.of(semantic_ids(paths)).view(*map(array, restriction))
    for level in range(1, view.trie.levels):
        reached = {path[:level] for path in permitted(paths, *restriction).values()}
        assert sum(bool(len(view.children(level, node))) for node in range(len(view.trie.tokens[level - 1]))) == len(reached)


@given(some_paths(), restrictions(), st.data())
def test_expands_several_nodes_as_it_does_each_and_no_node_to_nothing(paths, restriction, data):
    view = Trie.of(semantic_ids(paths)).view(*map(array, restriction))
    level = data.draw(st.integers(1, view.trie.levels - 1))
    nodes = data.draw(st.lists(st.integers(NO_NODE, len(view.trie.tokens[level - 1]) - 1), min_size=1, max_size=8))
    for node, row in zip(nodes, view.permitted(level, view.trie.children(level, np.array(nodes, np.int32))), strict=True):
        expected = [] if node == NO_NODE else view.children(level, node).tolist()
        assert row[row != NO_NODE].tolist() == expected


@given(some_paths())
def test_numbers_nodes_in_the_order_of_their_paths(paths):
    trie = Trie.of(semantic_ids(paths))
    in_order = sorted(range(1, len(paths) + 1), key=lambda item: paths[item - 1])
    assert trie.items.tolist() == in_order
    assert trie.leaves[trie.items].tolist() == list(range(len(paths)))
    for level in range(trie.levels):
        prefixes = sorted({path[: level + 1] for path in paths})
        assert (trie.tokens[level] - semantic_ids(paths).first_tokens[level]).tolist() == [prefix[-1] for prefix in prefixes]


@given(some_paths())
def test_gives_the_nodes_along_an_items_path(paths):
    ids = semantic_ids(paths)
    view, items = Trie.of(ids).view(), np.arange(1, len(paths) + 1)
    nodes = view.paths(items)
    assert np.stack([view.tokens(level, nodes[:, level]) for level in range(ids.levels)], axis=1).tolist() == ids.tokens[items].tolist()


def test_refuses_two_items_with_one_path_and_names_one_of_them():
    with pytest.raises(DataError, match=r"\[1, 0, 2\] of catalogue index 1 "):
        Trie.of(semantic_ids([(1, 0, 2), (0, 0, 0), (1, 0, 2)]))


def test_a_trie_of_one_level_has_the_items_below_its_root():
    view = Trie.of(semantic_ids([(4,), (0,), (2,)], sizes=(5,))).view(blocked=array([2]))
    assert walk(view) == {1: (5,), 3: (3,)}


def test_views_do_not_touch_the_trie_they_are_of():
    trie = Trie.of(random_semantic_ids(200, (8, 8)))
    trie.view(among=array([1, 2, 3]), blocked=array([2]))
    trie.view(blocked=array(range(1, 150)))
    assert trie.view().items == 200
    assert trie.view(blocked=array([])).listed is None
