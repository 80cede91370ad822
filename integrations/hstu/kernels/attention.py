"""HSTU's attention as one kernel forward and three backward: no (rows, keys) matrix is ever in the GPU's memory.

    scores  = q k^T + position_weights[N - 1 - (i - j)] + time_weights[bucket of next_times_i - times_j]
    out     = sum over j <= i of SiLU(scores) / N * v_j

    attention_forward              a tile of rows of a user and head          -> out
    attention_backward_queries     a tile of rows of a user and head          -> the gradient of q
    attention_backward_keys        a tile of keys of a user and head          -> the gradients of k and v
    attention_backward_bias        a tile of rows of a user, all heads        -> the gradients of the two bias tables

The biases are shared by the heads, so their gradient is summed over heads and within a tile first: along its diagonals for positions and
over its buckets for times, which are few in a tile of neighbouring events. Only those sums are added atomically. Atomic sums come in any
order, which moves the last bits of the two tables' gradients from run to run; everything else is deterministic.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton import language as tl

from integrations.hstu.kernels.rows import Rows
from integrations.hstu.kernels.tiles import (
    LAUNCH,
    attention_weights,
    first_key,
    head_sizes,
    load_rows,
    relate,
    score_gradient,
    smaller,
    store_rows,
)
from integrations.hstu.time_buckets import ends_on

# ruff: noqa: PLR0917 - a kernel takes what a C function takes

ATTENTION_PRODUCTS = "tf32x3"
"""How fp32 is multiplied: as three products of TF32 numbers on tensor cores, as exact as "ieee" and, on an H100,
1.7 to 2.4 times as fast forward."""


@triton.jit
def attention_forward(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    next_times: tl.tensor,
    times: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    position_weights: tl.tensor,
    time_weights: tl.tensor,
    ends: tl.tensor,
    out: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    n: tl.tensor,
    last: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    K_TILE: tl.constexpr,
    W_TILE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    first = tl.program_id(0) * TILE
    user = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    length = tl.load(lengths + user).to(tl.int32)
    if first >= length:
        return
    start = tl.load(starts + user)
    rows = first + tl.arange(0, TILE)
    q_tile = load_rows(q + head * q_head, start + rows, q_row, rows < length, K, K_TILE)
    row_times = tl.load(next_times + start + rows, mask=rows < length, other=0)
    total = tl.zeros((TILE, W_TILE), tl.float32)
    for key in range(first_key(first, window, TILE, WINDOWED), tl.minimum(first + TILE, length), TILE):
        keys = key + tl.arange(0, TILE)
        k_tile = load_rows(k + head * k_head, start + keys, k_row, keys < length, K, K_TILE)
        v_tile = load_rows(v + head * v_head, start + keys, v_row, keys < length, W, W_TILE)
        key_times = tl.load(times + start + keys, mask=keys < length, other=0)
        bias, _, allowed = relate(
            rows, keys, rows < length, keys < length, row_times, key_times, position_weights, time_weights, ends, n, last, window, WINDOWED
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) + bias
        total += tl.dot(attention_weights(scores, allowed, n).to(v_tile.dtype), v_tile, input_precision=PRECISION)
    store_rows(out + head * W, start + rows, HEADS * W, rows < length, total, W, W_TILE)


@triton.jit
def attention_backward_queries(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out_gradient: tl.tensor,
    next_times: tl.tensor,
    times: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    position_weights: tl.tensor,
    time_weights: tl.tensor,
    ends: tl.tensor,
    q_gradient: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    n: tl.tensor,
    last: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    K_TILE: tl.constexpr,
    W_TILE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    first = tl.program_id(0) * TILE
    user = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    length = tl.load(lengths + user).to(tl.int32)
    if first >= length:
        return
    start = tl.load(starts + user)
    rows = first + tl.arange(0, TILE)
    q_tile = load_rows(q + head * q_head, start + rows, q_row, rows < length, K, K_TILE)
    out_tile = load_rows(out_gradient + head * W, start + rows, HEADS * W, rows < length, W, W_TILE)
    row_times = tl.load(next_times + start + rows, mask=rows < length, other=0)
    total = tl.zeros((TILE, K_TILE), tl.float32)
    for key in range(first_key(first, window, TILE, WINDOWED), tl.minimum(first + TILE, length), TILE):
        keys = key + tl.arange(0, TILE)
        k_tile = load_rows(k + head * k_head, start + keys, k_row, keys < length, K, K_TILE)
        v_tile = load_rows(v + head * v_head, start + keys, v_row, keys < length, W, W_TILE)
        key_times = tl.load(times + start + keys, mask=keys < length, other=0)
        bias, _, allowed = relate(
            rows, keys, rows < length, keys < length, row_times, key_times, position_weights, time_weights, ends, n, last, window, WINDOWED
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) + bias
        gradient = score_gradient(scores, tl.dot(out_tile, tl.trans(v_tile), input_precision=PRECISION), allowed, n)
        total += tl.dot(gradient.to(k_tile.dtype), k_tile, input_precision=PRECISION)
    store_rows(q_gradient + head * K, start + rows, HEADS * K, rows < length, total, K, K_TILE)


@triton.jit
def attention_backward_keys(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out_gradient: tl.tensor,
    next_times: tl.tensor,
    times: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    position_weights: tl.tensor,
    time_weights: tl.tensor,
    ends: tl.tensor,
    k_gradient: tl.tensor,
    v_gradient: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    n: tl.tensor,
    last: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    K_TILE: tl.constexpr,
    W_TILE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    first = tl.program_id(0) * TILE
    user = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    length = tl.load(lengths + user).to(tl.int32)
    if first >= length:
        return
    start = tl.load(starts + user)
    keys = first + tl.arange(0, TILE)
    k_tile = load_rows(k + head * k_head, start + keys, k_row, keys < length, K, K_TILE)
    v_tile = load_rows(v + head * v_head, start + keys, v_row, keys < length, W, W_TILE)
    key_times = tl.load(times + start + keys, mask=keys < length, other=0)
    k_total = tl.zeros((TILE, K_TILE), tl.float32)
    v_total = tl.zeros((TILE, W_TILE), tl.float32)
    end = length
    if WINDOWED:
        end = tl.minimum(length, first + TILE - 1 + window)
    for row in range(first, end, TILE):
        rows = row + tl.arange(0, TILE)
        q_tile = load_rows(q + head * q_head, start + rows, q_row, rows < length, K, K_TILE)
        out_tile = load_rows(out_gradient + head * W, start + rows, HEADS * W, rows < length, W, W_TILE)
        row_times = tl.load(next_times + start + rows, mask=rows < length, other=0)
        bias, _, allowed = relate(
            rows, keys, rows < length, keys < length, row_times, key_times, position_weights, time_weights, ends, n, last, window, WINDOWED
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) + bias
        gradient = score_gradient(scores, tl.dot(out_tile, tl.trans(v_tile), input_precision=PRECISION), allowed, n)
        k_total += tl.dot(tl.trans(gradient.to(q_tile.dtype)), q_tile, input_precision=PRECISION)
        weights = attention_weights(scores, allowed, n).to(out_tile.dtype)
        v_total += tl.dot(tl.trans(weights), out_tile, input_precision=PRECISION)
    store_rows(k_gradient + head * K, start + keys, HEADS * K, keys < length, k_total, K, K_TILE)
    store_rows(v_gradient + head * W, start + keys, HEADS * W, keys < length, v_total, W, W_TILE)


@triton.jit
def attention_backward_bias(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    out_gradient: tl.tensor,
    next_times: tl.tensor,
    times: tl.tensor,
    starts: tl.tensor,
    lengths: tl.tensor,
    position_weights: tl.tensor,
    time_weights: tl.tensor,
    ends: tl.tensor,
    position_gradient: tl.tensor,
    time_gradient: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    n: tl.tensor,
    last: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    K_TILE: tl.constexpr,
    W_TILE: tl.constexpr,
    TILE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    first = tl.program_id(0) * TILE
    user = tl.program_id(1)
    length = tl.load(lengths + user).to(tl.int32)
    if first >= length:
        return
    start = tl.load(starts + user)
    rows = first + tl.arange(0, TILE)
    row_times = tl.load(next_times + start + rows, mask=rows < length, other=0)
    for key in range(first_key(first, window, TILE, WINDOWED), tl.minimum(first + TILE, length), TILE):
        keys = key + tl.arange(0, TILE)
        key_times = tl.load(times + start + keys, mask=keys < length, other=0)
        bias, bucket, allowed = relate(
            rows, keys, rows < length, keys < length, row_times, key_times, position_weights, time_weights, ends, n, last, window, WINDOWED
        )
        gradient = tl.zeros((TILE, TILE), tl.float32)
        for head in range(HEADS):
            q_tile = load_rows(q + head * q_head, start + rows, q_row, rows < length, K, K_TILE)
            k_tile = load_rows(k + head * k_head, start + keys, k_row, keys < length, K, K_TILE)
            v_tile = load_rows(v + head * v_head, start + keys, v_row, keys < length, W, W_TILE)
            out_tile = load_rows(out_gradient + head * W, start + rows, HEADS * W, rows < length, W, W_TILE)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) + bias
            gradient += score_gradient(scores, tl.dot(out_tile, tl.trans(v_tile), input_precision=PRECISION), allowed, n)
        _add_by_distance(gradient, first - key, position_gradient, n, TILE)
        _add_by_bucket(gradient, bucket, allowed, time_gradient, last)


@triton.jit
def _add_by_distance(gradient: tl.tensor, apart: tl.tensor, position_gradient: tl.tensor, n: tl.tensor, TILE: tl.constexpr) -> None:
    """Adds up each diagonal of a tile whose first row stands `apart` positions after its first key.

    Column d of the turned tile holds, of each row, the key d positions before it or, where there is none in the tile, TILE - d after it.
    """
    row = tl.arange(0, TILE)[:, None]
    column = tl.arange(0, TILE)[None, :]
    turned = tl.gather(gradient, (row - column) & (TILE - 1), 1)
    _add_at_distance(tl.sum(tl.where(row >= column, turned, 0.0), 0), apart + tl.arange(0, TILE), position_gradient, n)
    _add_at_distance(tl.sum(tl.where(row < column, turned, 0.0), 0), apart - TILE + tl.arange(0, TILE), position_gradient, n)


@triton.jit
def _add_at_distance(sums: tl.tensor, distance: tl.tensor, position_gradient: tl.tensor, n: tl.tensor) -> None:
    tl.atomic_add(position_gradient + tl.maximum(n - 1 - distance, 0), sums, mask=distance >= 0)


@triton.jit
def _add_by_bucket(gradient: tl.tensor, bucket: tl.tensor, allowed: tl.tensor, time_gradient: tl.tensor, last: tl.tensor) -> None:
    """Adds up the pairs of each bucket between the tile's least and its greatest."""
    least = tl.min(tl.where(allowed, bucket, last))
    greatest = tl.max(tl.where(allowed, bucket, 0))
    for one in range(least, greatest + 1):
        tl.atomic_add(time_gradient + one, tl.sum(tl.where(bucket == one, gradient, 0.0)))


@dataclass(frozen=True, eq=False)
class _Call:
    """What the forward and the backward kernels are given alike."""

    q: Tensor
    k: Tensor
    v: Tensor
    position_weights: Tensor
    time_weights: Tensor
    next_times: Tensor
    times: Tensor
    rows: Rows
    window: int | None
    precision: str

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.position_weights, self.time_weights, self.next_times, self.times

    def arguments(self) -> dict[str, Any]:
        """Arguments of every kernel by name, and how it is launched."""
        (_, heads, attention_dim), linear_dim = self.q.shape, self.v.shape[2]
        strides = {f"{name}_{axis}": getattr(self, name).stride(i) for name in "qkv" for i, axis in enumerate(("row", "head"))}
        return {
            **{name: getattr(self, name) for name in ("q", "k", "v", "next_times", "times", "position_weights", "time_weights")},
            **strides,
            "ends": ends_on(self.q.device),
            "starts": self.rows.starts,
            "lengths": self.rows.lengths,
            "n": (len(self.position_weights) + 1) // 2,
            "last": len(self.time_weights) - 1,
            "window": self.window or self.rows.longest,
            "WINDOWED": self.window is not None,
            "PRECISION": self.precision,
            **head_sizes(heads, attention_dim, linear_dim, self.q.element_size()),
            **LAUNCH,
        }

    def grid(self, arguments: dict[str, Any], programs_per_tile: int) -> tuple[int, int]:
        return triton.cdiv(self.rows.longest, arguments["TILE"]), len(self.rows.starts) * programs_per_tile


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        call = _Call(*inputs)
        ctx.save_for_backward(*call.inputs, call.rows.starts, call.rows.lengths)
        ctx.longest, ctx.window, ctx.precision = call.rows.longest, call.window, call.precision
        arguments = call.arguments()
        out = torch.zeros(call.v.shape, dtype=call.v.dtype, device=call.v.device)
        attention_forward[call.grid(arguments, arguments["HEADS"])](out=out, **arguments)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, starts, lengths = ctx.saved_tensors
        given = [*inputs, Rows(starts, lengths, ctx.longest), ctx.window, ctx.precision]
        call = _Call(*given)
        arguments = {**call.arguments(), "out_gradient": grads[0].contiguous()}
        for_keys, heads = smaller(arguments), arguments["HEADS"]
        q, k, v, position, time = (torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in inputs[:5])
        if ctx.needs_input_grad[0]:
            attention_backward_queries[call.grid(arguments, heads)](q_gradient=q, **arguments)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            attention_backward_keys[call.grid(for_keys, heads)](k_gradient=k, v_gradient=v, **for_keys)
        if ctx.needs_input_grad[3] or ctx.needs_input_grad[4]:
            attention_backward_bias[call.grid(arguments, 1)](position_gradient=position, time_gradient=time, **arguments)
        return q, k, v, position, time, None, None, None, None, None


def attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THW: Tensor,
    next_times_T: Tensor,
    times_T: Tensor,
    rows: Rows,
    position_weights: Tensor,
    time_weights: Tensor,
    *,
    window: int | None = None,
    precision: str = ATTENTION_PRODUCTS,
) -> Tensor:
    """What each row of each user attends to, (T, H, W), divided by N; 0 in rows of no user.

    q and k (T, H, K), v (T, H, W): all users' rows, divided by `rows`; views of a projection need no copy, as long as the last dimension
    is dense. `next_times_T` and `times_T` (T,), int32 seconds. `position_weights` (2N - 1,), from which N is known, and `time_weights`
    (last bucket + 1,), both fp32. `window`: how many keys a row sees, itself the last of them; None: all.
    `precision`: of fp32 products, on tensor cores "tf32x3" or, with errors of 1e-3, "tf32"; or "ieee".
    Gradients for q, k, v and both tables of weights.

    Raises ValueError where shapes do not fit, which on a GPU would read foreign memory.
    """
    _check(q_THK, k_THK, v_THW, next_times_T, times_T, window)
    q, k, v = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (q_THK, k_THK, v_THW))
    tables = position_weights.contiguous(), time_weights.contiguous()
    out: Tensor = _Attention.apply(  # type: ignore[no-untyped-call]
        q, k, v, *tables, next_times_T.contiguous(), times_T.contiguous(), rows, window, precision
    )
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, next_times: Tensor, times: Tensor, window: int | None) -> None:
    if q.shape != k.shape or q.shape[:2] != v.shape[:2] or not len(times) == len(next_times) == len(q):
        shapes = [tuple(tensor.shape) for tensor in (q, k, v, next_times, times)]
        raise ValueError(f"q, k (T, H, K), v (T, H, W), next_times (T,) and times (T,) have shapes {shapes}, which do not fit together")
    if window is not None and window < 1:
        raise ValueError(f"a window of {window} keys leaves a row without itself; give at least 1")
