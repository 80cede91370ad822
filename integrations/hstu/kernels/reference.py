"""The kernels' results in plain torch, one user at a time; the gradients are torch's own.

Shapes: T rows of all users, L rows of one, P keys, H heads, K and W the widths of a head, N the constant that divides the attention.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from integrations.hstu.kernels.rows import Rows
from integrations.hstu.time_buckets import time_buckets

# ruff: noqa: PLR0917 - what the kernels take

EPSILON = 1e-6


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
) -> Tensor:
    """(T, H, W): SiLU(Q K^T + bias) V / N of each user's rows among themselves, 0 in rows that belong to no user."""
    out = v_THW.new_zeros(v_THW.shape)
    for start, length in zip(rows.starts.tolist(), rows.lengths.tolist(), strict=True):
        own = slice(start, start + length)
        positions = torch.arange(length, device=q_THK.device)
        bias = _bias(positions, positions, next_times_T[own], times_T[own], position_weights, time_weights, window)
        out[own] = _attended(q_THK[own], k_THK[own], v_THW[own], bias, _n(position_weights))
    return out


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
) -> Tensor:
    """(B, S, H, W): new rows attend to their user's kept rows, then to each other."""
    out = []
    for user, past in enumerate(past_lengths_B.tolist()):
        positions = torch.arange(past + q_BSHK.shape[1], device=q_BSHK.device)
        times = torch.cat([past_times_BP[user, :past], times_BS[user]])
        k = torch.cat([past_kt_BHKP[user, :, :, :past].permute(2, 0, 1), k_BSHK[user]])
        v = torch.cat([past_v_BHPW[user, :, :past].transpose(0, 1), v_BSHW[user]])
        bias = _bias(positions[past:], positions, next_times_BS[user], times, position_weights, time_weights, None)
        out.append(_attended(q_BSHK[user], k, v, bias, _n(position_weights)))
    return torch.stack(out)


def gemm_silu(x_MK: Tensor, w_KN: Tensor, dtype: torch.dtype) -> Tensor:
    """(M, N): SiLU(x W), summed in fp32."""
    return F.silu(x_MK.float() @ w_KN.float()).to(dtype)


def norm_mul_dropout(x: Tensor, u: Tensor, *, dropout: float = 0.0, kept: Tensor | None = None) -> Tensor:
    """U * LayerNorm(x) over the last dimension; with `kept`, the others are 0 and these divided by 1 - `dropout`."""
    gated = u * F.layer_norm(x, (x.shape[-1],), eps=EPSILON)
    return gated if kept is None else torch.where(kept, gated / (1 - dropout), 0.0)


def _n(position_weights: Tensor) -> int:
    return (len(position_weights) + 1) // 2


def _bias(
    positions_L: Tensor,
    positions_P: Tensor,
    next_times_L: Tensor,
    times_P: Tensor,
    position_weights: Tensor,
    time_weights: Tensor,
    window: int | None,
) -> Tensor:
    """(L, P), so negative that its SiLU is 0 where a row may not look at a key."""
    distances = positions_L.unsqueeze(1) - positions_P
    buckets = time_buckets(next_times_L.unsqueeze(0), times_P.unsqueeze(0), len(time_weights) - 1).squeeze(0)
    bias = position_weights[(_n(position_weights) - 1 - distances).clamp(min=0)] + time_weights[buckets]
    return bias.masked_fill((distances < 0) | (distances >= (window or len(positions_P))), -1e4)


def _attended(q_LHK: Tensor, k_PHK: Tensor, v_PHW: Tensor, bias_LP: Tensor, n: int) -> Tensor:
    weights_HLP = F.silu(torch.einsum("lhk,phk->hlp", q_LHK, k_PHK) + bias_LP) / n
    return torch.einsum("hlp,phw->lhw", weights_HLP, v_PHW)
