"""The computations that are exported, as modules from tensors to tensors.

    encode     items, times, next_times, lengths                                       -> state [, states]
    retrieve   items, times, next_times, lengths, top_n                                -> state, nearest, scores [, states]
    append     items, times, next_times, lengths, past_times, past_lengths, past_kt_0.., past_v_0..
                                                                                       -> state, states, kt, v
    rank_append  items, actions, ratings, times, past_times, past_kt_0.., past_v_0..   -> kt, v
    rank       candidates, past_times, past_kt_0.., past_v_0..                         -> predictions

The last two are the ranker's, for one user. `next_times` of a user's last event is the time of the request (0), and the attention divides
by the model's constant N, for inputs of any length. `states`: the latest C, for a model with a decoder prompted with them; for `append`,
those of all new events, as only later events decide which of them are among the latest C.
Shapes: B users, L events, S new events, P kept events, D width, V items, M candidates, T tasks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from integrations.hstu.latest_states import latest_states, rows
from integrations.hstu.model import HSTU
from integrations.hstu.ranker import HSTURanker
from integrations.hstu.sequence_model import SequenceModel
from integrations.onnx.layers import by_layer


@dataclass(frozen=True)
class Graph:
    """A computation and the names and dynamic dimensions of its inputs: a letter for a dimension that varies, None for one that doesn't."""

    name: str
    module: nn.Module
    inputs: Mapping[str, tuple[str | None, ...]]
    outputs: tuple[str, ...]


_HISTORY: dict[str, tuple[str | None, ...]] = {"items": ("B", "L"), "times": ("B", "L"), "next_times": ("B", "L"), "lengths": ("B",)}
_NEW: dict[str, tuple[str | None, ...]] = {"items": ("B", "S"), "times": ("B", "S"), "next_times": ("B", "S"), "lengths": ("B",)}
_PAST: dict[str, tuple[str | None, ...]] = {"past_times": ("B", "P"), "past_lengths": ("B",)}
_PAST_KT: tuple[str | None, ...] = ("B", None, None, "P")
_PAST_V: tuple[str | None, ...] = ("B", None, "P", None)
APPEND_OUTPUTS = ("state", "states", "kt", "v")
_EVENTS: dict[str, tuple[str | None, ...]] = {"items": ("S",), "actions": ("S",), "ratings": ("S",), "times": ("S",)}
_ONE_PAST: dict[str, tuple[str | None, ...]] = {"past_times": ("P",)}


def graphs(model: SequenceModel, prompt_length: int = 0) -> list[Graph]:
    """The graphs of a model; only HSTU's has an append. `prompt_length`: C, 0 where there is no decoder."""
    latest = ("states",) if prompt_length else ()
    shared = [
        Graph("encode", Encode(model, prompt_length), _HISTORY, ("state", *latest)),
        Graph("retrieve", Retrieve(model, prompt_length), {**_HISTORY, "top_n": ()}, ("state", "nearest", "scores", *latest)),
    ]
    if not isinstance(model, HSTU):
        return shared
    layers = range(model.config.layers)
    past = by_layer([_PAST_KT for _ in layers], [_PAST_V for _ in layers])
    return [*shared, Graph("append", Append(model), {**_NEW, **_PAST, **past}, APPEND_OUTPUTS)]


def ranker_graphs(ranker: HSTURanker) -> list[Graph]:
    """The graphs of a ranker."""
    layers = ranker.config.layers
    return [
        Graph("rank_append", RankAppend(ranker), {**_EVENTS, **(_ONE_PAST if layers > 1 else {}), **_past_of(layers - 1)}, ("kt", "v")),
        Graph("rank", Rank(ranker), {"candidates": ("M",), **_ONE_PAST, **_past_of(layers)}, ("predictions",)),
    ]


def _past_of(layers: int) -> dict[str, tuple[str | None, ...]]:
    """One user's kept K and V, for so many layers. Where only new K and V are wanted, the last layer needs none: nothing attends there."""
    return by_layer([(None, None, "P")] * layers, [(None, "P", None)] * layers)


class Encode(nn.Module):
    """(B, D): the L2-normalised state after each user's last event; with a `prompt_length` also (B, C, D), the states of the last C."""

    def __init__(self, model: SequenceModel, prompt_length: int = 0) -> None:
        super().__init__()
        self.model, self.prompt_length = model, prompt_length

    def forward(self, items: Tensor, times: Tensor, next_times: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        states = latest_states(self.model, items, times, next_times, lengths, max(1, self.prompt_length))
        return (states[:, -1], states) if self.prompt_length else (states[:, -1],)


class Retrieve(Encode):
    """The state, and the indices 1..V and cosines of the `top_n` nearest items, (B, min(top_n, V)), best first; then as Encode."""

    vectors: Tensor

    def __init__(self, model: SequenceModel, prompt_length: int = 0) -> None:
        super().__init__(model, prompt_length)
        self.register_buffer("vectors", model.item_vectors()[1:].detach().T.contiguous())

    def forward(  # type: ignore[override]  # one input more than Encode
        self, items: Tensor, times: Tensor, next_times: Tensor, lengths: Tensor, top_n: Tensor
    ) -> tuple[Tensor, ...]:
        state, *latest = super().forward(items, times, next_times, lengths)
        count = top_n.clamp(max=self.vectors.shape[1])  # a number would be the example's in the graph
        scores, nearest = torch.topk(state @ self.vectors, cast("int", count), dim=1)
        return state, nearest + 1, scores, *latest


class Append(nn.Module):
    """(B, D): the state after new events that follow kept ones; the new events' states (B, S, D), K^T and V; see HSTU.append."""

    def __init__(self, model: HSTU) -> None:
        super().__init__()
        self.model = model

    def forward(  # noqa: PLR0917 - the order of the graph's inputs
        self,
        items: Tensor,
        times: Tensor,
        next_times: Tensor,
        lengths: Tensor,
        past_times: Tensor,
        past_lengths: Tensor,
        *past: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        layers, dim = self.model.config.layers, self.model.config.dim
        states, kt, v = self.model.append(items, times, next_times, past_times, past_lengths, past[:layers], past[layers:])
        return rows(states, lengths.unsqueeze(1) - 1, dim)[:, 0], states, kt, v


class RankAppend(nn.Module):
    """K^T (layers, H, K, L) and V (layers, H, L, W) of one user's new events, which follow kept ones; see HSTURanker.append.

    `past`: the kept events' times, every layer's K^T but the last, then every V; empty where there is one layer.
    """

    def __init__(self, ranker: HSTURanker) -> None:
        super().__init__()
        self.model = ranker

    def forward(self, items: Tensor, actions: Tensor, ratings: Tensor, times: Tensor, *past: Tensor) -> tuple[Tensor, Tensor]:
        items, actions, ratings, times = (column.unsqueeze(0) for column in (items, actions, ratings, times))
        past_times = past[0].unsqueeze(0) if past else None
        kt, v = self.model.append(items, actions, ratings, times, past_times, *_by_layer(past[1:]))
        return kt[:, 0], v[:, 0]


class Rank(nn.Module):
    """(M, T): predictions of candidates after one user's kept events; see HSTURanker.rank."""

    def __init__(self, ranker: HSTURanker) -> None:
        super().__init__()
        self.model = ranker

    def forward(self, candidates: Tensor, past_times: Tensor, *past: Tensor) -> Tensor:
        return self.model.rank(candidates.unsqueeze(0), past_times.unsqueeze(0), *_by_layer(past))[0]


def _by_layer(past: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    rows, layers = [layer.unsqueeze(0) for layer in past], len(past) // 2
    return rows[:layers], rows[layers:]
