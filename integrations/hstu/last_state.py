"""A user's state: the model's output at the last event only, with no work spent on the others where that is exact.

Only the last layer can be pruned, since the layers below must know every row; at small sizes that is half of the time.
"""

from typing import cast

import torch
from torch import Tensor

from integrations.hstu.model import HSTU, Attended, HSTULayer, time_buckets
from integrations.hstu.sequence_model import SequenceModel, unit


def last_states(model: SequenceModel, items_BL: Tensor, times_BL: Tensor, next_times_BL: Tensor, lengths_B: Tensor) -> Tensor:
    """L2-normalised states (B, D) after each user's last event; rows are right-padded and hold `lengths_B` >= 1 events."""
    last_B = lengths_B - 1
    if not isinstance(model, HSTU):
        return row(model(items_BL, times_BL, next_times_BL), last_B).squeeze(1)
    rows_L = torch.arange(items_BL.shape[1], device=items_BL.device)
    x = model.embed(items_BL, rows_L)
    buckets = time_buckets(next_times_BL, times_BL, model.config.time_buckets)
    *below, top = cast("list[HSTULayer]", list(model.layers))
    for layer in below:
        x, _, _ = layer(x, looking_back(buckets, rows_L.unsqueeze(1) - rows_L))
    distances_B1L = (last_B.unsqueeze(1) - rows_L).unsqueeze(1)
    return unit(last_row(top, x, last_B, looking_back(row(buckets, last_B), distances_B1L))).squeeze(1)


def looking_back(buckets: Tensor, distances: Tensor) -> Attended:
    """Rows that look at themselves and at what stands before them; a distance counts positions back from the row."""
    return Attended(buckets, distances.clamp(min=0), distances >= 0)


def last_row(layer: HSTULayer, x_BLD: Tensor, last_B: Tensor, attended: Attended) -> Tensor:
    """The layer's output (B, 1, D) at each user's last row, the only one that asks."""
    x_B1D = row(x_BLD, last_B)
    _, v, _, kt = layer.project(x_BLD)
    u, _, q, _ = layer.project(x_B1D)
    return layer.gate(x_B1D, u, layer.attend(q, kt, v, layer.bias(attended)))


def row(x_BLD: Tensor, index_B: Tensor) -> Tensor:
    """Row `index_B` of each user, (B, 1, D)."""
    return x_BLD.gather(1, index_B.view(-1, 1, 1).expand(-1, 1, x_BLD.shape[2]))
