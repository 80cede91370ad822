"""The Triton kernels against their reference, in Triton's interpreter.

It is chosen for a whole process, when triton is first imported, so tests/unit/test_kernels.py runs these in a process of its own. By hand:
TRITON_INTERPRET=1 pytest tests/kernel_cases.py
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from cluster.values import Availability, EncodeRequest
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder import TorchEncoder
from integrations.hstu.kernels import reference
from integrations.hstu.kernels.append import append
from integrations.hstu.kernels.attention import attention
from integrations.hstu.kernels.encoder import TritonEncoder
from integrations.hstu.kernels.fused import FusedHSTU
from integrations.hstu.kernels.norm_mul_dropout import norm_mul_dropout
from integrations.hstu.kernels.rows import Rows
from integrations.hstu.latest_states import latest_states
from integrations.hstu.model import HSTU
from tests.bundles import make_bundle, random_sequence

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # older interpreters' own
N, BUCKETS = 211, 128
CASES = {
    "one row": ([1], (1, 50, 50)),
    "ragged": ([1, 130, 2, 17], (1, 50, 50)),
    "full tiles and their neighbours": ([63, 64, 65], (2, 16, 8)),
    "wide heads": ([33, 16], (2, 80, 24)),
}
close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


def times_of(rng, length):
    """When the events of a history happened and when the next ones did, seconds to years before the request."""
    gaps = np.exp(rng.uniform(-1, 16, length)).astype(np.int64)
    times = -np.cumsum(gaps)[::-1]
    return times.astype(np.int32), np.append(times[1:], 0).astype(np.int32)


class Example:
    """Ragged histories, as views of one projection like the model's."""

    def __init__(self, lengths, shape=(2, 16, 8), seed=0):
        heads, attention_dim, linear_dim = shape
        torch.manual_seed(seed)
        rng = np.random.default_rng(seed)
        times = [times_of(rng, length) for length in lengths]
        self.times, self.next_times = (torch.from_numpy(np.concatenate([pair[i] for pair in times])) for i in range(2))
        self.rows = Rows.ragged(torch.tensor([0, *np.cumsum(lengths)]), max(lengths))
        self.projected = torch.randn(sum(lengths), heads * (2 * attention_dim + linear_dim))
        self.widths = [heads * attention_dim, heads * attention_dim, heads * linear_dim]
        self.heads = heads
        self.tables = torch.randn(2 * N - 1), torch.randn(BUCKETS + 1)
        self.out_gradient = torch.randn(sum(lengths), heads, linear_dim)

    def run(self, attend, **options):
        """The output and the gradients of the projection and of both tables."""
        inputs = [tensor.clone().requires_grad_() for tensor in (self.projected, *self.tables)]
        q, k, v = (part.unflatten(1, (self.heads, -1)) for part in inputs[0].split(self.widths, 1))
        out = attend(q, k, v, self.next_times, self.times, self.rows, *inputs[1:], **options)
        return out.detach(), *torch.autograd.grad(out, inputs, self.out_gradient)


@pytest.mark.parametrize(("lengths", "shape"), CASES.values(), ids=CASES)
def test_attention_and_its_gradients_agree_with_the_reference(lengths, shape):
    example = Example(lengths, shape)
    for actual, expected in zip(example.run(attention), example.run(reference.attention), strict=True):
        close(actual, expected)


def test_half_precision_is_as_close_as_its_rounding():
    example = Example([70, 2])
    example.projected, example.out_gradient = example.projected.half(), example.out_gradient.half()
    actual = example.run(attention)
    example.projected, example.out_gradient = example.projected.float(), example.out_gradient.float()
    assert actual[0].dtype == torch.float16
    for ours, theirs in zip(actual, example.run(reference.attention), strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("window", [1, 5, 64, 70])
def test_a_window_hides_what_is_further_back(window):
    example = Example([130, 3])
    for actual, expected in zip(example.run(attention, window=window), example.run(reference.attention, window=window), strict=True):
        close(actual, expected)


def test_padded_rows_give_what_ragged_ones_give_and_zeros_where_they_are_padding():
    lengths, width = [3, 70, 1], 75
    ragged = Example(lengths)
    q, k, v = (part.unflatten(1, (ragged.heads, -1)) for part in ragged.projected.split(ragged.widths, 1))
    there = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)

    def padded(tensor):
        out = torch.full((*there.shape, *tensor.shape[1:]), 7, dtype=tensor.dtype)
        out[there] = tensor
        return out.flatten(0, 1)

    columns = [padded(tensor) for tensor in (q, k, v, ragged.next_times, ragged.times)]
    out = attention(*columns, Rows.padded(torch.tensor(lengths), width), *ragged.tables)
    close(out[there.flatten()], attention(q, k, v, ragged.next_times, ragged.times, ragged.rows, *ragged.tables))
    assert not out[~there.flatten()].any()


def test_only_the_gradients_that_are_asked_for_are_given():
    example = Example([9])
    q, k, v = (part.unflatten(1, (example.heads, -1)) for part in example.projected.split(example.widths, 1))
    table = example.tables[1].clone().requires_grad_()
    attention(q, k, v, example.next_times, example.times, example.rows, example.tables[0], table).sum().backward()
    assert table.grad.any()
    assert example.tables[0].grad is None


def test_shapes_that_do_not_fit_are_refused_before_they_reach_a_gpu():
    q, times, tables = torch.randn(4, 1, 16), torch.zeros(4, dtype=torch.int32), (torch.zeros(21), torch.zeros(129))
    rows = Rows.ragged(torch.tensor([0, 4]), 4)
    with pytest.raises(ValueError, match=r"\(3, 1, 16\).*do not fit together"):
        attention(q, q[:3], q, times, times, rows, *tables)
    with pytest.raises(ValueError, match="window of 0 keys"):
        attention(q, q, q, times, times, rows, *tables, window=0)
    with pytest.raises(ValueError, match=r"x \(4, 16\) and u \(4, 8\)"):
        norm_mul_dropout(torch.randn(4, 16), torch.randn(4, 8))
    with pytest.raises(ValueError, match=r"dropout \(1\)"):
        norm_mul_dropout(torch.randn(4, 16), torch.randn(4, 16), dropout=1)
    past = torch.zeros(1, 1, 16, 0), torch.zeros(1, 1, 0, 16), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"past_lengths has shape \(2,\).*must have \(1,\)"):
        append(*[q.unsqueeze(0)] * 3, *past, times[None], times[None], times[None, :0], *tables)


@pytest.mark.parametrize("shape", [(1, 50), (37, 50), (3, 5, 64), (2, 300)])
def test_norm_mul_and_its_gradients_agree_with_the_reference(shape):
    torch.manual_seed(0)
    x, packed, out_gradient = (
        torch.randn(shape).requires_grad_(),
        torch.randn(*shape[:-1], 2 * shape[-1]).requires_grad_(),
        torch.randn(shape),
    )
    u = packed[..., : shape[-1]]
    actual, expected = norm_mul_dropout(x, u), reference.norm_mul_dropout(x, u)
    close(actual, expected)
    for ours, theirs in zip(*(torch.autograd.grad(out, (x, packed), out_gradient) for out in (actual, expected)), strict=True):
        close(ours, theirs)


def test_dropout_drops_its_share_and_the_same_elements_backward():
    torch.manual_seed(0)
    x, u, out_gradient = torch.randn(200, 50).requires_grad_(), torch.randn(200, 50).requires_grad_(), torch.randn(200, 50)
    actual = norm_mul_dropout(x, u, dropout=0.3, seed=5)
    kept = actual != 0
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.02)
    expected = reference.norm_mul_dropout(x, u, dropout=0.3, kept=kept)
    close(actual, expected)
    for ours, theirs in zip(*(torch.autograd.grad(out, (x, u), out_gradient) for out in (actual, expected)), strict=True):
        close(ours, theirs)
    assert torch.equal(norm_mul_dropout(x, u, dropout=0.3, seed=5), actual)
    assert not torch.equal(norm_mul_dropout(x, u, dropout=0.3, seed=6) != 0, kept)


@pytest.mark.parametrize("new", [1, 3, 20])
@pytest.mark.parametrize("pasts", [[0], [0, 1, 16], [700, 5]], ids=["no past", "short pasts", "a past in two parts"])
def test_new_rows_attend_to_what_is_kept_and_to_each_other(new, pasts):
    torch.manual_seed(new)
    rng, users, past = np.random.default_rng(new), len(pasts), max(pasts)
    histories = [times_of(rng, length + new) for length in pasts]
    times = torch.from_numpy(np.stack([pair[0][-new:] for pair in histories]))
    next_times = torch.from_numpy(np.stack([pair[1][-new:] for pair in histories]))
    past_times = torch.from_numpy(np.stack([np.resize(pair[0][: len(pair[0]) - new], past) if past else pair[0][:0] for pair in histories]))
    q, k, v = (part.unflatten(2, (2, -1)) for part in torch.randn(users, new, 2 * (12 + 12 + 8)).split([24, 24, 16], 2))
    kept = torch.randn(users, 2, 12, past), torch.randn(users, 2, past, 8), torch.tensor(pasts)
    inputs = (q, k, v, *kept, next_times, times, past_times, torch.randn(2 * 1000 - 1), torch.randn(BUCKETS + 1))
    close(append(*inputs), reference.append(*inputs))


CONFIG = HSTUConfig(items=50, dim=20, layers=3, heads=2, attention_dim=12, linear_dim=8, max_length=90, max_history=80, dropout=0.0)


@pytest.fixture
def models():
    """HSTU and the same on the kernels, with weights that make histories matter."""
    torch.manual_seed(0)
    plain = HSTU(CONFIG)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(4)
    fused = FusedHSTU(CONFIG)
    fused.load_state_dict(plain.state_dict())
    return plain, fused


def histories(lengths):
    rng, width = np.random.default_rng(1), max(lengths)
    items, times, next_times = np.zeros((len(lengths), width), np.int64), *np.zeros((2, len(lengths), width), np.int32)
    for row, length in enumerate(lengths):
        items[row, :length] = rng.integers(1, CONFIG.items + 1, length)
        times[row, :length], next_times[row, :length] = times_of(rng, length)
    return tuple(torch.from_numpy(array) for array in (items, times, next_times, np.array(lengths)))


def test_the_model_on_the_kernels_gives_the_states_of_the_model(models):
    plain, fused = models
    items, times, next_times, lengths = histories([1, 80, 7])
    with torch.inference_mode():
        close(fused(items, times, next_times), plain(items, times, next_times))
        for count in (1, 5):
            expected = latest_states(plain, items, times, next_times, lengths, count)
            close(fused.latest(items, times, next_times, lengths, count), expected)


def test_the_model_on_the_kernels_trains_as_the_model_does(models):
    items, times, next_times, _ = histories([5, 30])
    gradients = []
    for model in models:
        target = model.item_vectors()[items.roll(-1, 1)]
        loss = ((model(items, times, next_times) - target) ** 2).mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for name, expected, actual in zip(dict(models[0].named_parameters()), *gradients, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4, msg=lambda message, name=name: f"{name}: {message}")


def test_the_model_on_the_kernels_continues_what_is_kept_as_the_model_does(models):
    plain, fused = models
    kept, new = [0, 3, 70], 4
    items, times, next_times, _ = histories([length + new for length in kept])
    rows = torch.tensor(kept).unsqueeze(1) + torch.arange(new)
    with torch.inference_mode():
        _, kts, vs = plain.encode_with_state(items, times, next_times)
        past = times[:, : max(kept)], torch.tensor(kept), kts[..., : max(kept)], vs[:, :, :, : max(kept)]
        appended = [column.gather(1, rows) for column in (items, times, next_times)]
        for actual, expected in zip(fused.append(*appended, *past), plain.append(*appended, *past), strict=True):
            close(actual, expected)


def test_dropout_while_training_follows_torchs_seed(models):
    _, fused = models
    fused.config = CONFIG.model_copy(update={"dropout": 0.5})
    items, times, next_times, _ = histories([5])
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(fused(items, times, next_times))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


class Interpreted(TritonEncoder):
    """The encoder without its GPU: what it would record as CUDA graphs it runs."""

    device, batches, shortest = "cpu", (1, 2), 10

    def get_availability(self, bundle):
        return Availability.yes()

    def _recorder(self):
        return lambda encode, inputs: lambda: encode(*inputs)


def test_the_encoder_answers_as_the_torch_encoder_does_and_continues_what_it_kept(tmp_path):
    bundle = make_bundle(tmp_path / "tiny")
    encoders = Interpreted(keep_from=1), TorchEncoder(state_bytes=0)
    for encoder in encoders:
        encoder.load(bundle)
    whole, longer = random_sequence(17), random_sequence(20)
    for sequences in ([random_sequence(1), random_sequence(12, seed=3), whole], [prefix(longer, 15)], [longer]):
        requests = [EncodeRequest(sequence, 10, user=f"user {row}") for row, sequence in enumerate(sequences)]
        for actual, expected in zip(*(encoder.batch_infer(requests) for encoder in encoders), strict=True):
            assert actual.state == pytest.approx(expected.state, abs=1e-5)
            assert np.array_equal(actual.items, expected.items)
    kept = encoders[0].kept()
    assert (kept["hit_rows"], kept["failures"]) == (14, 0)


def prefix(sequence, length):
    """The first events of a history, asked about when the next one happened."""
    columns = {name: getattr(sequence, name)[:length] for name in ("items", "timestamps", "actions", "values")}
    return replace(sequence, **columns, request_time=int(sequence.timestamps[length]))
