"""HSTU against an independent float64 oracle, and the two traps of serving it."""

import numpy as np
import pytest
import torch

from cluster.values import UserSequence
from integrations.hstu import limits
from integrations.hstu.config import HSTUConfig
from integrations.hstu.meta_checkpoint import from_meta
from integrations.hstu.model import HSTU
from integrations.hstu.user_behavior_schema import collate
from tests.hstu_oracle import hstu_states, meta_state

SIZES = {"base": (2, 1, 20, 20), "many heads": (3, 2, 10, 6)}
DIM, N, ITEMS = 20, 31, 50


def random_history(rng, length):
    times = 1_600_000_000 + np.cumsum(np.exp(rng.uniform(0, 14, length)).astype(np.int64))
    request_time = int(times[-1] + rng.integers(60, 1_000_000))
    items = rng.integers(1, ITEMS + 1, length).astype(np.int32)
    return UserSequence(items, times, np.zeros(length, np.int8), np.full(length, np.nan, np.float32), request_time)


def imported(sizes, seed=0):
    layers, heads, dqk, dv = sizes
    state = meta_state(np.random.default_rng(seed), rows=ITEMS + 1, dim=DIM, layers=layers, heads=heads, dqk=dqk, dv=dv, n=N)
    config = HSTUConfig(items=ITEMS, dim=DIM, layers=layers, heads=heads, attention_dim=dqk, linear_dim=dv, max_length=N, max_history=N - 1)
    tensors = {name: torch.from_numpy(value) for name, value in state.items()}
    return from_meta(tensors, config, range(1, ITEMS + 1)), state, {"layers": layers, "heads": heads, "dqk": dqk, "dv": dv, "n": N}


def states_of(model, sequences):
    batch = collate(sequences, model.config.max_history).tensors()
    with torch.inference_mode():
        return model(batch["items"], batch["times"], batch["next_times"])


@pytest.mark.parametrize("blocks_from", [1, 10**9], ids=["in blocks", "at once"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_agrees_with_the_formula_within_1e_5_at_every_row_of_a_ragged_batch(sizes, blocks_from, monkeypatch):
    monkeypatch.setattr(limits, "WORTH_BLOCKS", blocks_from)
    model, state, shape = imported(sizes)
    rng = np.random.default_rng(7)
    histories = [random_history(rng, length) for length in (1, 2, 17, 30)]
    states = states_of(model, histories)
    for row, history in enumerate(histories):
        expected = hstu_states(state, history.items, history.timestamps.tolist(), history.request_time, **shape)
        assert np.abs(states[row, : len(history)].numpy() - expected).max() < 1e-5


def test_divides_the_attention_by_the_constant_whatever_the_length_of_the_batch():
    model, _, _ = imported(SIZES["base"])
    short = random_history(np.random.default_rng(1), 5)
    alone = states_of(model, [short])
    padded = states_of(model, [short, random_history(np.random.default_rng(2), 30)])
    torch.testing.assert_close(alone[0], padded[0, :5], atol=1e-6, rtol=0)


def test_dividing_by_the_length_instead_would_be_noticed():
    model, state, shape = imported(SIZES["base"])
    history = random_history(np.random.default_rng(1), 5)
    wrong = hstu_states(state, history.items, history.timestamps.tolist(), history.request_time, **shape, divisor=5)
    assert np.abs(states_of(model, [history])[0].numpy() - wrong).max() > 1e-3


def test_the_last_row_depends_on_the_request_time_and_the_rows_before_it_do_not():
    model, _, _ = imported(SIZES["base"])
    now = random_history(np.random.default_rng(3), 8)
    a_year_later = UserSequence(now.items, now.timestamps, now.actions, now.values, now.request_time + 365 * 86400)
    first, second = states_of(model, [now])[0], states_of(model, [a_year_later])[0]
    assert (first[-1] - second[-1]).abs().max() > 1e-3
    torch.testing.assert_close(first[:-1], second[:-1], atol=1e-5, rtol=0)


def test_each_row_uses_the_time_of_the_event_that_follows_it():
    model, _, _ = imported(SIZES["base"])
    history = random_history(np.random.default_rng(4), 9)
    asked_at_the_sixth = UserSequence(
        history.items[:5], history.timestamps[:5], history.actions[:5], history.values[:5], int(history.timestamps[5])
    )
    torch.testing.assert_close(states_of(model, [history])[0, :5], states_of(model, [asked_at_the_sixth])[0], atol=1e-5, rtol=0)


def test_the_training_gradient_of_the_biases_equals_that_of_the_exported_form():
    model, _, _ = imported(SIZES["base"])
    batch = collate([random_history(np.random.default_rng(5), 12)], 30).tensors()
    layer = model.layers[0]
    model(batch["items"], batch["times"], batch["next_times"]).square().mul(torch.arange(DIM)).sum().backward()
    analytic = layer.time_weights.grad.clone()
    bucket = int(analytic.abs().argmax())

    def loss(shift):
        with torch.no_grad():
            layer.time_weights[bucket] += shift
            value = model.double()(batch["items"], batch["times"], batch["next_times"]).square().mul(torch.arange(DIM)).sum()
            layer.time_weights[bucket] -= shift
        return float(value)

    numeric = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert numeric == pytest.approx(float(analytic[bucket]), rel=1e-3)


def test_item_embeddings_start_within_two_standard_deviations():
    torch.manual_seed(0)
    largest = HSTU(HSTUConfig(items=20_000, dim=8)).item_embedding.weight.abs().max().item()
    assert 0.039 < largest <= 0.04
