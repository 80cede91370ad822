"""New items without training: where they are placed, which paths they get, and clustering that holds few distances at once."""

import gc
import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import chain
from unicodedata import normalize
from unittest.mock import Mock

import numpy as np
import pytest

from cluster.dataset import Catalogue
from cluster.errors import ConfigError, DataError
from cluster.values import Item
from pipelines import balanced_k_means, new_items
from pipelines.assign_ids import add_items, build_semantic_ids
from pipelines.balanced_k_means import assign, distances_of, squared_distances
from pipelines.new_items import COMMON_LEAST, RESEMBLED, extend_ids, resemblance
from pipelines.titles import title_vectors, with_titles, words_of

KINDS = ("space rocket moon", "garden flower bee")
EACH = 15


def add_item(ids, vector):
    return add_items(ids, np.asarray(vector)[None])


def place(joint, vectors, lengths, learnt=None):
    return new_items.place(resemblance(joint, len(vectors) - 1, learnt), vectors, lengths)


def catalogue(*new):
    """EACH known items of each kind, then new ones of these titles."""
    known = [Item(str(row), f"{KINDS[row // EACH]} w{row}") for row in range(EACH * len(KINDS))]
    return Catalogue([*known, *(Item(f"new {row}", title, {}) for row, title in enumerate(new))])


def kind_vectors(seed=0):
    """Unit vectors: all items of a kind near its axis."""
    rng = np.random.default_rng(seed)
    vectors = np.repeat(np.eye(len(KINDS), 8, dtype=np.float32), EACH, axis=0) + 0.1 * rng.standard_normal((EACH * len(KINDS), 8))
    return np.concatenate([np.zeros((1, 8)), vectors / np.linalg.norm(vectors, axis=1, keepdims=True)]).astype(np.float32)


def test_a_new_item_stands_among_those_of_its_words_and_is_as_long_as_they_are():
    lengths = np.r_[0, np.full(EACH, 2.0), np.full(EACH, 5.0)].astype(np.float32)
    placed = place(catalogue("moon rocket", "the garden"), kind_vectors(), lengths)
    assert placed.vectors.shape == (2, 8)
    assert np.linalg.norm(placed.vectors, axis=1) == pytest.approx(1, abs=1e-6)
    assert placed.vectors[0, 0] > 0.98
    assert placed.vectors[1, 1] > 0.98
    assert placed.lengths.tolist() == [2.0, 5.0]
    assert np.linalg.norm(placed.rows, axis=1) == pytest.approx([2.0, 5.0], abs=1e-5)
    assert placed.unlike == 0


def test_the_vector_is_the_mean_of_the_ten_most_similar_with_a_word_in_common_weighted_by_similarity():
    joint, vectors = catalogue("moon rocket w3", "garden bee w20", "moon flower w9"), kind_vectors()
    words = [words_of(item) for item in joint.items]
    has = np.array([[word in each for word in sorted(set().union(*words))] for each in words])
    rows = has * np.log((1 + len(joint)) / has.sum(axis=0))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    placed = place(joint, vectors, np.ones(2 * EACH + 1, np.float32))
    for vector, similarity, most in zip(placed.vectors, (rows[-3:] @ rows[:-3].T).round(12), (3, 20, 9), strict=True):
        assert similarity.argmax() == most
        best = np.argsort(-similarity, kind="stable")[:RESEMBLED]
        expected = similarity[best] @ vectors[1:][best]
        assert vector == pytest.approx(expected / np.linalg.norm(expected), abs=1e-6)


def test_the_words_of_an_item_are_cut_once_and_of_one_that_does_not_count_never(monkeypatch):
    joint = catalogue("moon rocket", "the garden")
    monkeypatch.setattr(new_items, "words_of", cut := Mock(wraps=words_of))
    resemblance(joint, 2 * EACH, np.arange(4, 2 * EACH + 1))
    assert sorted(call.args[0].title for call in cut.call_args_list) == sorted(item.title for item in joint.items[3:])


def test_an_item_that_shares_no_word_stands_at_the_mean_of_all_known_items():
    vectors, lengths = kind_vectors(), np.arange(2 * EACH + 1, dtype=np.float32)
    placed = place(catalogue("quantum", "quantum", "bee"), vectors, lengths)
    mean = vectors[1:].mean(axis=0)
    assert placed.vectors[:2] == pytest.approx(np.tile(mean / np.linalg.norm(mean), (2, 1)), abs=1e-6)
    assert placed.lengths[0] == pytest.approx(lengths[1:].mean())
    assert placed.unlike == 2


def test_an_item_without_a_title_resembles_none_by_its_id_which_stands_in_the_titles_place():
    vectors = np.eye(4, dtype=np.float32)[[0, 1, 2, 3]] * np.array([[0], [1], [1], [1]], np.float32)
    known = [Item("P-1", "P-1"), Item("P-2", "P-2", {"genre": "drama"}), Item("P-3", "Vitamin P")]
    new = [Item("P-104233", "P-104233"), Item("P-4", "P-4", {"genre": "Drama"}), Item("P-5", "P 1")]
    placed = place(Catalogue([*known, *new]), vectors, np.ones(4, np.float32))
    assert placed.vectors[0] == pytest.approx(np.array([0, 1, 1, 1]) / np.sqrt(3))
    assert placed.vectors[1] == pytest.approx(vectors[2])
    assert placed.vectors[2] == pytest.approx(vectors[3]), "a title's words count"
    assert placed.unlike == 1


def test_a_known_item_with_the_same_words_but_no_events_leaves_a_new_items_vector_as_it_was():
    lengths = np.ones(2 * EACH + 1, np.float32)
    before = place(catalogue("moon rocket", "quantum"), kind_vectors(), lengths)
    unlearnt = [Item(f"no events {row}", "moon rocket quantum") for row in range(3)]
    joint = Catalogue([*unlearnt, *catalogue("moon rocket", "quantum").items])
    vectors = np.concatenate([kind_vectors()[:1], -np.eye(3, 8, dtype=np.float32), kind_vectors()[1:]])
    placed = place(joint, vectors, np.r_[0, 9, 9, 9, lengths[1:]].astype(np.float32), np.arange(4, len(vectors)))
    assert (placed.vectors == before.vectors).all()
    assert (placed.lengths == before.lengths).all()
    assert placed.unlike == before.unlike == 1


def resembled_plainly(joint, known):
    """As `resemblance`, with the sets of all items' words in memory."""
    words = [words_of(item) for item in joint.items]
    counts = Counter(chain.from_iterable(words))
    weights = {word: math.log((1 + len(joint)) / count) ** 2 for word, count in counts.items()}
    norms = np.sqrt([math.fsum(weights[word] for word in each) for each in words])
    for new in range(known, len(joint)):
        having = {word: [row for row in range(known) if word in words[row]] for word in sorted(words[new])}
        similarities = np.zeros(known)
        for word, rows in having.items():
            similarities[rows] += weights[word]
        most = max(new_items.COMMON_LEAST, new_items.COMMON_SHARE * known)
        rare = [rows for rows in having.values() if 0 < len(rows) <= most]
        others = np.array(sorted({*chain.from_iterable(rare or having.values())}), np.int64)
        similarity = similarities[others] / (norms[others] * norms[new])
        best = np.argsort(-similarity, kind="stable")[:RESEMBLED]
        yield 1 + others[best], similarity[best] / similarity[best].sum()


@pytest.mark.parametrize("common", [3, COMMON_LEAST])
@pytest.mark.parametrize("seed", range(10))
def test_items_are_found_as_by_the_sets_of_their_words_be_their_texts_empty(monkeypatch, seed, common):
    monkeypatch.setattr(new_items, "COMMON_LEAST", common)
    rng = np.random.default_rng(seed)
    titles = [" ".join(f"w{number}" for number in rng.integers(0, 30, rng.integers(0, 8))) for _ in range(60)]
    joint = Catalogue([Item(str(row), title, {}) for row, title in enumerate(titles)])
    for found, expected in zip(resemblance(joint, 40).found, resembled_plainly(joint, 40), strict=True):
        assert [each.tolist() for each in found] == [each.tolist() for each in expected]


def peak_bytes(joint, known):
    """The most memory that placing the items after the first `known` takes."""
    vectors = np.ones((known + 1, 2), np.float32)
    gc.collect()
    tracemalloc.start()
    try:
        place(joint, vectors, vectors[:, 0])
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_words_that_no_new_item_has_take_little_memory():
    def peak(items):
        known = [Item(str(row), f"moon a{row} b{row} c{row}") for row in range(items)]
        return peak_bytes(Catalogue([*known, Item("new", "moon")]), items)

    assert (peak(4_000) - peak(1_000)) / 3_000 < 1_500, "bytes an item of three words; a vector of 128 floats for each word is 3,072"


def test_the_words_of_new_items_take_little_memory():
    def peak(items):
        new = [Item(f"new {row}", " ".join(f"w{(7 * row + word) % 1_000}" for word in range(80))) for row in range(items)]
        return peak_bytes(Catalogue([Item("known", "w1"), *new]), 1)

    assert (peak(3_000) - peak(1_000)) / 2_000 < 2_000, "bytes an item of eighty words; the set of them is 8,400"


def test_a_word_that_very_many_have_finds_items_only_where_no_rarer_one_does():
    many = COMMON_LEAST + 1
    known = [Item(str(row), f"w{row // 2}", {"department": "toys"}) for row in range(many)]
    vectors = np.tile(np.eye(2, dtype=np.float32)[1], (many + 1, 1))
    vectors[[601, 602]] = [1, 0]  # the items with the word w300
    with_rare, without, unlike = (
        place(Catalogue([*known, new]), vectors, np.ones(many + 1, np.float32))
        for new in (Item("n1", "w300", {"department": "toys"}), Item("n2", "quantum", {"department": "toys"}), Item("n3", "quantum", {}))
    )
    assert with_rare.vectors[0] == pytest.approx([1, 0], abs=1e-6), "of the ten most similar only two have the word"
    assert without.vectors[0] == pytest.approx([0, 1], abs=1e-6), "of unit length, although a word that all have weighs next to nothing"
    assert [placed.unlike for placed in (with_rare, without, unlike)] == [0, 0, 1]


def test_attributes_count_as_titles_do():
    known = [Item("1", "a1", {"genre": "Western"}), Item("2", "b2", {"genre": "Drama"})]
    vectors = np.eye(3, dtype=np.float32)[[0, 1, 2]] * np.array([[0], [1], [1]], np.float32)
    placed = place(Catalogue([*known, Item("3", "c3", {"genre": "western"})]), vectors, np.ones(3, np.float32))
    assert placed.vectors[0] == pytest.approx(vectors[1])


@pytest.mark.parametrize("weight", [0.0, 0.9])
def test_new_items_get_free_paths_beside_those_they_resemble_whether_titles_were_clustered_or_not(weight):
    known, vectors = catalogue(), kind_vectors()
    ids = build_semantic_ids(with_titles(vectors, known, weight) if weight else vectors, levels=3, codes=4)
    titles = ["aardvark moon rocket space", "flower bee garden", "flower bee garden"]  # a word more, first in the alphabet
    joint = catalogue(*titles)
    placed = place(joint, vectors, np.ones(len(vectors), np.float32))
    grown = extend_ids(ids, np.concatenate([vectors, placed.vectors]), joint, title_weight=weight, learnt=len(known))
    assert (grown.codes[: len(vectors)] == ids.codes).all()
    assert (grown.sizes, grown.items) == (ids.sizes, 2 * EACH + 3)
    assert len({tuple(path) for path in grown.codes[1:].tolist()}) == 2 * EACH + 3
    assert grown.version != ids.version
    assert grown.codes[-3, 0] in ids.codes[1 : EACH + 1, 0]
    assert set(grown.codes[-2:, 0]) <= set(ids.codes[EACH + 1 :, 0])


@pytest.mark.parametrize(
    ("title", "words"),
    [
        ("नीली साड़ी", {"नीली", "साड़ी"}),
        ("নীল শাড়ি", {"নীল", "শাড়ি"}),
        ("நீல புடவை", {"நீல", "புடவை"}),
        ("ผ้าไหม สีน้ำเงิน", {"ผ้าไหม", "สีน้ำเงิน"}),
        ("Red_berry, N7 - a-b!", {"red_berry", "n7", "a", "b"}),
        ("Crème brûlée, a_b-2 ❤️", {"crème", "brûlée", "a_b", "2"}),
        ("ශ්\u200dරී lanka", {"ශ්\u200dරී", "lanka"}),
        ("র\u200d্যাম", {"র\u200d্যাম"}),
        ("نمی\u200cشود a\u200c \u200db", {"نمی\u200cشود", "a", "b"}),
    ],
)
def test_combining_marks_and_joiners_belong_to_words_however_they_are_written(title, words):
    expected = {normalize("NFC", word) for word in words}
    assert words_of(Item("1", normalize("NFC", title))) == words_of(Item("1", normalize("NFD", title))) == expected


def test_words_met_later_leave_the_text_vectors_of_the_learnt_items_as_they_were():
    before, joint = catalogue(), catalogue("aardvark moon")
    assert (title_vectors(joint, len(before))[: len(before) + 1] == title_vectors(before)).all()
    assert not np.allclose(title_vectors(joint)[1], title_vectors(before)[1], atol=0.1)


def test_several_items_at_once_get_the_paths_that_one_after_the_other_would():
    vectors = kind_vectors()
    ids = build_semantic_ids(vectors, levels=3, codes=4)
    new = kind_vectors(seed=1)[[3, 3, 20]]
    one_by_one = ids
    for vector in new:
        one_by_one = add_item(one_by_one, vector)
    assert (add_items(ids, new).codes == one_by_one.codes).all()


def test_however_many_new_items_are_alike_each_is_compared_with_a_levels_codes_once():
    class Compared(np.ndarray):
        times = 0

        def __sub__(self, other):
            Compared.times += self.ndim == 2  # a level's codes, not one of them
            return np.asarray(self) - other

    ids = build_semantic_ids(kind_vectors(), levels=3, codes=16)
    counted = replace(ids, codebooks=tuple(book.view(Compared) for book in ids.codebooks))
    alike = np.repeat(kind_vectors(seed=1)[3:4], 100, axis=0)
    grown = add_items(counted, alike)
    assert len({tuple(path) for path in grown.codes[1:].tolist()}) == 2 * EACH + 100
    assert Compared.times == 100 * len(ids.codebooks)


def test_a_vector_of_another_width_or_ids_without_codebooks_or_nan_are_refused():
    known, vectors = catalogue(), kind_vectors()
    ids = build_semantic_ids(with_titles(vectors, known, 0.5))
    with pytest.raises(DataError, match=r"8 columns does not fit codebooks of 136; .*--title-weight"):
        add_item(ids, vectors[1])
    with pytest.raises(DataError, match="0 codebooks for 3 levels"):
        add_item(replace(ids, codebooks=()), vectors[1])
    with pytest.raises(DataError, match="NaN"):
        add_item(build_semantic_ids(vectors), np.full(8, np.nan))


def test_adding_nothing_changes_nothing():
    ids = build_semantic_ids(kind_vectors())
    assert add_items(ids, np.zeros((0, 8), np.float32)).version == ids.version


def test_blocks_of_distances_give_the_ids_that_the_whole_matrix_gives(monkeypatch):
    vectors = np.random.default_rng(0).integers(-8, 9, (301, 8)).astype(np.float32)
    whole = build_semantic_ids(vectors, levels=3, codes=8)
    rows_at_once, shapes = 7, []

    def counted(points, centroids):
        shapes.append((len(points), len(centroids)))
        return squared_distances(points, centroids)

    monkeypatch.setattr(balanced_k_means, "BLOCK_BYTES", rows_at_once * 8 * 4)
    monkeypatch.setattr(balanced_k_means, "squared_distances", counted)
    assert build_semantic_ids(vectors, levels=3, codes=8).version == whole.version
    assert max(rows * columns for rows, columns in shapes) <= rows_at_once * 8


def test_an_assignment_in_blocks_is_that_of_the_whole_matrix(monkeypatch):
    rng = np.random.default_rng(1)
    points, centroids = (rng.integers(-9, 10, (count, 4)).astype(np.float32) for count in (200, 16))
    whole = assign(squared_distances(points, centroids), 13)
    monkeypatch.setattr(balanced_k_means, "BLOCK_BYTES", 1000)
    lazily = distances_of(points, centroids)
    assert not isinstance(lazily, np.ndarray)
    assert (assign(lazily, 13) == whole).all()
    assert np.bincount(whole).max() <= 13


def test_more_codes_than_a_level_may_have_are_refused():
    with pytest.raises(ConfigError, match="65,537 codes a level are more than 65,536; give fewer, or more levels than 3"):
        build_semantic_ids(kind_vectors(), codes=65_537)
    with pytest.raises(ConfigError, match="more levels than 2"):
        build_semantic_ids(np.zeros((70_001, 1), np.float32), levels=2)
