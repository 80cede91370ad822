"""HSTU as a ranker: candidates see the events and themselves, K and V are kept, and training asks what serving asks."""

import numpy as np
import pytest
import torch

from cluster.errors import ConfigError
from cluster.ranking import Task
from cluster.values import Action, UserSequence
from integrations.hstu.config import RankerConfig, RatingScale
from integrations.hstu.ranker import HSTURanker
from integrations.hstu.ranker_inputs import standard_ratings
from integrations.hstu.torch_ranker import TorchRanker

CONFIG = RankerConfig(
    items=40, dim=8, layers=3, heads=2, attention_dim=4, linear_dim=4, max_length=20, max_history=16,
    tasks=(Task.CLICK, Task.RATING, Task.CART), rating=RatingScale(low=1, high=5, mean=3.5, deviation=1.1),
)  # fmt: skip


@pytest.fixture(scope="module")
def ranker() -> HSTURanker:
    torch.manual_seed(0)
    return HSTURanker(CONFIG).eval()


def history(length: int, seed: int = 0) -> UserSequence:
    rng = np.random.default_rng(seed)
    times = np.sort(rng.integers(0, 10**6, length)) + 1_700_000_000
    actions = rng.choice([Action.RATING.code, Action.CART.code, Action.VIEW.code], length).astype(np.int8)
    values = np.where(actions == Action.RATING.code, rng.integers(1, 6, length), np.nan).astype(np.float32)
    return UserSequence(rng.integers(1, 41, length).astype(np.int32), times, actions, values, request_time=1_700_000_000 + 2 * 10**6)


def until(whole: UserSequence, event: int) -> UserSequence:
    """What was known just before that event."""
    columns = (column[:event] for column in (whole.items, whole.timestamps, whole.actions, whole.values))
    return UserSequence(*columns, request_time=int(whole.timestamps[event]))


@torch.inference_mode()
def test_training_predicts_in_each_place_what_serving_would_have_answered_then(ranker):
    whole, candidates = history(12), torch.tensor([3, 7, 40])
    columns = ranker.collate([whole])
    given = [columns[name] for name in ("items", "actions", "ratings", "times")]
    trained = ranker.predictions(ranker(*given, candidates.expand(1, 12, 3))[0])[0]
    for event in range(12):
        torch.testing.assert_close(trained[event], ranker.after(until(whole, event), candidates), rtol=0, atol=1e-5)


@torch.inference_mode()
def test_a_candidate_knows_nothing_of_the_others(ranker):
    together = ranker.after(history(9), torch.arange(1, 41))
    alone = torch.cat([ranker.after(history(9), torch.tensor([item])) for item in range(1, 41)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kept", [0, 1, 7, 15])
@torch.inference_mode()
def test_events_that_are_appended_have_the_same_keys_and_values(ranker, kept):
    columns = ranker.collate([history(16)])
    given = [columns[name] for name in ("items", "actions", "ratings", "times")]
    kt, v = ranker.append(*given)
    new_kt, new_v = ranker.append(*(column[:, kept:] for column in given), given[3][:, :kept], list(kt[..., :kept]), list(v[..., :kept, :]))
    torch.testing.assert_close(new_kt, kt[..., kept:], rtol=0, atol=1e-6)
    torch.testing.assert_close(new_v, v[..., kept:, :], rtol=0, atol=1e-6)


@torch.inference_mode()
def test_what_was_done_with_an_item_matters_and_what_happens_later_does_not(ranker):
    whole = history(10)
    changed = UserSequence(whole.items, whole.timestamps, np.full(10, Action.LIKE.code, np.int8), whole.values, whole.request_time)
    assert not torch.allclose(ranker.after(whole, torch.tensor([5])), ranker.after(changed, torch.tensor([5])))
    columns = ranker.collate([whole])
    kt, _ = ranker.append(*(columns[name] for name in ("items", "actions", "ratings", "times")))
    fewer, _ = ranker.append(*(columns[name][:, :6] for name in ("items", "actions", "ratings", "times")))
    torch.testing.assert_close(kt[..., :6], fewer, rtol=0, atol=1e-6)


@torch.inference_mode()
def test_ratings_are_predicted_in_the_datas_own_unit_and_the_rest_as_probabilities(ranker):
    predictions = ranker.predictions(torch.tensor([[0.0, 0.0, 50.0], [-50.0, 99.0, 0.0]]))
    np.testing.assert_allclose(predictions, [[0.5, 3.5, 1.0], [0.0, 5.0, 0.5]], atol=1e-6)


def test_ratings_count_in_deviations_from_the_mean_and_other_values_do_not_count():
    actions = np.array([Action.RATING.code, Action.RATING.code, Action.PURCHASE.code, Action.RATING.code], np.int8)
    values = np.array([3.5, 4.6, 99.0, np.nan], np.float32)
    np.testing.assert_allclose(standard_ratings(actions, values, CONFIG.rating), [0, 1, 0, 0], atol=1e-6)


def test_a_newcomer_gets_predictions_too(ranker):
    assert torch.isfinite(ranker.after(history(0), torch.tensor([1, 2]))).all()


@pytest.mark.parametrize("size", [0, -5])
def test_candidates_cannot_be_computed_none_at_a_time(size):
    with pytest.raises(ConfigError, match=rf"micro_batch \({size}\) must be at least 1"):
        TorchRanker(micro_batch=size)


def test_a_number_of_candidates_that_yaml_takes_for_text_is_refused():
    with pytest.raises(ConfigError, match=r"micro_batch \('1e3'\) must be a whole number"):
        TorchRanker(micro_batch="1e3")
