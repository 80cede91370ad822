"""Kept keys and values: what an append answers equals what encoding the whole history answers."""

import numpy as np
import pytest
import torch

from integrations.hstu.config import HSTUConfig
from integrations.hstu.model import HSTU, among_new
from integrations.hstu.user_behavior_schema import collate
from tests.bundles import random_sequence

CONFIG = HSTUConfig(items=200, dim=24, layers=3, heads=2, attention_dim=10, linear_dim=6, max_length=61, max_history=60)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = HSTU(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model


def kept_state(model, sequences, kept):
    """Rows 0..kept-1 of each user, from an encode that ran when event `kept` was the last one known."""
    kts, vs = [], []
    for sequence, count in zip(sequences, kept, strict=True):
        columns = {name: tensor[:, : count + 1] for name, tensor in collate([sequence], 60).tensors().items() if tensor.dim() == 2}
        next_times = columns["next_times"].clone()
        next_times[0, -1] = columns["times"][0, -1] + 17  # the request came 17 s after the last event then
        _, kt, v = model.encode_with_state(columns["items"], columns["times"], next_times)
        kts.append(kt[..., :count])
        vs.append(v[..., :count, :])
    longest = max(kept)
    padded_kt = [torch.nn.functional.pad(kt, (0, longest - kt.shape[-1]), value=9.0) for kt in kts]
    padded_v = [torch.nn.functional.pad(v, (0, 0, 0, longest - v.shape[-2]), value=9.0) for v in vs]
    return torch.cat(padded_kt, dim=1), torch.cat(padded_v, dim=1)


@pytest.mark.parametrize("seed", range(8))
def test_appending_to_kept_state_equals_encoding_everything_over_random_splits(model, seed):
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 60, 4).tolist()
    kept = [int(rng.integers(0, length)) for length in lengths]
    sequences = [random_sequence(length, seed=seed) for length in lengths]
    with torch.inference_mode():
        full = collate(sequences, 60).tensors()
        expected = model(full["items"], full["times"], full["next_times"])
        past_kt, past_v = kept_state(model, sequences, kept)
        new = max(length - count for length, count in zip(lengths, kept, strict=True))
        columns = {name: torch.zeros(4, new, dtype=full[name].dtype) for name in ("items", "times", "next_times")}
        for row, (length, count) in enumerate(zip(lengths, kept, strict=True)):
            for name, column in columns.items():
                column[row, : length - count] = full[name][row, count:length]
        past_times = full["times"][:, : max(kept)]
        states, kt, v = model.append(
            columns["items"], columns["times"], columns["next_times"], past_times, torch.tensor(kept), past_kt, past_v
        )
    for row, (length, count) in enumerate(zip(lengths, kept, strict=True)):
        torch.testing.assert_close(states[row, : length - count], expected[row, count:length], atol=2e-6, rtol=0)
    assert kt.shape == (3, 4, 2, 10, new)
    assert v.shape == (3, 4, 2, new, 6)


def test_a_cold_start_is_an_append_to_nothing(model):
    full = collate([random_sequence(9)], 60).tensors()
    with torch.inference_mode():
        states, kt, v = model.append(
            full["items"], full["times"], full["next_times"], torch.zeros(1, 0, dtype=torch.int32), torch.zeros(1, dtype=torch.int64),
            torch.zeros(3, 1, 2, 10, 0), torch.zeros(3, 1, 2, 0, 6),
        )  # fmt: skip
        expected, expected_kt, expected_v = model.encode_with_state(full["items"], full["times"], full["next_times"])
    torch.testing.assert_close(states, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(kt, expected_kt, atol=1e-6, rtol=0)
    torch.testing.assert_close(v, expected_v, atol=1e-6, rtol=0)


def test_a_long_history_appended_to_nothing_attends_in_blocks_as_an_encoding_does():
    torch.manual_seed(0)
    config = HSTUConfig(items=200, dim=24, layers=3, heads=2, attention_dim=10, linear_dim=6, max_length=300, max_history=300)
    model, columns = HSTU(config).eval(), collate([random_sequence(300, seed=seed) for seed in range(2)], 300).tensors()
    given = columns["items"], columns["times"], columns["next_times"]
    past = torch.zeros(2, 0, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    kept = torch.zeros(3, 2, 2, 10, 0), torch.zeros(3, 2, 2, 0, 6)
    with torch.inference_mode():
        for appended, encoded in zip(model.append(*given, *past, *kept), model.encode_with_state(*given), strict=True):
            torch.testing.assert_close(appended, encoded, atol=1e-6, rtol=0)
    assert len(among_new(config, *given[1:])) == 4
    assert len(among_new(config, *(column[:, :1] for column in given[1:]))) == 1


def test_the_last_row_of_an_old_state_must_not_be_kept(model):
    """Its keys in the upper layers were made with the request's time, not with that of the event that came then."""
    sequence = random_sequence(12)
    full = collate([sequence], 60).tensors()
    with torch.inference_mode():
        _, right, _ = model.encode_with_state(full["items"], full["times"], full["next_times"])
        early = full["next_times"][:, :11].clone()
        early[0, -1] = full["times"][0, 10] + 17
        _, stale, _ = model.encode_with_state(full["items"][:, :11], full["times"][:, :11], early)
    torch.testing.assert_close(stale[..., :10], right[..., :10], atol=1e-6, rtol=0)
    assert (stale[1:, ..., 10] - right[1:, ..., 10]).abs().max() > 1e-4
