"""HSTU's attention as one kernel forward and one backward: no (rows, keys) matrix is ever in the GPU's memory.

    scores  = q k^T + position_weights[N - 1 - (i - j)] + time_weights[bucket of next_times_i - times_j]
    out     = sum over j <= i of SiLU(scores) / N * v_j

    attention_forward     a tile of rows of a user and head    -> out
    attention_backward    a tile of keys of a user and head    -> the gradients of k and v; its part of those of q and of both bias tables

Backward, five products a tile of scores: q k^T, the weights' gradient, and what k, v and q get of it. The parts are added atomically: those
of q as they are, those of the tables summed up first, along the tile's diagonals for positions and in runs of one bucket for times. Atomic
sums come in any order, which moves the last bits of these gradients from run to run; those of k and v and what is forward stay the same.
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
    add_rows,
    attention_weights,
    first_key,
    head_sizes,
    load_rows,
    padded,
    relate,
    sigmoid,
    store_rows,
)
from integrations.hstu.time_buckets import ends_on

# ruff: noqa: PLR0917 - a kernel takes what a C function takes

ATTENTION_PRODUCTS = "tf32x3"
"""How fp32 is multiplied: as three products of TF32 numbers on tensor cores, as exact as "ieee" and, on an H100,
1.7 to 2.4 times as fast forward."""

_COPIES: tl.constexpr = tl.constexpr(256)
"""How many copies of the time buckets' sums there are: programs that add to the same number wait for each other."""
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
_LONGEST_RUN = 16
_WARP = 32


@dataclass(frozen=True)
class Tiling:
    """How the backward kernel cuts its work, for heads of up to `width` columns."""

    width: int
    keys: int
    rows: int
    part: int
    """The columns of a head that a product over its width takes at a time."""
    slice: int
    """The columns of a head that one launch sums the gradients of."""
    warps: int
    stages: int


BACKWARD = {
    4: (Tiling(64, 32, 32, 64, 64, 4, 1), Tiling(128, 16, 32, 64, 128, 4, 2), Tiling(256, 16, 32, 64, 128, 4, 1)),
    2: (Tiling(64, 32, 32, 64, 64, 4, 2), Tiling(128, 32, 32, 128, 128, 4, 2), Tiling(256, 32, 32, 64, 256, 4, 2)),
}
"""The tilings by the bytes of an element, narrow heads first; on sm_90 next to nothing leaves the registers."""


def backward_launches(heads: int, attention_dim: int, linear_dim: int, element_bytes: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The compile-time sizes of each launch of the backward kernel by name, and how all of them are compiled."""
    k_tile, w_tile = padded(attention_dim), padded(linear_dim)
    widest, choices = max(k_tile, w_tile), BACKWARD[element_bytes]
    tiling = next((choice for choice in choices if widest <= choice.width), choices[-1])
    sizes = {
        "HEADS": heads,
        "K": attention_dim,
        "W": linear_dim,
        "K_TILE": k_tile,
        "W_TILE": w_tile,
        "K_PART": min(k_tile, tiling.part),
        "W_PART": min(w_tile, tiling.part),
        "K_SLICE": min(k_tile, tiling.slice),
        "W_SLICE": min(w_tile, tiling.slice),
        "WHOLE": widest <= min(tiling.part, tiling.slice),
        "KEYS": tiling.keys,
        "ROWS": tiling.rows,
        "RUN": min(_LONGEST_RUN, tiling.keys * tiling.rows // (_WARP * tiling.warps)),
    }
    launches = [{**sizes, "SLICE_FROM": first} for first in range(0, widest, tiling.slice)]
    return launches, {**LAUNCH, "num_warps": tiling.warps, "num_stages": tiling.stages}


@triton.jit
def attention_forward(
    # inputs
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
    # output
    out: tl.tensor,
    # strides
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    # sizes
    n: tl.tensor,
    last: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    # tiling
    K_TILE: tl.constexpr,
    W_TILE: tl.constexpr,
    TILE: tl.constexpr,
    # ways of computing
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
            rows[:, None],
            keys[None, :],
            row_times[:, None],
            key_times[None, :],
            position_weights,
            time_weights,
            ends,
            n,
            last,
            window,
            WINDOWED,
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) + bias
        total += tl.dot(attention_weights(scores, allowed).to(v_tile.dtype), v_tile, input_precision=PRECISION)
    store_rows(out + head * W, start + rows, HEADS * W, rows < length, total / n, W, W_TILE)


@triton.jit
def attention_backward(
    # inputs
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
    # outputs
    q_sums: tl.tensor,
    k_gradient: tl.tensor,
    v_gradient: tl.tensor,
    position_sums: tl.tensor,
    time_sums: tl.tensor,
    # strides
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    # sizes
    n: tl.tensor,
    last: tl.tensor,
    window: tl.tensor,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    # tiling
    K_TILE: tl.constexpr,
    W_TILE: tl.constexpr,
    K_PART: tl.constexpr,
    W_PART: tl.constexpr,
    K_SLICE: tl.constexpr,
    W_SLICE: tl.constexpr,
    SLICE_FROM: tl.constexpr,
    WHOLE: tl.constexpr,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    RUN: tl.constexpr,
    # ways of computing
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """A tile of keys against the tiles of rows that look at them; a tile of scores is (KEYS, ROWS), as the sums over rows multiply it.

    Of wide heads, products over their width are taken by parts, and the gradients of one slice of the width are summed at a time:
    what does not stay in registers costs more than the products that are repeated.
    """
    first = tl.program_id(0) * KEYS
    user = tl.program_id(1) // HEADS
    head = tl.program_id(1) % HEADS
    length = tl.load(lengths + user).to(tl.int32)
    if first >= length:
        return
    start = tl.load(starts + user)
    keys = first + tl.arange(0, KEYS)
    q_from, k_from, v_from, out_from = q + head * q_head, k + head * k_head, v + head * v_head, out_gradient + head * W
    if WHOLE:
        k_tile = load_rows(k_from, start + keys, k_row, keys < length, K, K_TILE)
        v_tile = load_rows(v_from, start + keys, v_row, keys < length, W, W_TILE)
    key_times = tl.load(times + start + keys, mask=keys < length, other=0)
    share = 1.0 / n
    k_total = tl.zeros((KEYS, K_SLICE), tl.float32)
    v_total = tl.zeros((KEYS, W_SLICE), tl.float32)
    own_time_sums = time_sums + (tl.program_id(0) + tl.program_id(1) * tl.num_programs(0)) % _COPIES * (last + 3)
    end = length
    if WINDOWED:
        end = tl.minimum(length, first + KEYS - 1 + window)
    for row in range(first // ROWS * ROWS, end, ROWS):
        rows = row + tl.arange(0, ROWS)
        there = rows < length
        keys_there = (keys < length) & (row >= 0)  # so that keys are loaded in each round anew, not kept in registers from the first on
        row_times = tl.load(next_times + start + rows, mask=there, other=0)
        bias, bucket, allowed = relate(
            rows[None, :],
            keys[:, None],
            row_times[None, :],
            key_times[:, None],
            position_weights,
            time_weights,
            ends,
            n,
            last,
            window,
            WINDOWED,
        )
        if WHOLE:
            q_tile = load_rows(q_from, start + rows, q_row, there, K, K_TILE)
            out_tile = load_rows(out_from, start + rows, HEADS * W, there, W, W_TILE)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) + bias
            weight_gradient = tl.dot(v_tile, tl.trans(out_tile), input_precision=PRECISION)
        else:
            scores = bias + _product(
                k_from, start + keys, k_row, keys_there, q_from, start + rows, q_row, there, KEYS, ROWS, K, K_TILE, K_PART, PRECISION
            )
            weight_gradient = _product(
                v_from, start + keys, v_row, keys_there, out_from, start + rows, HEADS * W, there, KEYS, ROWS, W, W_TILE, W_PART, PRECISION
            )
            q_tile = load_rows(q_from + SLICE_FROM, start + rows, q_row, there, K - SLICE_FROM, K_SLICE)
            out_tile = load_rows(out_from + SLICE_FROM, start + rows, HEADS * W, there, W - SLICE_FROM, W_SLICE)
        s = sigmoid(scores)
        weights = tl.where(allowed, scores * s, 0.0)
        gradient = tl.where(allowed, weight_gradient * (s + scores * s * (1.0 - s)), 0.0)
        v_total += tl.dot(weights.to(out_tile.dtype), out_tile, input_precision=PRECISION)
        k_total += tl.dot(gradient.to(q_tile.dtype), q_tile, input_precision=PRECISION)
        for part in tl.static_range(SLICE_FROM, SLICE_FROM + K_SLICE, K_PART):
            k_part = load_rows(k_from + part, start + keys, k_row, keys_there, K - part, K_PART)
            q_part = tl.dot(tl.trans(gradient.to(k_part.dtype)), k_part, input_precision=PRECISION) * share
            add_rows(q_sums + head * K + part, start + rows, HEADS * K, there, q_part, K - part, K_PART)
        if SLICE_FROM == 0:
            _add_by_distance(gradient, row - first, position_sums, n, KEYS, ROWS)
            _add_by_bucket(gradient, bucket, own_time_sums, KEYS, ROWS, RUN)
    k_to, v_to = k_gradient + head * K + SLICE_FROM, v_gradient + head * W + SLICE_FROM
    store_rows(k_to, start + keys, HEADS * K, keys < length, k_total * share, K - SLICE_FROM, K_SLICE)
    store_rows(v_to, start + keys, HEADS * W, keys < length, v_total * share, W - SLICE_FROM, W_SLICE)


@triton.jit
def _product(
    keys_from: tl.tensor,
    keys: tl.tensor,
    key_stride: tl.tensor,
    keys_there: tl.tensor,
    rows_from: tl.tensor,
    rows: tl.tensor,
    row_stride: tl.tensor,
    rows_there: tl.tensor,
    KEYS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
) -> tl.tensor:
    """What is of keys times what is of rows, (KEYS, ROWS), by parts of their width."""
    product = tl.zeros((KEYS, ROWS), tl.float32)
    for part in tl.static_range(0, TILE, PART):
        left = load_rows(keys_from + part, keys, key_stride, keys_there, WIDTH - part, PART)
        right = load_rows(rows_from + part, rows, row_stride, rows_there, WIDTH - part, PART)
        product += tl.dot(left, tl.trans(right), input_precision=PRECISION)
    return product


@triton.jit
def _add_by_distance(
    gradient: tl.tensor, apart: tl.tensor, position_sums: tl.tensor, n: tl.tensor, KEYS: tl.constexpr, ROWS: tl.constexpr
) -> None:
    """Adds up each diagonal of a tile whose first row stands `apart` positions after its first key.

    Column d of the turned tile holds, of each key, the row d positions after it or, where the tile has none, so many tiles before that.
    """
    place = tl.arange(0, KEYS)[:, None] + tl.arange(0, ROWS)[None, :]
    turned = tl.gather(gradient, place % ROWS, 1)
    for tiles in tl.static_range((KEYS + ROWS - 2) // ROWS + 1):
        distance = apart - tiles * ROWS + tl.arange(0, ROWS)
        sums = tl.sum(tl.where(place // ROWS == tiles, turned, 0.0), 0)
        tl.atomic_add(position_sums + tl.maximum(n - 1 - distance, 0), sums, mask=distance >= 0, sem="relaxed")


@triton.constexpr_function
def _asm_of_run(count: int) -> str:
    """PTX that adds a thread's next `count` numbers to a table: of numbers in a row of one bucket, only the sum is sent to memory.

    Inputs: as many times the table's address; the buckets; the numbers. Outputs: zeros, since there must be some.
    In a tile of a product four numbers in a row are of two keys, two rows each.
    """
    order = sorted(range(count), key=lambda one: (one // 2 % 2, one))
    add = "red.relaxed.gpu.global.add.f32"
    lines = [f"mov.b32 bucket, ${2 * count + order[0]};", f"mov.b32 sum, ${3 * count + order[0]};"]
    for one in order[1:]:
        lines += [
            f"setp.ne.s32 ends, bucket, ${2 * count + one};",
            f"@ends mad.wide.s32 place, bucket, 4, ${count};",
            f"@ends {add} [place+8], sum;",
            "@ends mov.b32 sum, 0;",
            f"add.f32 sum, sum, ${3 * count + one};",
            f"mov.b32 bucket, ${2 * count + one};",
        ]
    lines += [
        f"mad.wide.s32 place, bucket, 4, ${count};",
        f"{add} [place+8], sum;",
        "mov.u32 bucket, %laneid;",
        "setp.eq.s32 ends, bucket, 0;",
        f"mov.f32 sum, {_WARP * count}.0;",
        f"@ends {add} [${count}], sum;",
        *(f"mov.b32 ${one}, 0;" for one in range(count)),
    ]
    return "\n".join(["{", ".reg .pred ends;", ".reg .b32 bucket;", ".reg .f32 sum;", ".reg .b64 place;", *lines, "}"])


@triton.constexpr_function
def _operands_of_run(count: int) -> str:
    return ",".join(kind for kind in ("=&r", "l", "r", "f") for _ in range(count))


@triton.jit
def _add_by_bucket(
    gradient: tl.tensor, bucket: tl.tensor, time_sums: tl.tensor, KEYS: tl.constexpr, ROWS: tl.constexpr, RUN: tl.constexpr
) -> None:
    """Adds each score's gradient to its bucket's sum, RUN of a thread's at a time, and counts what was added and how many scores there are.

    Each thread adds all that it holds, and the compiler may let several hold the same: every score as often as the two counts tell.
    """
    tl.atomic_add(time_sums + 1, 1.0 * KEYS * ROWS, sem="relaxed")
    if _INTERPRETED:
        tl.atomic_add(time_sums + 2 + bucket, gradient, sem="relaxed")
        tl.atomic_add(time_sums, 1.0 * KEYS * ROWS, sem="relaxed")
    else:
        tl.inline_asm_elementwise(
            _asm_of_run(RUN), _operands_of_run(RUN), [time_sums.to(tl.int64), bucket, gradient], dtype=tl.int32, is_pure=False, pack=RUN
        )


def _time_gradient(time_sums: Tensor) -> Tensor:
    """From how many gradients of scores were added, how many scores there are, and the sums by bucket: see `_add_by_bucket`."""
    sums = time_sums.sum(0)
    return sums[2:] * (sums[1] / sums[0].clamp(min=1))


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
        """Arguments of both kernels by name; the sizes of tiles and how it is launched are each one's own."""
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
        }

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """The heads, their widths in q and k and in v, and the bytes of an element."""
        return self.q.shape[1], self.q.shape[2], self.v.shape[2], self.q.element_size()

    def grid(self, tile: int) -> tuple[int, int]:
        return triton.cdiv(self.rows.longest, tile), len(self.rows.starts) * self.q.shape[1]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        call = _Call(*inputs)
        ctx.save_for_backward(*call.inputs, call.rows.starts, call.rows.lengths)
        ctx.longest, ctx.window, ctx.precision = call.rows.longest, call.window, call.precision
        sizes = head_sizes(*call.widths)
        out = torch.zeros(call.v.shape, dtype=call.v.dtype, device=call.v.device)
        attention_forward[call.grid(sizes["TILE"])](out=out, **call.arguments(), **sizes, **LAUNCH)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, starts, lengths = ctx.saved_tensors
        given = [*inputs, Rows(starts, lengths, ctx.longest), ctx.window, ctx.precision]
        call = _Call(*given)
        launches, options = backward_launches(*call.widths)
        k, v, position = (torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) for tensor in inputs[1:4])
        q = torch.zeros(call.q.shape, dtype=torch.float32, device=call.q.device)
        time = torch.zeros((_COPIES.value, 2 + len(call.time_weights)), dtype=torch.float32, device=call.q.device)
        for sizes in launches:
            attention_backward[call.grid(sizes["KEYS"])](
                out_gradient=grads[0].contiguous(),
                q_sums=q,
                k_gradient=k,
                v_gradient=v,
                position_sums=position,
                time_sums=time,
                **call.arguments(),
                **sizes,
                **options,
            )
        n = (len(call.position_weights) + 1) // 2
        return q.to(call.q.dtype), k, v, position / n, _time_gradient(time) / n, None, None, None, None, None


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
    """What each row of each user attends to, (T, H, W), divided by N; 0 in rows that belong to no user.

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
