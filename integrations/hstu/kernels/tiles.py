"""What the attention kernels are made of: functions on the device, on a tile of rows (queries) by keys.

A tile has as many rows as keys. Widths that are no power of two are padded up to one and masked.
"""

from typing import Any

import triton
from triton import language as tl

from integrations.hstu.time_buckets import ESTIMATE_WIDTH

# ruff: noqa: PLR0917 - a kernel takes what a C function takes

_ESTIMATE_WIDTH: tl.constexpr = tl.constexpr(ESTIMATE_WIDTH)
_SMALLEST = 16
"""The narrowest operand of a matrix product on a GPU."""
LAUNCH = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": True}
"""How kernels are compiled. The stages double-buffer what a loop loads; fusion of products and sums is named, since its default changes."""


def padded(width: int) -> int:
    """The power of two that holds `width`, at least what a matrix product takes."""
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


def smaller(sizes: dict[str, Any]) -> dict[str, Any]:
    """The same with half the rows in a tile, for a kernel that keeps two sums."""
    return {**sizes, "TILE": max(_SMALLEST, sizes["TILE"] // 2)}


@triton.jit
def load_rows(base: tl.tensor, rows: tl.tensor, stride: tl.tensor, there: tl.tensor, WIDTH: tl.constexpr, TILE: tl.constexpr) -> tl.tensor:
    """A tile (rows, TILE) of rows that are `stride` elements apart; zeros beyond WIDTH and where a row is not there."""
    columns = tl.arange(0, TILE)
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=there[:, None] & (columns < WIDTH)[None, :], other=0.0)


@triton.jit
def store_rows(
    base: tl.tensor, rows: tl.tensor, stride: tl.tensor, there: tl.tensor, tile: tl.tensor, WIDTH: tl.constexpr, TILE: tl.constexpr
) -> None:
    """The opposite of `load_rows`, in the type of what it writes to."""
    columns = tl.arange(0, TILE)
    mask = there[:, None] & (columns < WIDTH)[None, :]
    tl.store(base + rows[:, None] * stride + columns[None, :], tile.to(base.dtype.element_ty), mask=mask)


@triton.jit
def first_key(first: tl.tensor, window: tl.tensor, TILE: tl.constexpr, WINDOWED: tl.constexpr) -> tl.tensor:
    """Where the first tile of keys starts that a tile of rows from `first` on may look at."""
    start = first * 0
    if WINDOWED:
        start = tl.maximum(first - window + 1, 0) // TILE * TILE
    return start


@triton.jit
def time_bucket(next_times: tl.tensor, times: tl.tensor, ends: tl.tensor, last: tl.tensor) -> tl.tensor:
    """The bucket, 0..`last`, of the time from each key's event to the event after each row: see time_buckets.py."""
    seconds = tl.maximum(tl.abs(next_times[:, None] - times[None, :]), 1)
    estimate = (tl.log(seconds.to(tl.float32)) / _ESTIMATE_WIDTH).to(tl.int32)
    return tl.minimum(estimate + (seconds > tl.load(ends + estimate)).to(tl.int32), last)


@triton.jit
def relate(
    rows: tl.tensor,
    keys: tl.tensor,
    rows_there: tl.tensor,
    keys_there: tl.tensor,
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
    """The bias of each (row, key), 0 where they may not meet; the bucket of the time between them; which may meet.

    `rows` and `keys` are positions in a history: no row looks at a key after it nor, where WINDOWED, at one `window` or more before it.
    """
    distance = rows[:, None] - keys[None, :]
    allowed = (distance >= 0) & rows_there[:, None] & keys_there[None, :]
    if WINDOWED:
        allowed = allowed & (distance < window)
    bucket = time_bucket(row_times, key_times, ends, last)
    position = tl.load(position_weights + tl.maximum(n - 1 - distance, 0), mask=allowed, other=0.0)
    return position + tl.load(time_weights + bucket, mask=allowed, other=0.0), bucket, allowed


@triton.jit
def attention_weights(scores: tl.tensor, allowed: tl.tensor, n: tl.tensor) -> tl.tensor:
    """SiLU(scores) / N, 0 where the two may not meet."""
    return tl.where(allowed, scores * tl.sigmoid(scores), 0.0) / n


@triton.jit
def score_gradient(scores: tl.tensor, weight_gradient: tl.tensor, allowed: tl.tensor, n: tl.tensor) -> tl.tensor:
    """The gradient of the scores from that of the attention weights; SiLU' = s + x s (1 - s) with s the sigmoid of x."""
    sigmoid = tl.sigmoid(scores)
    slope = sigmoid * (1.0 + scores * (1.0 - sigmoid))
    return tl.where(allowed, weight_gradient * slope, 0.0) / n
