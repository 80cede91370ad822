"""Freshness and diversity: which of the candidates are recommended, and in which order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.values import StageReport
from pipelines.candidates import Candidates
from pipelines.rerank import FRESHNESS_HALF_LIFE_S, most_diverse, normalised, recency, rerank

NOW = 1_700_000_000
CATALOGUE = 40


def candidates(scores):
    """Items 1, 2, ... with these scores, which must be in order."""
    return Candidates(np.arange(1, len(scores) + 1, dtype=np.int32), np.array(scores, np.float32), StageReport("encode", "x", 1.0))


def unit_vectors(seed, dim=8):
    vectors = np.random.default_rng(seed).normal(size=(CATALOGUE + 1, dim)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def reranked(scores, k, *, diversity=0.0, freshness=0.0, vectors=None, first_seen=None):
    vectors = unit_vectors(0) if vectors is None else vectors
    first_seen = np.full(CATALOGUE + 1, NOW - 10**8) if first_seen is None else first_seen
    return rerank(candidates(scores), k, diversity=diversity, freshness=freshness, vectors_VD=vectors, first_seen_V=first_seen, now=NOW)


pools = st.lists(st.floats(-50, 50, width=32), min_size=0, max_size=CATALOGUE).map(lambda scores: sorted(scores, reverse=True))
shares = st.floats(0, 1)


@given(pools, st.integers(1, 50), shares, shares, st.integers(0, 99))
def test_the_answer_is_k_different_candidates_each_with_its_own_score(scores, k, diversity, freshness, seed):
    found = reranked(scores, k, diversity=diversity, freshness=freshness, vectors=unit_vectors(seed))
    assert len(found.items) == min(k, len(scores))
    assert len(np.unique(found.items)) == len(found.items)
    assert [scores[item - 1] for item in found.items] == found.scores.tolist()


@given(pools, st.integers(1, 50))
def test_without_diversity_and_freshness_nothing_changes(scores, k):
    found = reranked(scores, k)
    assert found.items.tolist() == list(range(1, len(scores) + 1))[:k]


@given(pools.filter(bool), st.integers(1, 50), st.floats(0.01, 1), st.integers(0, 99))
def test_diversity_begins_with_the_most_relevant_item(scores, k, diversity, seed):
    assert reranked(scores, k, diversity=diversity, vectors=unit_vectors(seed)).items[0] == 1


@given(pools, st.integers(1, 20), st.floats(0.01, 1), st.integers(0, 99))
def test_each_next_item_has_the_largest_marginal_relevance(scores, k, diversity, seed):
    """Against the definition, written as slowly as it reads."""
    vectors, relevance = unit_vectors(seed)[1 : len(scores) + 1].astype(np.float64), normalised(np.array(scores, np.float32))
    chosen = most_diverse(relevance, vectors.astype(np.float32), k, diversity).tolist()
    for step, picked in enumerate(chosen):

        def gain(place, before=chosen[:step]):
            redundancy = max(vectors[place] @ vectors[one] for one in before) if before else 0.0
            return (1 - diversity if before else 1) * relevance[place] - diversity * redundancy

        rest = [place for place in range(len(scores)) if place not in chosen[:step]]
        assert gain(picked) >= max(map(gain, rest)) - 1e-5


@given(st.integers(0, 99), st.integers(2, 15))
def test_the_most_diverse_answer_is_less_alike_than_the_most_relevant_one(seed, k):
    vectors, scores = unit_vectors(seed), np.linspace(1, 0, CATALOGUE)
    redundancy = []
    for diversity in (0.0, 1.0):
        chosen = vectors[reranked(scores, k, diversity=diversity, vectors=vectors).items]
        cosines = chosen @ chosen.T
        redundancy.append(max(cosines[step, :step].max() for step in range(1, k)))
    assert redundancy[1] <= redundancy[0] + 1e-6


def test_a_twin_of_the_best_item_gives_way_to_one_of_another_kind():
    vectors = np.zeros((CATALOGUE + 1, 2), np.float32)
    vectors[[1, 2]], vectors[3] = (1, 0), (0, 1)
    assert reranked([1.0, 0.9, 0.0], 2, vectors=vectors).items.tolist() == [1, 2]
    assert reranked([1.0, 0.9, 0.0], 2, diversity=0.6, vectors=vectors).items.tolist() == [1, 3]
    assert reranked([1.0, 0.9, 0.0], 2, diversity=0.2, vectors=vectors).items.tolist() == [1, 2]


@given(st.integers(1, 50), st.floats(0.01, 1), st.integers(0, 99))
def test_only_the_relations_between_scores_count_not_their_scale(k, diversity, seed):
    places, vectors = np.linspace(1, 0, CATALOGUE).astype(np.float32), unit_vectors(seed)
    one, other = [reranked(scores, k, diversity=diversity, vectors=vectors).items for scores in (places, places * 64)]
    assert one.tolist() == other.tolist()


@pytest.mark.parametrize(("age", "fresh"), [(0, 1.0), (FRESHNESS_HALF_LIFE_S, 0.5), (2 * FRESHNESS_HALF_LIFE_S, 0.25), (-100, 1.0)])
def test_recency_halves_with_each_half_life(age, fresh):
    assert recency(np.array([NOW - age]), NOW)[0] == pytest.approx(fresh)


def test_an_item_of_unknown_age_is_not_fresh():
    assert recency(np.array([0]), NOW)[0] == 0


def test_an_item_that_is_met_only_later_is_not_new():
    assert recency(np.array([NOW, NOW + 100_000]), NOW).tolist() == [1, 0]


def test_freshness_lifts_new_items_as_far_as_it_weighs():
    first_seen = np.full(CATALOGUE + 1, NOW - 10 * FRESHNESS_HALF_LIFE_S)
    first_seen[3] = NOW
    for freshness, order in ((0.0, [1, 2, 3]), (0.2, [1, 2, 3]), (0.7, [1, 3, 2]), (0.9, [3, 1, 2])):
        assert reranked([1.0, 0.5, 0.2, 0.0], 3, freshness=freshness, first_seen=first_seen).items.tolist() == order, freshness
