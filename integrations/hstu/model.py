"""HSTU, the research variant for retrieval ("Actions Speak Louder than Words", arXiv 2402.17152, section 3).

    A = SiLU(Q K^T + bias) / N, causal          N is the constant `config.max_length`, for batches of any length
    y = W_o dropout(U * LayerNorm(A V)) + b + x

The attention has no softmax, hence adds up over blocks of keys: kept keys and values of old events and those of new events are summed
without concatenation, and a mask is a very negative bias (SiLU of it is 0). Rows attend in blocks, to the keys up to the block's end: four
blocks leave out three eighths of all pairs, which a mask would hide, and less memory is in use at a time.

Shapes: B users, L or S rows (events), P past rows, H heads, K = `attention_dim`, W = `linear_dim`, D = `dim`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from integrations.hstu.config import HSTUConfig
from integrations.hstu.limits import block_ends, blocks_worth, row_blocks
from integrations.hstu.sequence_model import SequenceModel, heads_apart, heads_joined, unit
from integrations.hstu.time_buckets import time_buckets

_MASKED = -1e4
_EPSILON = 1e-6


class _Lookup(torch.autograd.Function):
    """`weights[index]` whose gradient is one scatter; that of F.embedding takes half of a training step on a CPU."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = len(weights)
        return weights[index]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.size).scatter_add_(0, index.flatten().long(), grads[0].flatten()), None


def lookup(weights: Tensor, index: Tensor) -> Tensor:
    """`weights[index]` for weights (n,).

    Outside of eager training it is written so that it exports as Gather: GatherND costs a quarter of a small model's time.
    """
    if torch.is_grad_enabled() and weights.requires_grad and not torch.compiler.is_compiling():
        found: Tensor = _Lookup.apply(weights, index)  # type: ignore[no-untyped-call]
        return found
    return F.embedding(index, weights.unsqueeze(1)).squeeze(-1)


@dataclass(frozen=True, eq=False)
class Attended:
    """What a block of rows looks at: the time bucket and the distance of each (row, key). A row never looks at a key behind it."""

    buckets: Tensor  # (B, rows, keys)
    distances: Tensor  # (rows, keys) or (B, rows, keys): how many positions before the row the key stands, less than N; negative: behind
    allowed: Tensor | None = None  # broadcasts with `distances`: which of the pairs count, where not all do


def causal(config: HSTUConfig, times_BL: Tensor, next_times_BL: Tensor) -> list[Attended]:
    """Rows that look at themselves and at the rows before them, in blocks; a block has the keys up to its last row."""
    users, length = times_BL.shape
    exporting = torch.onnx.is_in_onnx_export()
    blocks = row_blocks(config.max_history) if exporting else blocks_worth(config, users, length, on_gpu=times_BL.is_cuda)
    ends = block_ends(length, blocks)
    rows_L = torch.arange(length, device=times_BL.device)
    return [
        Attended(
            time_buckets(next_times_BL[:, first:end], times_BL[:, :end], config.time_buckets),
            rows_L[first:end].unsqueeze(1) - rows_L[:end],
        )
        for first, end in pairwise(ends)
    ]


def in_one_block(config: HSTUConfig, times_BS: Tensor, next_times_BS: Tensor) -> list[Attended]:
    """As `causal`, all rows in one block."""
    rows_S = torch.arange(times_BS.shape[1], device=times_BS.device)
    return [Attended(time_buckets(next_times_BS, times_BS, config.time_buckets), rows_S.unsqueeze(1) - rows_S)]


def among_new(config: HSTUConfig, times_BS: Tensor, next_times_BS: Tensor) -> list[Attended]:
    """What S new rows see of each other; kept keys are in `Past`. One block while exporting or compiling: the number of blocks is fixed
    then, and S may be 1.
    """
    fixed = torch.onnx.is_in_onnx_export() or torch.compiler.is_compiling()
    return (in_one_block if fixed else causal)(config, times_BS, next_times_BS)


class HSTULayer(nn.Module):
    """One layer: pointwise projection, attention without softmax, gated output."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.config = config
        self.widths = [config.linear_dim * config.heads] * 2 + [config.attention_dim * config.heads] * 2
        self.uvqk = nn.Parameter(torch.empty(config.dim, sum(self.widths)).normal_(std=0.02))
        self.output = nn.Linear(config.linear_dim * config.heads, config.dim)
        nn.init.xavier_uniform_(self.output.weight)
        self.position_weights = nn.Parameter(torch.empty(2 * config.max_length - 1).normal_(std=0.02))
        self.time_weights = nn.Parameter(torch.empty(config.time_buckets + 1).normal_(std=0.02))

    def project(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """U (B, L, H*W), V (B, H, L, W), Q (B, H, L, K) and K^T (B, H, K, L)."""
        u, v, q, k = torch.split(F.silu(self._normed(x_BLD) @ self.uvqk), self.widths, dim=-1)
        return u, self._values(v), self._by_head(q), self._by_head(k).transpose(2, 3)

    def keys(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """K^T (B, H, K, L) and V (B, H, L, W) of rows that do not attend themselves."""
        v, k = self._projections(x_BLD, 1, 3)
        return self._by_head(k).transpose(2, 3), self._values(v)

    def queries(self, x_BLD: Tensor) -> tuple[Tensor, Tensor]:
        """U (B, L, H*W) and Q (B, H, L, K) of rows to which no row attends."""
        u, q = self._projections(x_BLD, 0, 2)
        return u, self._by_head(q)

    def bias(self, attended: Attended) -> Tensor:
        """Relative position and time bias with the mask folded in, (B, rows, keys); shared by the heads."""
        n = self.config.max_length
        behind = self.position_weights.new_full((n - 1,), _MASKED)
        position = lookup(torch.cat([self.position_weights[:n], behind]), n - 1 - attended.distances)
        if attended.allowed is not None:
            position = position.masked_fill(~attended.allowed, _MASKED)
        return position + lookup(self.time_weights, attended.buckets)

    def attend(self, q: Tensor, kt: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """(B, H, rows, W): each row's sum over these keys, already divided by N."""
        return (F.silu(q @ kt + bias.unsqueeze(1)) @ v) / self.config.max_length

    def attend_causally(self, q: Tensor, kt: Tensor, v: Tensor, blocks: Sequence[Attended]) -> Tensor:
        """(B, H, L, W): each row's sum over itself and the rows before it."""
        if len(blocks) == 1:
            return self.attend(q, kt, v, self.bias(blocks[0]))
        ends = [block.buckets.shape[2] for block in blocks]
        starts = [0, *ends[:-1]]
        return torch.cat(
            [
                self.attend(q[:, :, start:end], kt[..., :end], v[:, :, :end], self.bias(block))
                for start, end, block in zip(starts, ends, blocks, strict=True)
            ],
            dim=2,
        )

    def gate(self, x_BLD: Tensor, u: Tensor, attention_BHLW: Tensor) -> Tensor:
        """The layer's output (B, L, D) from what its rows attended to."""
        mixed = heads_joined(attention_BHLW, self.output.in_features)
        gated = u * F.layer_norm(mixed, (self.output.in_features,), eps=_EPSILON)
        out: Tensor = self.output(F.dropout(gated, self.config.dropout, self.training))
        return out + x_BLD

    def forward(self, x_BLD: Tensor, attended: Sequence[Attended], past: "Past | None" = None) -> tuple[Tensor, Tensor, Tensor]:
        """The output (B, L, D) of rows that attend to each other and to kept rows; their K^T (B, H, K, L) and V (B, H, L, W)."""
        u, v, q, kt = self.project(x_BLD)
        attention = self.attend_causally(q, kt, v, attended)
        if past is not None:
            attention = attention + self.attend(q, past.kt, past.v, self.bias(past.attended))
        return self.gate(x_BLD, u, attention), kt, v

    def _normed(self, x_BLD: Tensor) -> Tensor:
        return F.layer_norm(x_BLD, (self.config.dim,), eps=_EPSILON)

    def _projections(self, x_BLD: Tensor, *parts: int) -> list[Tensor]:
        """The given `parts` of U, V, Q and K."""
        normed, ends = self._normed(x_BLD), list(accumulate(self.widths))
        return [F.silu(normed @ self.uvqk[:, ends[part] - self.widths[part] : ends[part]]) for part in parts]  # a Split is not folded

    def _by_head(self, x_BLD: Tensor) -> Tensor:
        """Q or K (B, H, L, K)."""
        return heads_apart(x_BLD, self.config.heads, self.config.attention_dim)

    def _values(self, x_BLD: Tensor) -> Tensor:
        """V (B, H, L, W)."""
        return heads_apart(x_BLD, self.config.heads, self.config.linear_dim)


@dataclass(frozen=True, eq=False)
class Past:
    """One layer's kept keys K^T (B, H, K, P) and values (B, H, P, W), and what the new rows may look at among them."""

    attended: Attended
    kt: Tensor
    v: Tensor


class HSTU(SequenceModel):
    """Hierarchical Sequential Transduction Unit."""

    config: HSTUConfig
    config_type: ClassVar = HSTUConfig

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))

    def transform(self, x_BLD: Tensor, times_BL: Tensor, next_times_BL: Tensor) -> Tensor:
        attended = causal(self.config, times_BL, next_times_BL)
        for layer in self.layers:
            x_BLD, _, _ = layer(x_BLD, attended)
        return x_BLD

    def encode_with_state(self, items_BL: Tensor, times_BL: Tensor, next_times_BL: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`forward`'s states and every layer's K^T (layers, B, H, K, L) and V (layers, B, H, L, W).

        Of a user with n events keep rows 0..n-2 only: the last row's output, hence its keys and values in higher layers, depends on the
        time of the next event, which is not known yet. Give that row to `append` again.
        """
        x = self.embed(items_BL, torch.arange(items_BL.shape[1], device=items_BL.device))
        attended = causal(self.config, times_BL, next_times_BL)
        kts, vs = [], []
        for layer in self.layers:
            x, kt, v = layer(x, attended)
            kts.append(kt)
            vs.append(v)
        return unit(x), torch.stack(kts), torch.stack(vs)

    def append(  # noqa: PLR0917 - the order is the exported graph's
        self,
        items_BS: Tensor,
        times_BS: Tensor,
        next_times_BS: Tensor,
        past_times_BP: Tensor,
        past_lengths_B: Tensor,
        past_kt: Tensor | Sequence[Tensor],
        past_v: Tensor | Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """States (B, S, D), K^T (layers, B, H, K, S) and V (layers, B, H, S, W) of rows that follow kept ones.

        `past_kt` (layers, B, H, K, P) and `past_v` (layers, B, H, P, W), or one tensor a layer, hold `past_lengths_B` rows a user,
        right-padded; P may be 0.
        All times are relative to one moment, the request; a padded new row's output means nothing.
        """
        rows_S = torch.arange(items_BS.shape[1], device=items_BS.device)
        positions_BS = past_lengths_B.unsqueeze(1) + rows_S
        new = among_new(self.config, times_BS, next_times_BS)
        past = self._past(positions_BS, past_lengths_B, past_times_BP, next_times_BS)
        x = self.embed(items_BS, positions_BS.clamp(max=self.config.max_length - 1))
        kts, vs = [], []
        for index, layer in enumerate(self.layers):
            x, kt, v = layer(x, new, Past(past, past_kt[index], past_v[index]))
            kts.append(kt)
            vs.append(v)
        return unit(x), torch.stack(kts), torch.stack(vs)

    def _past(self, positions_BS: Tensor, past_lengths_B: Tensor, past_times_BP: Tensor, next_times_BS: Tensor) -> Attended:
        rows_P = torch.arange(past_times_BP.shape[1], device=past_times_BP.device)
        kept_BP = rows_P < past_lengths_B.unsqueeze(1)
        distances = (positions_BS.unsqueeze(2) - rows_P).clamp(0, self.config.max_length - 1)
        return Attended(time_buckets(next_times_BS, past_times_BP, self.config.time_buckets), distances, kept_BP.unsqueeze(1))
