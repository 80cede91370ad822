"""HSTU as a ranker: what a user does with given candidates ("Actions Speak Louder than Words", arXiv 2402.17152, sections 2.2 and 3.4).

    event     item embedding * sqrt(D) + position + what the user did with it (action, rating)
    candidate item embedding * sqrt(D) + the position after the last event; sees every event and itself, no other candidate
    asker     a candidate without an item: its output is the user's state at that moment, as in a retrieval model
    heads     a candidate's output -> one number for each task; `click` adds how near the item is to the user's state

An event attends to the events before it and to itself. The bias depends on the time between two events, not on the next event's time, so
the K and V of an event are final at once: a user's are kept, and candidates are scored in batches of any size against them (M-FALCON).

Shapes: B users, L events, N candidates of one moment, M candidates of a user, P kept events, H heads, K = `attention_dim`,
W = `linear_dim`, D = `dim`, T tasks.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cluster.ranking import Task
from cluster.values import Action, UserSequence
from integrations.hstu.config import RankerConfig
from integrations.hstu.model import Attended, HSTULayer, Past, among_new, in_one_block
from integrations.hstu.ranker_inputs import event_columns, training_batch
from integrations.hstu.sequence_model import unit
from integrations.hstu.time_buckets import time_buckets

_SHARPNESS = 10.0
"""The weight of nearness before anything is learnt: cosines of unrelated items are within 0.2."""


class HSTURanker(nn.Module):
    """Item embeddings, HSTU layers and a head for each task."""

    config_type = RankerConfig

    def __init__(self, config: RankerConfig) -> None:
        super().__init__()
        self.config = config
        self.item_embedding = nn.Embedding(config.items + 1, config.dim, padding_idx=0)
        self.position_embedding = nn.Embedding(config.max_length, config.dim)
        self.action_embedding = nn.Embedding(len(Action), config.dim)
        self.rating_direction = nn.Parameter(torch.empty(config.dim).normal_(std=0.02))
        self.asker = nn.Parameter(torch.empty(config.dim).normal_(std=math.sqrt(1 / config.dim)))
        self.sharpness = nn.Parameter(torch.tensor(_SHARPNESS))
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.layers))
        self.heads = nn.Sequential(nn.Linear(config.dim, 2 * config.dim), nn.SiLU(), nn.Linear(2 * config.dim, len(config.tasks)))
        nn.init.trunc_normal_(self.item_embedding.weight, std=0.02, a=-0.04, b=0.04)
        nn.init.normal_(self.position_embedding.weight, std=math.sqrt(1 / config.dim))
        nn.init.normal_(self.action_embedding.weight, std=0.02)
        with torch.no_grad():
            self.item_embedding.weight[0].zero_()

    def forward(
        self, items_BL: Tensor, actions_BL: Tensor, ratings_BL: Tensor, times_BL: Tensor, candidates_BLN: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logits (B, L, N, T) of what the user does with candidates in the place of event i, from the events before it alone; and the
        user's states at these moments (B, L, D), L2-normalised.

        Times are in seconds; the moment of a candidate is that of the event whose place it takes.
        """
        length, candidates = candidates_BLN.shape[1:]
        rows_L = torch.arange(length, device=items_BL.device)
        events = in_one_block(self.config, times_BL, times_BL)
        before = replace(events[0], allowed=events[0].distances > 0)
        x = self.embed_events(items_BL, actions_BL, ratings_BL, rows_L)
        y = self._asked(candidates_BLN, rows_L.unsqueeze(1)).flatten(1, 2)
        for layer in self._layers:
            bias = layer.bias(before).repeat_interleave(1 + candidates, dim=1)
            x, kt, v = layer(x, events)
            y = candidates_through(layer, y, kt, v, bias)
        return self._logits(torch.unflatten(y, 1, (length, 1 + candidates)), candidates_BLN)

    def append(  # noqa: PLR0917 - the order is the exported graph's
        self,
        items_BL: Tensor,
        actions_BL: Tensor,
        ratings_BL: Tensor,
        times_BL: Tensor,
        past_times_BP: Tensor | None = None,
        past_kt: Sequence[Tensor] = (),
        past_v: Sequence[Tensor] = (),
    ) -> tuple[Tensor, Tensor]:
        """K^T (layers, B, H, K, L) and V (layers, B, H, L, W) of events that follow P kept ones, or none, whose K^T (B, H, K, P) and
        V (B, H, P, W) are given layer by layer.
        """
        past = 0 if past_times_BP is None else past_times_BP.shape[1]
        rows_L = torch.arange(items_BL.shape[1], device=items_BL.device)
        new = among_new(self.config, times_BL, times_BL)
        old = None if past_times_BP is None else self._before(past + rows_L, times_BL, past_times_BP)
        x = self.embed_events(items_BL, actions_BL, ratings_BL, past + rows_L)
        kts, vs = [], []
        for index, layer in enumerate(self._layers):
            if index + 1 < len(self._layers):
                x, kt, v = layer(x, new, Past(old, past_kt[index], past_v[index]) if old else None)
            else:
                kt, v = layer.keys(x)  # the events' own output is not used
            kts.append(kt)
            vs.append(v)
        return torch.stack(kts), torch.stack(vs)

    def rank(self, candidates_BM: Tensor, times_BP: Tensor, kt: Sequence[Tensor], v: Sequence[Tensor]) -> Tensor:
        """Predictions (B, M, T) of candidates after P events with these times, relative to the moment, and K^T and V layer by layer."""
        position_1 = torch.full((1,), times_BP.shape[1], dtype=torch.int64, device=times_BP.device)
        every = self._before(position_1, times_BP.new_zeros(times_BP.shape[0], 1), times_BP)
        y = self._asked(candidates_BM, position_1)
        for index, layer in enumerate(self._layers):
            y = candidates_through(layer, y, kt[index], v[index], layer.bias(every))
        return self.predictions(self._logits(y, candidates_BM)[0])

    def item_vectors(self, items_N: Tensor | None = None) -> Tensor:
        """L2-normalised item embeddings, (N, D) of the given items or (V + 1, D) of all; row 0 is zeros."""
        return unit(self.item_embedding.weight if items_N is None else self.item_embedding(items_N))

    def after(self, sequence: UserSequence, candidates_M: Tensor) -> Tensor:
        """Predictions (M, T) of candidates after one user's events, of which there may be none."""
        columns, device = event_columns(sequence, self.config), candidates_M.device
        items, actions, ratings, times = (torch.from_numpy(column).unsqueeze(0).to(device) for column in columns.values())
        kt, v = self.append(items, actions, ratings, times)
        return self.rank(candidates_M.unsqueeze(0), times, list(kt), list(v)).squeeze(0)

    def collate(self, sequences: Sequence[UserSequence]) -> dict[str, Tensor]:
        """The inputs of `forward` from each user's latest events, (B, L), and the events' unscaled `values`."""
        return {name: torch.from_numpy(column) for name, column in training_batch(sequences, self.config).items()}

    def start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Take over a retrieval model's embeddings and layers, as far as they have the same names and shapes."""
        own = self.state_dict()
        self.load_state_dict(
            {**own, **{name: tensor for name, tensor in weights.items() if name in own and tensor.shape == own[name].shape}}
        )

    def predictions(self, logits: Tensor) -> Tensor:
        """Logits (..., T) as probabilities; those of `rating` as expected ratings."""
        if Task.RATING not in self.config.tasks:
            return torch.sigmoid(logits)
        scale, index = self.config.rating, self.config.tasks.index(Task.RATING)
        ratings = (logits[..., index : index + 1] * scale.deviation + scale.mean).clamp(scale.low, scale.high)
        return torch.cat([torch.sigmoid(logits[..., :index]), ratings, torch.sigmoid(logits[..., index + 1 :])], dim=-1)

    def embed_events(self, items: Tensor, actions: Tensor, ratings: Tensor, positions: Tensor) -> Tensor:
        did = self.action_embedding(actions) + ratings.unsqueeze(-1) * self.rating_direction
        x = self.item_embedding(items) * math.sqrt(self.config.dim) + self.position_embedding(positions) + did
        return F.dropout(x, self.config.dropout, self.training) * (items != 0).unsqueeze(-1)

    def _asked(self, candidates: Tensor, positions: Tensor) -> Tensor:
        """The asker and the candidates (..., 1 + N, D) at these positions."""
        place = self.position_embedding(positions)
        x = self.item_embedding(candidates) * math.sqrt(self.config.dim) + place
        asker = (self.asker + place).expand(*candidates.shape[:-1], 1, -1)
        return F.dropout(torch.cat([asker, x], dim=-2), self.config.dropout, self.training)

    def _logits(self, y: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
        """The logits (..., N, T) and the user's state (..., D), from the outputs of asker and candidates (..., 1 + N, D)."""
        user, logits = unit(y[..., :1, :]), self.heads(F.layer_norm(y[..., 1:, :], (self.config.dim,)))
        near = self.sharpness * (user * unit(self.item_embedding(candidates))).sum(dim=-1, keepdim=True)
        return torch.cat([logits[..., :1] + near, logits[..., 1:]], dim=-1), user.squeeze(-2)

    def _before(self, positions_R: Tensor, times_BR: Tensor, past_times_BP: Tensor) -> Attended:
        """Rows at these positions and times that look at all of P events before them."""
        distances = positions_R.unsqueeze(1) - torch.arange(past_times_BP.shape[1], device=past_times_BP.device)
        return Attended(time_buckets(times_BR, past_times_BP, self.config.time_buckets), distances)

    @property
    def _layers(self) -> Sequence[HSTULayer]:
        return cast("Sequence[HSTULayer]", self.layers)


def candidates_through(layer: HSTULayer, y_BMD: Tensor, kt: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """One layer's output (B, M, D) of candidates that look at events, K^T (B, H, K, P) and V (B, H, P, W), and each at itself.

    `bias` is (B, M, P), or (B, 1, P) where it is the same for all.
    """
    u, own_v, q, own_kt = layer.project(y_BMD)
    nearest = layer.config.max_length - 1
    itself = layer.position_weights[nearest : nearest + 1] + layer.time_weights[:1]
    own = F.silu((q * own_kt.transpose(2, 3)).sum(dim=-1, keepdim=True) + itself) / layer.config.max_length * own_v
    return layer.gate(y_BMD, u, layer.attend(q, kt, v, bias) + own)
