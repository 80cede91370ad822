"""The Triton kernels against their reference: on the CPU in Triton's interpreter, or on a GPU.

The interpreter is chosen for a whole process, when triton is first imported, so tests/unit/test_kernels.py runs these in processes of their
own. By hand: TRITON_INTERPRET=1 pytest tests/kernel_cases.py, and without the variable where there is a GPU.
"""

import os
from functools import partial

import numpy as np
import pytest
import torch
import triton
from msgspec.structs import replace
from triton import language as tl

from cluster.values import EncodeRequest
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder import TorchEncoder
from integrations.hstu.kernels import reference
from integrations.hstu.kernels.append import append
from integrations.hstu.kernels.attention import attention
from integrations.hstu.kernels.encoder import TritonEncoder
from integrations.hstu.kernels.fused import FusedHSTU
from integrations.hstu.kernels.norm_mul_dropout import norm_mul_dropout
from integrations.hstu.kernels.rows import Rows
from integrations.hstu.kernels.tiles import time_bucket as bucket_on_device
from integrations.hstu.latest_states import latest_states
from integrations.hstu.model import HSTU
from integrations.hstu.time_buckets import ends_on
from tests.bundles import make_bundle, random_sequence
from tests.hstu_oracle import time_bucket
from tests.kernel_examples import BUCKETS, Example, InterpretedEncoder, append_inputs, beside_bucket_edges, ragged, times_of

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")  # older interpreters' own
CASES = {
    "one row": ([1], (1, 50, 50)),
    "ragged": ([1, 130, 2, 17], (1, 50, 50)),
    "full tiles and their neighbours": ([63, 64, 65], (1, 16, 8)),
    "wide heads": ([17, 9], (2, 80, 24)),
    "heads in slices": ([5, 40], (1, 130, 24)),
}
close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


@pytest.fixture
def device():
    """The CPU in Triton's interpreter, or CUDA without it."""
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@triton.jit
def buckets_of(seconds, ends, out, last, TILE: tl.constexpr):
    index = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tl.store(out + index, bucket_on_device(tl.load(seconds + index), tl.zeros((1,), tl.int32), ends, last))


def test_whole_seconds_beside_the_edges_of_buckets_are_in_the_same_bucket_as_everywhere(device):
    edges = beside_bucket_edges()
    seconds = torch.from_numpy(np.resize(edges, -(-len(edges) // 64) * 64)).to(device)
    out = torch.empty_like(seconds)
    buckets_of[(len(seconds) // 64,)](seconds, ends_on(seconds.device), out, BUCKETS, 64)
    assert out.tolist()[: len(edges)] == [time_bucket(int(second)) for second in edges]


@pytest.mark.parametrize(("lengths", "shape"), CASES.values(), ids=CASES)
def test_attention_and_its_gradients_agree_with_the_reference(device, lengths, shape):
    example = Example(lengths, shape, device=device)
    for actual, expected in zip(example.run(attention), example.run(reference.attention), strict=True):
        close(actual, expected)


def test_half_precision_is_as_close_as_its_rounding(device):
    example = Example([66, 2], (1, 16, 8), device=device, dtype=torch.float16)
    actual = example.run(attention)
    example.projected, example.out_gradient = example.projected.float(), example.out_gradient.float()
    assert actual[0].dtype == torch.float16
    for ours, theirs in zip(actual, example.run(reference.attention), strict=True):
        torch.testing.assert_close(ours.float(), theirs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("window", [1, 5, 64, 70])
def test_a_window_hides_what_is_further_back(device, window):
    example = Example([130, 3], (1, 16, 8), device=device)
    for actual, expected in zip(example.run(attention, window=window), example.run(reference.attention, window=window), strict=True):
        close(actual, expected)


def test_padded_rows_give_what_ragged_ones_give_and_zeros_where_they_are_padding(device):
    lengths, width = [3, 70, 1], 75
    ragged = Example(lengths, device=device)
    q, k, v = ragged.qkv()
    there = torch.arange(width, device=device) < ragged.rows.lengths.unsqueeze(1)

    def padded(tensor):
        out = torch.full((*there.shape, *tensor.shape[1:]), 7, dtype=tensor.dtype, device=device)
        out[there] = tensor
        return out.flatten(0, 1)

    columns = [padded(tensor) for tensor in (q, k, v, ragged.next_times, ragged.times)]
    out = attention(*columns, Rows.padded(ragged.rows.lengths, width), *ragged.tables)
    close(out[there.flatten()], attention(q, k, v, ragged.next_times, ragged.times, ragged.rows, *ragged.tables))
    assert not out[~there.flatten()].any()


def test_only_the_gradients_that_are_asked_for_are_given(device):
    example = Example([9], device=device)
    q, k, v = example.qkv()
    table = example.tables[1].clone().requires_grad_()
    attention(q, k, v, example.next_times, example.times, example.rows, example.tables[0], table).sum().backward()
    assert table.grad.any()
    assert example.tables[0].grad is None


def test_shapes_that_do_not_fit_are_refused_before_they_reach_a_gpu():
    q, times, tables = torch.randn(4, 1, 16), torch.zeros(4, dtype=torch.int32), (torch.zeros(21), torch.zeros(129))
    rows = ragged([4])
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
def test_norm_mul_and_its_gradients_agree_with_the_reference(device, shape):
    torch.manual_seed(0)
    x, packed, out_gradient = (
        torch.randn(shape, device=device).requires_grad_(),
        torch.randn(*shape[:-1], 2 * shape[-1], device=device).requires_grad_(),
        torch.randn(shape, device=device),
    )
    u = packed[..., : shape[-1]]
    actual, expected = norm_mul_dropout(x, u), reference.norm_mul_dropout(x, u)
    close(actual, expected)
    for ours, theirs in zip(*(torch.autograd.grad(out, (x, packed), out_gradient) for out in (actual, expected)), strict=True):
        close(ours, theirs)


def test_dropout_drops_its_share_and_the_same_elements_backward(device):
    torch.manual_seed(0)
    x, u, out_gradient = (torch.randn(200, 50, device=device) for _ in range(3))
    x.requires_grad_()
    u.requires_grad_()
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
def test_new_rows_attend_to_what_is_kept_and_to_each_other(device, new, pasts):
    inputs = append_inputs(new, pasts, device=device)
    close(append(*inputs), reference.append(*inputs))


CONFIG = HSTUConfig(items=50, dim=20, layers=3, heads=2, attention_dim=12, linear_dim=8, max_length=90, max_history=80, dropout=0.0)


@pytest.fixture
def models(device):
    """HSTU and the same on the kernels, with weights that make histories matter."""
    torch.manual_seed(0)
    plain = HSTU(CONFIG)
    with torch.no_grad():
        for parameter in plain.parameters():
            parameter.mul_(4)
    fused = FusedHSTU(CONFIG)
    fused.load_state_dict(plain.state_dict())
    return plain.to(device), fused.to(device)


def histories(lengths, device):
    rng, width = np.random.default_rng(1), max(lengths)
    items, times, next_times = np.zeros((len(lengths), width), np.int64), *np.zeros((2, len(lengths), width), np.int32)
    for row, length in enumerate(lengths):
        items[row, :length] = rng.integers(1, CONFIG.items + 1, length)
        times[row, :length], next_times[row, :length] = times_of(rng, length)
    return tuple(torch.from_numpy(array).to(device) for array in (items, times, next_times, np.array(lengths)))


def test_the_model_on_the_kernels_gives_the_states_of_the_model(device, models):
    plain, fused = models
    items, times, next_times, lengths = histories([1, 80, 7], device)
    with torch.inference_mode():
        close(fused(items, times, next_times), plain(items, times, next_times))
        for count in (1, 5):
            expected = latest_states(plain, items, times, next_times, lengths, count)
            close(fused.latest(items, times, next_times, lengths, count), expected)


def test_the_model_on_the_kernels_trains_as_the_model_does(device, models):
    items, times, next_times, _ = histories([5, 30], device)
    gradients = []
    for model in models:
        target = model.item_vectors()[items.roll(-1, 1)]
        loss = ((model(items, times, next_times) - target) ** 2).mean()
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for name, expected, actual in zip(dict(models[0].named_parameters()), *gradients, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-4, msg=lambda message, name=name: f"{name}: {message}")


def test_the_model_on_the_kernels_continues_what_is_kept_as_the_model_does(device, models):
    plain, fused = models
    kept, new = [0, 3, 70], 4
    items, times, next_times, _ = histories([length + new for length in kept], device)
    past_lengths = torch.tensor(kept, device=device)
    rows = past_lengths.unsqueeze(1) + torch.arange(new, device=device)
    with torch.inference_mode():
        _, kts, vs = plain.encode_with_state(items, times, next_times)
        past = times[:, : max(kept)], past_lengths, kts[..., : max(kept)], vs[:, :, :, : max(kept)]
        appended = [column.gather(1, rows) for column in (items, times, next_times)]
        for actual, expected in zip(fused.append(*appended, *past), plain.append(*appended, *past), strict=True):
            close(actual, expected)


def test_dropout_while_training_follows_torchs_seed(device, models):
    _, fused = models
    fused.config = CONFIG.model_copy(update={"dropout": 0.5})
    items, times, next_times, _ = histories([5], device)
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(fused(items, times, next_times))
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


def test_the_encoder_answers_as_the_torch_encoder_does_and_continues_what_it_kept(device, tmp_path):
    bundle = make_bundle(tmp_path / "tiny")
    encoders = (InterpretedEncoder if device == "cpu" else TritonEncoder)(keep_from=1), TorchEncoder(state_bytes=0)
    for encoder in encoders:
        encoder.load(bundle)
    whole, longer = random_sequence(17), random_sequence(20)
    for sequences in ([random_sequence(1), random_sequence(12, seed=3), whole], [prefix(longer, 15)], [longer]):
        requests = [EncodeRequest(sequence, 10, user_id=f"user {row}") for row, sequence in enumerate(sequences)]
        for actual, expected in zip(*(encoder.batch_infer(requests) for encoder in encoders), strict=True):
            assert actual.state == pytest.approx(expected.state, abs=1e-5)
            assert np.array_equal(actual.items, expected.items)
    kept = encoders[0].kept()
    assert (kept["hit_rows"], kept["failures"]) == (14, 0)


@pytest.mark.parametrize("length", [9, 17], ids=["whole", "appended"])
def test_what_the_encoder_recorded_holds_nothing_of_a_user_once_that_user_is_forgotten(device, tmp_path, length):
    ran = {}

    class Listened(InterpretedEncoder if device == "cpu" else TritonEncoder):
        def _recorder(self):
            record = super()._recorder()

            def listened(encode, inputs):
                replay = record(encode, inputs)

                def run():
                    made = replay()
                    ran[tuple(one.shape for one in inputs)] = *inputs, *(made if isinstance(made, tuple) else (made,))
                    return made

                return run

            return listened

    encoder = Listened(keep_from=10)
    encoder.load(make_bundle(tmp_path / "tiny"))
    encoder.infer(EncodeRequest(random_sequence(length), 10, user_id="ann"))
    assert any(one.any() for used in ran.values() for one in used)
    encoder.forget("default", "ann")
    assert not any(one.any() for used in ran.values() for one in used)


def prefix(sequence, length):
    """The first events of a history, asked about when the next one happened."""
    columns = {name: getattr(sequence, name)[:length] for name in ("items", "timestamps", "actions", "values")}
    return replace(sequence, **columns, request_time=int(sequence.timestamps[length]))
