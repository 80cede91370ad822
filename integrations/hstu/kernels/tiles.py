"""The parts of the attention kernels: functions on the device, on a tile of rows (queries) by keys.

In the forward kernel a tile has as many rows as keys. Widths that are no power of two are padded up to one and masked.
"""

from math import log
from typing import Any

import triton
from triton import language as tl

from integrations.hstu.time_buckets import BUCKET_WIDTH

# ruff: noqa: PLR0917 - a kernel takes what a C function takes

_BITS_OF_ONE: tl.constexpr = tl.constexpr(0x3F800000)
_BUCKETS_AN_OCTAVE: tl.constexpr = tl.constexpr(int(log(2) / BUCKET_WIDTH * 2**9) - 1)
"""Buckets in an octave, in units of 2^-9: the upper 32 bits of the product with octaves in units of 2^-23 are whole buckets. Rounded down,
as the estimate is.
"""
_SIGMOID: tl.constexpr = tl.constexpr("""{
.reg .f32 t;
mul.f32 t, $1, 0fBFB8AA3B;
ex2.approx.ftz.f32 t, t;
add.f32 t, t, 0f3F800000;
rcp.approx.ftz.f32 $0, t;
}""")
_INTERPRETED: tl.constexpr = tl.constexpr(triton.knobs.runtime.interpret)
_SMALLEST = 16
"""The narrowest operand of a matrix product on a GPU."""
LAUNCH = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""How kernels are compiled. The stages double-buffer a loop's loads; fusion of products and sums is named, since its default changes."""


def padded(width: int) -> int:
    """The power of two that holds `width`, at least the narrowest operand of a matrix product."""
    return max(_SMALLEST, int(triton.next_power_of_2(width)))


def head_sizes(heads: int, attention_dim: int, linear_dim: int, element_bytes: int) -> dict[str, Any]:
    """The compile-time sizes of a kernel by name. The larger a row, the fewer in a tile, or its products would not stay in registers."""
    row_bytes = max(padded(attention_dim), padded(linear_dim)) * element_bytes
    return {
        "HEADS": heads,
        "K": attention_dim,
        "W": linear_dim,
        "K_TILE": padded(attention_dim),
        "W_TILE": padded(linear_dim),
        "TILE": 64 if row_bytes <= 128 else 32 if row_bytes <= 256 else 16,
    }


@triton.jit
def load_rows(base: tl.tensor, rows: tl.tensor, stride: tl.tensor, there: tl.tensor, WIDTH: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """A tile (rows, TILE) of rows that are `stride` elements apart; zeros beyond WIDTH and where a row is not there."""
    columns = tl.arange(0, TILE)
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=there[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(
    base: tl.tensor, rows: tl.tensor, stride: tl.tensor, there: tl.tensor, tile: tl.tensor, WIDTH: tl.constexpr, TILE: tl.constexpr
) -> None:
    """The opposite of `load_rows`, in the type of the target."""
    columns = tl.arange(0, TILE)
    mask = there[:, None] & (columns < WIDTH)[None, :]
    tl.store(base + rows[:, None] * stride + columns[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def add_rows(
    base: tl.tensor, rows: tl.tensor, stride: tl.tensor, there: tl.tensor, tile: tl.tensor, WIDTH: tl.constexpr, TILE: tl.constexpr
) -> None:
    """As `store_rows`, but adds to the target, atomically."""
    columns = tl.arange(0, TILE)
    mask = there[:, None] & (columns < WIDTH)[None, :]
    tl.atomic_add(base + rows[:, None] * stride + columns[None, :], tile, mask=mask, sem="relaxed")


@triton.jit
def first_key(first: tl.tensor, window: tl.tensor, TILE: tl.constexpr, WINDOWED: tl.constexpr) -> tl.tensor:
    """Where the first tile of keys starts to which a tile of rows from `first` on may attend."""
    start = first * 0
    if WINDOWED:
        start = tl.maximum(first - window + 1, 0) // TILE * TILE
    return start


@triton.jit
def look_up(table: tl.tensor, index: tl.tensor) -> tl.tensor:
    """The elements of a table of 32-bit numbers, each in the thread that has its index; for a load they would first change threads."""
    if _INTERPRETED:
        found = tl.load(table + index)
    else:
        found = tl.inline_asm_elementwise("ld.global.nc.b32 $0, [$1];", "=r,l", [table + index], dtype=tl.int32, is_pure=True, pack=1)
        found = found.to(table.dtype.element_ty, bitcast=True)
    return found


@triton.jit
def time_bucket(next_times: tl.tensor, times: tl.tensor, ends: tl.tensor, last: tl.tensor) -> tl.tensor:
    """The bucket, 0..`last`, of the time from each key's event to the event after each row: see time_buckets.py. The two are broadcast.

    The bits of a float are an integer that grows with its logarithm to base 2 and is at most 0.0861 octaves, a fifth of a bucket, behind.
    """
    seconds = tl.maximum(tl.abs(next_times - times), 1)
    octaves = seconds.to(tl.float32).to(tl.int32, bitcast=True) - _BITS_OF_ONE
    estimate = tl.umulhi(octaves, _BUCKETS_AN_OCTAVE)
    return tl.minimum(estimate + (seconds > look_up(ends, estimate)).to(tl.int32), last)


@triton.jit
def relate(
    rows: tl.tensor,
    keys: tl.tensor,
    row_times: tl.tensor,
    key_times: tl.tensor,
    position_weights: tl.tensor,
    time_weights: tl.tensor,
    ends: tl.tensor,
    n: tl.tensor,
    last: tl.tensor,
    window: tl.tensor,
    WINDOWED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """For each (row, key): the bias, arbitrary where the row may not attend to the key; the bucket of the time between them; whether it
    may.

    `rows` and `keys` are positions in a history: no row attends to a key after it nor, where WINDOWED, to one `window` or more before it.
    Rows and keys that do not exist need no mask: their weights multiply zeros. Values of rows are broadcast against values of keys.
    """
    distance = rows - keys
    allowed = distance >= 0
    if WINDOWED:
        allowed = allowed & (distance < window)
    bucket = time_bucket(row_times, key_times, ends, last)
    position = look_up(position_weights, n - 1 - tl.minimum(tl.maximum(distance, 0), n - 1))
    return position + look_up(time_weights, bucket), bucket, allowed


@triton.jit
def sigmoid(x: tl.tensor) -> tl.tensor:
    """The sigmoid by the GPU's approximations of 2^x and 1/x, which are off by the last bits; a division would take twice as long."""
    return tl.sigmoid(x) if _INTERPRETED else tl.inline_asm_elementwise(_SIGMOID, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def attention_weights(scores: tl.tensor, allowed: tl.tensor) -> tl.tensor:
    """SiLU(scores), 0 where a row may not attend to a key; the sum over keys is still to be divided by N."""
    return tl.where(allowed, scores * sigmoid(scores), 0.0)
