"""Cases of first_gpu.py: each kernel against float64, and against the same in eager PyTorch.

The largest error is relative to the largest magnitude of what is expected, the gradients among it.
"""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import first_gpu_states
from benchmarks.devices import DEVICE, INTERPRETED, described, error_of, kernel_ms, poisoned, worst_error
from benchmarks.guarded import Case, Finding, Label, NotHere
from integrations.hstu.config import HSTUConfig
from integrations.hstu.kernels import reference
from integrations.hstu.time_buckets import ENDS, time_buckets
from tests.kernel_examples import BUCKETS, Example, append_inputs, beside_bucket_edges, exact

LIMITS = {"fp32": 1e-5, "fp32 tf32x3": 2e-5, "fp32 tf32": 5e-3, "fp16": 5e-3, "bf16": 4e-2}
"""The largest error of each type and, of fp32, of each way to multiply it."""
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
WIDTHS = (50, 64, 128, 256)
LENGTHS = (1, 31, 32, 33, 63, 64, 65, 200, 512, 1024)
PASTS = (0, 1, 511, 512, 513)
SPEEDS = ((32, 512, 4, 64), (8, 1024, 8, 64), (32, 1024, 4, 256))
"""Users, events, heads, width of a head."""
TIMED = "tf32x3"
"""How fp32 is multiplied in the cases that are timed: as when serving."""
RESULTS = ("out", "qkv gradient", "position gradient", "time gradient")


def cases(*, quick: bool) -> Iterator[Case]:
    device = DEVICE
    yield Case(Label("device"), lambda: Finding(note=described()))
    yield from _attention(device, (1, 33) if quick else LENGTHS, 1 if quick else 4)
    yield from _append(device, (0, 1, 513) if quick else PASTS, (1, 3, 33) if quick else (1, 3, 16, 33))
    for name in TYPES:
        yield Case(Label("norm_mul_dropout, with gradients", "37 x 50", name), partial(_norm_mul, device, name))
    for name in ("fp16", "bf16"):
        yield Case(Label("gemm_silu", "6752 x 256 x 1024", name), partial(_gemm_silu, device, name))
    yield Case(Label("time buckets beside their edges", dtype="fp32"), partial(_buckets, device))
    yield from first_gpu_states.cases(device, quick=quick)
    for sizes in SPEEDS:
        users, length, heads, width = sizes
        for what, speed in (("attention forward, time", _forward_speed), ("attention with gradients, time", _training_speed)):
            yield Case(Label(what, f"{users} x {length}, {heads} x {width}", f"fp32 {TIMED}"), partial(speed, device, sizes))


def _attention(device: str, lengths: tuple[int, ...], heads: int) -> Iterator[Case]:
    for width in WIDTHS:
        for name in LIMITS:
            sizes = f"{heads} x {width}, {', '.join(map(str, lengths))} rows"
            yield Case(Label("attention, with gradients", sizes, name), partial(_attention_error, device, lengths, heads, width, name))
    label = Label("attention within a window of 40", f"{heads} x 64, 130 rows", "fp32")
    yield Case(label, partial(_attention_error, device, (130,), heads, 64, "fp32", window=40))


def _attention_error(device: str, lengths: tuple[int, ...], heads: int, width: int, name: str, **options: int) -> Finding:
    from integrations.hstu.kernels.attention import attention  # noqa: PLC0415 - imports triton

    _refuse_interpreted(device, name)
    kind, _, precision = name.partition(" ")
    example = Example(lengths, (heads, width, width), device=device, dtype=TYPES[kind], n=max(lengths) + 11)
    with poisoned():
        ours = dict(zip(RESULTS, example.run(attention, precision=precision or "ieee", **options), strict=True))
    error, where = worst_error(ours, dict(zip(RESULTS, example.exact().run(reference.attention, **options), strict=True)))
    return Finding(error, LIMITS[name], note=f"largest in {where}")


def _append(device: str, pasts: tuple[int, ...], counts: tuple[int, ...]) -> Iterator[Case]:
    for name in TYPES:
        for new in counts if name == "fp32" else counts[1:2]:
            sizes = f"2 x 50, {new} behind {', '.join(map(str, pasts))}"
            yield Case(Label("append", sizes, name), partial(_append_error, device, new, pasts, name))


def _append_error(device: str, new: int, pasts: tuple[int, ...], name: str) -> Finding:
    from integrations.hstu.kernels.append import append  # noqa: PLC0415 - imports triton

    _refuse_interpreted(device, name)
    inputs = append_inputs(new, pasts, (2, 50, 50), device, TYPES[name])
    with poisoned():
        ours = append(*inputs)
    return Finding(error_of(ours, reference.append(*exact(inputs))), LIMITS[name])


def _refuse_interpreted(device: str, name: str) -> None:
    if device == "cpu" and name.startswith("fp32 "):
        raise NotHere("Triton's interpreter computes fp32 in one way only")
    if device == "cpu" and name == "bf16":
        raise NotHere("Triton's interpreter does not multiply bf16")


def _norm_mul(device: str, name: str) -> Finding:
    from integrations.hstu.kernels.norm_mul_dropout import norm_mul_dropout  # noqa: PLC0415 - imports triton

    torch.manual_seed(0)
    x, u, out_gradient = (torch.randn(37, 50).to(device, TYPES[name]) for _ in range(3))

    def results(compute: Callable[[Tensor, Tensor], Tensor], given: list[Tensor]) -> dict[str, Tensor]:
        inputs = [one.clone().requires_grad_() for one in given[:2]]
        out = compute(*inputs)
        gradients = torch.autograd.grad(out, inputs, given[2])
        return dict(zip(("out", "x gradient", "u gradient"), (out.detach(), *gradients), strict=True))

    with poisoned():
        ours = results(norm_mul_dropout, [x, u, out_gradient])
    error, where = worst_error(ours, results(reference.norm_mul_dropout, exact((x, u, out_gradient))))
    return Finding(error, LIMITS[name], note=f"largest in {where}")


def _gemm_silu(device: str, name: str) -> Finding:
    from integrations.hstu.kernels.projection import cutlass_availability  # noqa: PLC0415 - beside its kernel

    availability = cutlass_availability(HSTUConfig(items=1, dim=256, heads=4, attention_dim=64, linear_dim=64))
    if not availability.ok:
        raise NotHere(availability.reason)
    from integrations.hstu.kernels.gemm_silu import gemm_silu  # noqa: PLC0415 - imports cutlass

    torch.manual_seed(0)
    kind = TYPES[name]
    x, w = torch.randn(6752, 256).to(device, kind), (torch.randn(256, 1024) / 16).to(device, kind)
    with torch.inference_mode(), poisoned():
        ours = gemm_silu(x, w, kind)
    error = error_of(ours, F.silu(torch.mm(*exact((x, w)))))
    with torch.inference_mode():
        ms, eager_ms = kernel_ms(lambda: gemm_silu(x, w, kind), lambda: F.silu(x @ w))
    return Finding(error, LIMITS[name], ms, eager_ms)


def _buckets(device: str) -> Finding:
    """How many whole seconds beside an edge torch puts into another bucket on the device than they are in."""
    seconds = beside_bucket_edges()
    buckets = np.searchsorted(ENDS, seconds)
    given = torch.from_numpy(seconds).to(device)
    theirs = time_buckets(given.view(1, -1), torch.zeros((1, 1), dtype=torch.int32, device=device), BUCKETS).flatten().cpu().numpy()
    return Finding(note=f"{int((theirs != buckets).sum())} of {len(seconds)} whole seconds are in another bucket")


def _forward_speed(device: str, sizes: tuple[int, int, int, int]) -> Finding:
    with torch.inference_mode():
        ms, eager_ms, ceiling_ms = kernel_ms(*_contenders(device, sizes))
    return Finding(ms=ms, eager_ms=eager_ms, note=f"causal softmax attention in bf16: {ceiling_ms:.3f} ms")


def _training_speed(device: str, sizes: tuple[int, int, int, int]) -> Finding:
    ours, eager, _ = _contenders(device, sizes, requires_grad=True)
    ms, eager_ms = kernel_ms(lambda: _backward(ours()), lambda: _backward(eager()))
    return Finding(ms=ms, eager_ms=eager_ms)


def _backward(out: Tensor) -> None:
    torch.autograd.backward(out.sum())


def _contenders(
    device: str, sizes: tuple[int, int, int, int], *, requires_grad: bool = False
) -> tuple[Callable[[], Tensor], Callable[[], Tensor], Callable[[], Tensor]]:
    """The kernel, the same with the matrix of all rows and keys in eager PyTorch, and softmax attention by torch's fastest."""
    if device == "cpu":
        raise NotHere(INTERPRETED)
    from integrations.hstu.kernels.attention import attention  # noqa: PLC0415 - imports triton

    users, length, heads, width = sizes
    example = Example([length] * users, (heads, width, width), device=device, n=length + 11)
    q, k, v = (one.contiguous().requires_grad_(requires_grad) for one in example.qkv())
    by_user = [one.view(users, length, heads, width).transpose(1, 2) for one in (q, k, v)]
    next_times, times = (one.view(users, length) for one in (example.next_times, example.times))
    brain_q, brain_k, brain_v = (one.detach().bfloat16() for one in by_user)
    distances = torch.arange(length, device=device).unsqueeze(1) - torch.arange(length, device=device)

    def eager() -> Tensor:
        bias = example.tables[0][(length + 10 - distances).clamp(min=0)] + example.tables[1][time_buckets(next_times, times, BUCKETS)]
        weights = F.silu(by_user[0] @ by_user[1].transpose(2, 3) + bias.unsqueeze(1)) / (length + 11)
        return torch.matmul(weights.masked_fill(distances < 0, 0.0), by_user[2])

    return (
        lambda: attention(q, k, v, example.next_times, example.times, example.rows, *example.tables, precision=TIMED),
        eager,
        lambda: F.scaled_dot_product_attention(brain_q, brain_k, brain_v, is_causal=True),
    )
