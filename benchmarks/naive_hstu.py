"""HSTU as a first implementation has it, to compare with: every row of every layer, a mask over all pairs, then the last row.

The weights are those of integrations/hstu/model.py, and so are the states.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from integrations.hstu.model import HSTU, HSTULayer
from integrations.hstu.time_buckets import time_buckets

_EPSILON = 1e-6


class NaiveHSTU(nn.Module):
    """(B, D): the L2-normalised state after each user's last event."""

    def __init__(self, model: HSTU) -> None:
        super().__init__()
        self.model = model

    def forward(self, items: Tensor, times: Tensor, next_times: Tensor, lengths: Tensor) -> Tensor:
        rows = torch.arange(items.shape[1], device=items.device)
        distances = rows.unsqueeze(1) - rows
        x = self.model.embed(items, rows)
        for layer in self.model.layers:
            assert isinstance(layer, HSTULayer)
            x = self._layer(layer, x, distances, time_buckets(next_times, times, self.model.config.time_buckets).long())
        last = x[torch.arange(x.shape[0], device=x.device), lengths - 1]
        return F.normalize(last, dim=-1)

    def _layer(self, layer: HSTULayer, x: Tensor, distances: Tensor, buckets: Tensor) -> Tensor:
        config = self.model.config
        normed = F.layer_norm(x, (config.dim,), eps=_EPSILON)
        u, v, q, k = torch.split(F.silu(normed @ layer.uvqk), layer.widths, dim=-1)
        v, q, k = (torch.unflatten(part, -1, (config.heads, -1)).transpose(1, 2) for part in (v, q, k))
        bias = layer.position_weights[config.max_length - 1 - distances] + layer.time_weights[buckets]
        weights = F.silu(q @ k.transpose(2, 3) + bias.unsqueeze(1)) / config.max_length
        mixed = (weights.masked_fill(distances < 0, 0.0) @ v).transpose(1, 2).flatten(2)
        out: Tensor = layer.output(u * F.layer_norm(mixed, (mixed.shape[-1],), eps=_EPSILON))
        return out + x
