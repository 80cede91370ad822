"""A user's state, or the latest few: the model's output at the last events only, computed without the others where that is exact.

That is so in the last layer only, as the layers below must know every row; at small sizes it saves half of the time.
Shapes as in sequence_model, and C: how many of the latest states.
"""

from typing import cast

import torch
from torch import Tensor

from integrations.hstu.model import HSTU, Attended, HSTULayer, causal
from integrations.hstu.sequence_model import SequenceModel, unit
from integrations.hstu.time_buckets import time_buckets


def latest_states(  # noqa: PLR0917 - a batch's own columns
    model: SequenceModel, items_BL: Tensor, times_BL: Tensor, next_times_BL: Tensor, lengths_B: Tensor, count: int
) -> Tensor:
    """L2-normalised states (B, C, D) after each user's last `count` events, oldest first; of fewer, the first one is repeated."""
    index_BC = (lengths_B.unsqueeze(1) - count + torch.arange(count, device=lengths_B.device)).clamp(min=0)
    if not isinstance(model, HSTU):
        return rows(model(items_BL, times_BL, next_times_BL), index_BC, model.config.dim)
    rows_L = torch.arange(times_BL.shape[1], device=times_BL.device)
    x = model.embed(items_BL, rows_L)
    *below, top = cast("list[HSTULayer]", list(model.layers))
    attended = causal(model.config, times_BL, next_times_BL) if below else []
    for layer in below:
        x, _, _ = layer(x, attended)
    buckets_BCL = time_buckets(next_times_BL.gather(1, index_BC), times_BL, model.config.time_buckets)
    return unit(latest_rows(top, x, index_BC, Attended(buckets_BCL, index_BC.unsqueeze(2) - rows_L)))


def latest_rows(layer: HSTULayer, x_BLD: Tensor, index_BC: Tensor, attended: Attended) -> Tensor:
    """The layer's output (B, C, D) at these rows of each user; no other rows attend."""
    x_BCD = rows(x_BLD, index_BC, layer.config.dim)
    kt, v = layer.keys(x_BLD)
    u, q = layer.queries(x_BCD)
    return layer.gate(x_BCD, u, layer.attend(q, kt, v, layer.bias(attended)))


def rows(x_BLD: Tensor, index_BC: Tensor, dim: int) -> Tensor:
    """Rows `index_BC` of each user, (B, C, D); `dim` is D, since the exporter takes a tensor's own size for one that varies."""
    return x_BLD.gather(1, index_BC.unsqueeze(2).expand(-1, -1, dim))
