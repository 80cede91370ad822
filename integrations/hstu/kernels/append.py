"""The attention of new rows to their user's kept rows and to each other, as one kernel: what HSTU.append computes for a layer.

HSTU's attention has no softmax, so it adds up over keys: kept and new keys go into one sum without being copied side by side, and a long
past is split over programs, and their parts are summed. The keys are split, as a serving step has few rows and many keys.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from integrations.hstu.kernels.tiles import LAUNCH, attention_weights, head_sizes, load_rows, relate, store_rows
from integrations.hstu.time_buckets import ends_on

# ruff: noqa: PLR0917 - a kernel takes what a C function takes

_ROWS = 16
SPAN = 512
"""How many kept keys one program walks over; a multiple of every tile."""
APPEND_PRODUCTS = "ieee"
"""How fp32 is multiplied; ATTENTION_PRODUCTS was not tried here."""


@triton.jit
def append_forward(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    past_kt: tl.tensor,
    past_v: tl.tensor,
    next_times: tl.tensor,
    times: tl.tensor,
    past_times: tl.tensor,
    past_lengths: tl.tensor,
    position_weights: tl.tensor,
    time_weights: tl.tensor,
    ends: tl.tensor,
    parts: tl.tensor,
    new: tl.tensor,
    past: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    k_row: tl.tensor,
    k_head: tl.tensor,
    v_row: tl.tensor,
    v_head: tl.tensor,
    n: tl.tensor,
    last: tl.tensor,
    HEADS: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    K_TILE: tl.constexpr,
    W_TILE: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    """One tile of a user's new rows and a head: part p attends to the kept keys from p * SPAN on, part 0 also to the new ones."""
    first = tl.program_id(0) * ROWS
    user = (tl.program_id(1) // HEADS).to(tl.int64)
    head = tl.program_id(1) % HEADS
    part = tl.program_id(2)
    kept = tl.load(past_lengths + user).to(tl.int32)
    start = user * new
    rows = first + tl.arange(0, ROWS)
    columns = tl.arange(0, K_TILE)
    q_tile = load_rows(q + head * q_head, start + rows, q_row, rows < new, K, K_TILE)
    row_times = tl.load(next_times + start + rows, mask=rows < new, other=0)
    total = tl.zeros((ROWS, W_TILE), tl.float32)
    kt_base = past_kt + (user * HEADS + head) * K * past
    v_base = past_v + (user * HEADS + head) * past * W
    for key in range(part * SPAN, tl.minimum(part * SPAN + SPAN, kept), TILE):
        keys = key + tl.arange(0, TILE)
        there = keys < kept
        kt_tile = tl.load(kt_base + columns[:, None] * past + keys[None, :], mask=(columns < K)[:, None] & there[None, :], other=0.0)
        v_tile = load_rows(v_base, keys, W, there, W, W_TILE)
        key_times = tl.load(past_times + user * past + keys, mask=there, other=0)
        bias, _, allowed = relate(
            kept + rows[:, None],
            keys[None, :],
            row_times[:, None],
            key_times[None, :],
            position_weights,
            time_weights,
            ends,
            n,
            last,
            n,
            WINDOWED=False,
        )
        scores = tl.dot(q_tile, kt_tile, input_precision=PRECISION) + bias
        total += tl.dot(attention_weights(scores, allowed).to(v_tile.dtype), v_tile, input_precision=PRECISION)
    for key in range(0, tl.where(part == 0, tl.minimum(first + ROWS, new), 0), TILE):
        keys = key + tl.arange(0, TILE)
        k_tile = load_rows(k + head * k_head, start + keys, k_row, keys < new, K, K_TILE)
        v_tile = load_rows(v + head * v_head, start + keys, v_row, keys < new, W, W_TILE)
        key_times = tl.load(times + start + keys, mask=keys < new, other=0)
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
            n,
            WINDOWED=False,
        )
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) + bias
        total += tl.dot(attention_weights(scores, allowed).to(v_tile.dtype), v_tile, input_precision=PRECISION)
    row_of_part = (part * (tl.num_programs(1) // HEADS) + user) * new + rows
    store_rows(parts + head * W, row_of_part, HEADS * W, rows < new, total / n, W, W_TILE)


def append(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHW: Tensor,
    past_kt_BHKP: Tensor,
    past_v_BHPW: Tensor,
    past_lengths_B: Tensor,
    next_times_BS: Tensor,
    times_BS: Tensor,
    past_times_BP: Tensor,
    position_weights: Tensor,
    time_weights: Tensor,
    *,
    precision: str = APPEND_PRODUCTS,
) -> Tensor:
    """What S new rows of each user attend to, (B, S, H, W), divided by N: the kept rows of their user, then each other, causally.

    q and k (B, S, H, K), v (B, S, H, W), as views of a projection or dense. `past_kt_BHKP` and `past_v_BHPW` hold `past_lengths_B` kept
    rows a user, right-padded; P may be 0. Times are int32 seconds relative to one moment: `next_times_BS`, `times_BS`, `past_times_BP`.
    Tables of weights and `precision` are those of `attention`. Forward only. Raises ValueError where shapes do not fit.
    """
    (users, new, heads, attention_dim), (past, linear_dim) = q_BSHK.shape, past_v_BHPW.shape[2:]
    expected = {
        "k": (k_BSHK, (users, new, heads, attention_dim)),
        "v": (v_BSHW, (users, new, heads, linear_dim)),
        "past_kt": (past_kt_BHKP, (users, heads, attention_dim, past)),
        "past_v": (past_v_BHPW, (users, heads, past, linear_dim)),
        "past_lengths": (past_lengths_B, (users,)),
        "next_times": (next_times_BS, (users, new)),
        "times": (times_BS, (users, new)),
        "past_times": (past_times_BP, (users, past)),
    }
    for name, (tensor, shape) in expected.items():
        if tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; beside q of {tuple(q_BSHK.shape)} it must have {shape}")
    q, k, v = (_rows(tensor) for tensor in (q_BSHK, k_BSHK, v_BSHW))
    spans = max(1, triton.cdiv(past, SPAN))
    parts = torch.empty((spans, users, new, heads, linear_dim), dtype=torch.float32, device=q.device)
    append_forward[(triton.cdiv(new, _ROWS), users * heads, spans)](
        q=q,
        k=k,
        v=v,
        past_kt=past_kt_BHKP.contiguous(),
        past_v=past_v_BHPW.contiguous(),
        next_times=next_times_BS.contiguous(),
        times=times_BS.contiguous(),
        past_times=past_times_BP.contiguous(),
        past_lengths=past_lengths_B,
        position_weights=position_weights,
        time_weights=time_weights,
        ends=ends_on(q.device),
        parts=parts,
        new=new,
        past=past,
        q_row=q.stride(0),
        q_head=q.stride(1),
        k_row=k.stride(0),
        k_head=k.stride(1),
        v_row=v.stride(0),
        v_head=v.stride(1),
        n=(len(position_weights) + 1) // 2,
        last=len(time_weights) - 1,
        PRECISION=precision,
        **append_sizes(heads, attention_dim, linear_dim, q.element_size()),
        **LAUNCH,
    )
    return (parts[0] if spans == 1 else parts.sum(0)).to(v.dtype)


def append_sizes(heads: int, attention_dim: int, linear_dim: int, element_bytes: int) -> dict[str, int]:
    """The compile-time sizes of the kernel by name."""
    return {**head_sizes(heads, attention_dim, linear_dim, element_bytes), "ROWS": _ROWS, "SPAN": SPAN}


def _rows(x_BSHK: Tensor) -> Tensor:
    """(B * S, H, K), copied only where the last dimension is not dense or the users' rows do not follow each other evenly."""
    flat = x_BSHK.flatten(0, 1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()
