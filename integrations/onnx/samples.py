"""Inputs to compare a compiled graph with its model on: seeded random histories, from one event to as many as the model takes."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from integrations.hstu.config import SequenceConfig
from integrations.hstu.model import HSTU
from integrations.onnx.graphs import Graph
from integrations.onnx.layers import by_layer

Inputs = Mapping[str, Tensor]
_TOP_N = (10, 1, 100)


def samples(graph: Graph, config: SequenceConfig) -> Iterator[Inputs]:
    """Batches of 1 to 4 users with ragged lengths; for `append` also ragged pasts, none among them."""
    longest = config.max_length
    shapes = [(1, 1), (1, min(2, longest)), (2, min(7, longest)), (3, max(1, longest // 2)), (4, longest), (1, longest), (4, 1)]
    generator = torch.Generator().manual_seed(0)
    for number, (batch, length) in enumerate(shapes):
        if graph.name == "append":
            past = max(0, min((0, 1, 5, longest // 2, max(longest - 8, longest // 2))[number % 5], longest - 1))
            yield append_inputs(graph.module.get_submodule("model"), batch, min(length, longest - past, 8), past, generator)
        else:
            inputs = history(config, batch, length, generator)
            yield {**inputs, "top_n": torch.tensor(_TOP_N[number % 3])} if graph.name == "retrieve" else inputs


def history(config: SequenceConfig, batch: int, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Right-padded histories with gaps of seconds to months; at least one is `length` long."""
    lengths = torch.randint(1, length + 1, (batch,), generator=generator)
    lengths[0] = length
    gaps = torch.exp(torch.rand((batch, length), generator=generator) * 16).long()
    present = torch.arange(length) < lengths.unsqueeze(1)
    times = -(gaps * present).flip(1).cumsum(1).flip(1).clamp(max=2**31 - 1) * present
    next_times = torch.cat([times[:, 1:], torch.zeros(batch, 1, dtype=torch.long)], dim=1)
    items = torch.randint(1, config.items + 1, (batch, length), generator=generator) * present
    return {"items": items, "times": times.int(), "next_times": next_times.int(), "lengths": lengths}


def append_inputs(model: nn.Module, batch: int, new: int, past: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Histories of `past` + `new` events, the past ones given as the keys and values the model keeps for them."""
    assert isinstance(model, HSTU)
    whole = history(model.config, batch, past + new, generator)
    whole["items"] = torch.where(whole["items"] == 0, 1, whole["items"])
    with torch.no_grad():
        _, kt, v = model.encode_with_state(whole["items"], whole["times"], whole["next_times"])
    kept = torch.randint(0, past + 1, (batch,), generator=generator)
    columns = kept.unsqueeze(1) + torch.arange(new)
    fresh = {name: whole[name].gather(1, columns) for name in ("items", "times", "next_times")}
    lengths = torch.randint(1, new + 1, (batch,), generator=generator)
    return {
        **fresh,
        "lengths": lengths,
        "past_times": whole["times"][:, :past],
        "past_lengths": kept,
        **by_layer(kt[..., :past], v[..., :past, :]),
    }
