import numpy as np
import pytest

from cluster.errors import BackendFailed
from cluster.nearest import NearestItems
from cluster.values import EncodeRequest
from tests.bundles import random_sequence


@pytest.fixture
def vectors():
    raw = np.random.default_rng(0).normal(size=(51, 8)).astype(np.float32)
    raw[0] = 0
    return raw / np.maximum(np.linalg.norm(raw, axis=1, keepdims=True), 1e-6)


def ask(vectors, state, top_n, among=None):
    among = None if among is None else np.array(among, np.int32)
    return NearestItems(vectors).answer([EncodeRequest(random_sequence(1), top_n, among)], state[None])[0]


@pytest.mark.parametrize("top_n", [1, 10, 50])
def test_returns_the_same_items_as_a_full_sort(vectors, top_n):
    answer = ask(vectors, vectors[7], top_n)
    expected = np.argsort(-(vectors[1:] @ vectors[7]), kind="stable")[:top_n] + 1
    assert answer.items.tolist() == expected.tolist()
    assert answer.items[0] == 7
    assert answer.scores == pytest.approx(vectors[expected] @ vectors[7])


def test_never_returns_padding_even_when_every_score_is_negative(vectors):
    one_side = np.abs(vectors)
    answer = ask(one_side, -one_side[3], 100)
    assert sorted(answer.items.tolist()) == list(range(1, 51))


def test_orders_equal_scores_by_index_whether_or_not_all_are_asked_for(vectors):
    equal = np.repeat(vectors[:1], 51, axis=0)
    assert ask(equal, vectors[1], 5).items.tolist() == [1, 2, 3, 4, 5]
    assert ask(equal, vectors[1], 50).items.tolist() == list(range(1, 51))


def test_searches_only_among_the_given_items_once_each_and_ignores_what_is_no_item(vectors):
    answer = ask(vectors, vectors[7], 10, among=[9, 7, 7, 0, -3, 51, 30])
    assert set(answer.items.tolist()) == {7, 9, 30}
    assert answer.items[0] == 7


def test_searches_among_nothing_without_complaint(vectors):
    assert ask(vectors, vectors[7], 10, among=[]).items.tolist() == []


def test_keeps_the_order_of_requests_that_search_all_and_part_of_the_catalogue(vectors):
    requests = [EncodeRequest(random_sequence(1), 1, among) for among in (None, np.array([5], np.int32), None)]
    answers = NearestItems(vectors).answer(requests, vectors[[3, 4, 6]])
    assert [answer.items.tolist() for answer in answers] == [[3], [5], [6]]


def test_refuses_a_state_that_is_not_finite(vectors):
    with pytest.raises(BackendFailed, match="not finite"):
        ask(vectors, np.full(8, np.nan, np.float32), 3)
