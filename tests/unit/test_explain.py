"""Explanations: what each stage gave an item, and what of the history it is like."""

import tracemalloc

import numpy as np
import pytest

from cluster.dataset import Catalogue
from cluster.values import Item, StageReport
from pipelines.candidates import Candidates
from pipelines.explain import explain, most_similar

CATALOGUE = Catalogue([Item(f"i{index}", f"Item {index}") for index in range(1, 7)])
ANGLES = np.array([0, 0, 10, 20, 30, 90, 180])  # degrees; item 1 points east, the others ever further away
VECTORS = np.stack([np.cos(np.radians(ANGLES)), np.sin(np.radians(ANGLES))], axis=1).astype(np.float32)


def found(stage, **scores):
    items = np.array([int(name[1:]) for name in scores], np.int32)
    return Candidates(items, np.array(list(scores.values()), np.float32), StageReport(stage, "x", 1.0))


def indices(*items):
    return np.array(items, np.int32)


def test_each_stages_score_stands_in_its_field_and_none_where_it_did_not_find_the_item():
    lists = [found("encode", i1=0.5, i2=0.25), found("generate", i2=-1.5, i3=-2.0), found("blend", i2=-3.0, i1=-4.0, i3=-5.0)]
    why = explain(indices(2, 3), lists, [(), ()])
    assert [(one.retrieval, one.generation, one.blended) for one in why] == [(0.25, -1.5, -3.0), (None, -2.0, -5.0)]
    assert [(one.popularity, one.freshness) for one in why] == [(None, None)] * 2


def test_popularity_and_freshness_have_their_fields():
    (why,) = explain(indices(4), [found("popularity", i4=0.125)], [()], np.array([0.5], np.float32))
    assert (why.popularity, why.freshness, why.retrieval) == (0.125, 0.5, None)


def test_the_three_most_similar_items_of_the_history_are_named_the_most_similar_first():
    (similar,) = most_similar(indices(1), indices(6, 4, 2, 3, 5, 2), VECTORS, CATALOGUE)
    assert [(one.item.title, one.similarity) for one in similar] == [
        ("Item 2", pytest.approx(np.cos(np.radians(10)))),
        ("Item 3", pytest.approx(np.cos(np.radians(20)))),
        ("Item 4", pytest.approx(np.cos(np.radians(30)))),
    ]


def test_an_item_that_comes_back_is_not_explained_by_itself():
    first, second = most_similar(indices(1, 2), indices(1, 2), VECTORS, CATALOGUE)
    assert [one.item.item_id for one in first] == ["i2"]
    assert [one.item.item_id for one in second] == ["i1"]


def test_a_user_without_history_has_no_similar_items_and_no_items_need_no_explanation():
    assert most_similar(indices(1, 2), indices(), VECTORS, CATALOGUE) == [(), ()]
    assert most_similar(indices(), indices(1), VECTORS, CATALOGUE) == []
    assert explain(indices(), [found("encode")], []) == []


def test_of_a_long_history_the_same_items_are_named_as_by_sorting_all_of_it():
    rng = np.random.default_rng(0)
    vectors = rng.integers(-2, 3, (400, 3)).astype(np.float32)  # many are equal
    catalogue = Catalogue([Item(f"i{index}", "") for index in range(1, 400)])
    items, history = indices(*range(1, 50)), indices(*rng.permutation(np.arange(1, 400))[:300])
    met = np.unique(history)
    for item, similar in zip(items, most_similar(items, history, vectors, catalogue), strict=True):
        others = met[met != item]
        expected = others[np.argsort(-(vectors[others] @ vectors[item]), kind="stable")][:3]
        assert [one.item.item_id for one in similar] == [f"i{index}" for index in expected]


def test_what_a_thousand_items_are_like_of_ten_thousand_takes_the_memory_of_a_few_items():
    vectors, catalogue = np.ones((10_001, 4), np.float32), Catalogue([Item(str(index), "") for index in range(10_000)])
    items, history = np.arange(1, 1001, dtype=np.int32), np.arange(1, 10_001, dtype=np.int32)
    most_similar(items[:1], history, vectors, catalogue)
    tracemalloc.start()
    try:
        found = most_similar(items, history, vectors, catalogue)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [one.item.item_id for one in found[-1]] == ["0", "1", "2"]
    assert most < 8e6  # all cosines take 40 MB
