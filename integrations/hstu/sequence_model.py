"""What HSTU and SASRec share: items in, L2-normalised states out, scored by cosine against L2-normalised item vectors.

Shapes: B users, L events (at most N = `config.max_length`), D = `config.dim`, V items; index 0 is padding.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cluster.values import UserSequence
from integrations.hstu.config import SequenceConfig
from integrations.hstu.user_behavior_schema import BehaviourBatch, collate

_SMALLEST_NORM = 1e-6


def unit(x: Tensor) -> Tensor:
    """`x` scaled to length 1 along its last dimension; zeros stay zeros."""
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norms.clamp(min=_SMALLEST_NORM)


def heads_apart(x_BLD: Tensor, heads: int, width: int) -> Tensor:
    """The tensor (B, L, H*W) as (B, H, L, W)."""
    return x_BLD.reshape(*x_BLD.shape[:2], heads, width).transpose(1, 2)


def heads_joined(x_BHLW: Tensor, dim: int) -> Tensor:
    """The tensor (B, H, L, W) as (B, L, D); D is H*W."""
    x_BLHW = x_BHLW.transpose(1, 2)
    return x_BLHW.reshape(*x_BLHW.shape[:2], dim)


class SequenceModel(nn.Module):
    """Embeds a history; a subclass turns the embedded rows into states."""

    def __init__(self, config: SequenceConfig) -> None:
        super().__init__()
        self.config: SequenceConfig = config
        self.item_embedding = nn.Embedding(config.items + 1, config.dim, padding_idx=0)
        self.position_embedding = nn.Embedding(config.max_length, config.dim)
        nn.init.trunc_normal_(self.item_embedding.weight, std=0.02, a=-0.04, b=0.04)  # the bounds are absolute: two deviations
        nn.init.normal_(self.position_embedding.weight, std=math.sqrt(1 / config.dim))
        with torch.no_grad():
            self.item_embedding.weight[0].zero_()

    def forward(self, items_BL: Tensor, times_BL: Tensor, next_times_BL: Tensor) -> Tensor:
        """States (B, L, D), L2-normalised: row i knows events 0..i and when the next event happens. Times are in seconds."""
        positions_L = torch.arange(items_BL.shape[1], device=items_BL.device)
        return unit(self.transform(self.embed(items_BL, positions_L), times_BL, next_times_BL))

    def transform(self, x_BLD: Tensor, times_BL: Tensor, next_times_BL: Tensor) -> Tensor:
        """The layers, from embedded events to states before normalisation."""
        raise NotImplementedError

    def embed(self, items: Tensor, positions: Tensor) -> Tensor:
        """Item embedding times sqrt(D) plus position embedding, zero where padded; `positions` broadcasts against `items`."""
        x = self.item_embedding(items) * math.sqrt(self.config.dim) + self.position_embedding(positions)
        return F.dropout(x, self.config.dropout, self.training) * (items != 0).unsqueeze(-1)

    def collate(self, sequences: Sequence[UserSequence], *, pad_to: int | None = None) -> BehaviourBatch:
        """The batch `forward` takes, of each user's latest `config.max_history` events."""
        return collate(sequences, self.config.max_history, pad_to=pad_to)

    def item_vectors(self, items_N: Tensor | None = None) -> Tensor:
        """L2-normalised item embeddings, (N, D) of the given items or (V + 1, D) of all; row 0 is zeros."""
        return unit(self.item_embedding.weight if items_N is None else self.item_embedding(items_N))
