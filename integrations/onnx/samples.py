"""Inputs on which a compiled graph is compared with its model: seeded random histories, from one event to as many as the model takes."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from cluster.values import Action
from integrations.hstu.config import RankerConfig, SequenceConfig
from integrations.hstu.limits import row_blocks
from integrations.hstu.model import HSTU
from integrations.hstu.ranker import HSTURanker
from integrations.onnx.graphs import Graph
from integrations.onnx.layers import by_layer

Inputs = Mapping[str, Tensor]
_TOP_N = (10, 1, 100)


def samples(graph: Graph, config: SequenceConfig) -> Iterator[Inputs]:
    """Batches of 1 to 4 users with ragged lengths; for `append` with ragged numbers of past events too, 0 among them."""
    if isinstance(config, RankerConfig):
        yield from _ranker_samples(graph, config)
        return
    longest = config.max_length
    shapes = [(1, 1), (1, min(2, longest)), (2, min(7, longest)), (3, max(1, longest // 2)), (4, longest), (1, longest), (4, 1)]
    generator = torch.Generator().manual_seed(0)
    for number, (batch, length) in enumerate(shapes):
        if graph.name == "append":
            past = max(0, min((0, 1, 5, longest // 2, max(longest - 8, longest // 2))[number % 5], longest - 1))
            yield append_inputs(graph.module.get_submodule("model"), batch, min(length, longest - past, 8), past, generator)
        else:
            inputs = history(config, batch, max(length, row_blocks(config.max_history)), generator, longest=length)
            yield {**inputs, "top_n": torch.tensor(_TOP_N[number % 3])} if graph.name == "retrieve" else inputs


def history(config: SequenceConfig, batch: int, length: int, generator: torch.Generator, longest: int | None = None) -> dict[str, Tensor]:
    """Histories with gaps of seconds to months, right-padded to `length`. The first has `longest` events (default: `length`), the others as
    many or fewer.
    """
    lengths = torch.randint(1, (longest or length) + 1, (batch,), generator=generator)
    lengths[0] = longest or length
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


def _ranker_samples(graph: Graph, config: RankerConfig) -> Iterator[Inputs]:
    """Inputs of one user each: from no past event to as many as the model takes, and up to 300 candidates or 8 new events."""
    ranker, generator = graph.module.get_submodule("model"), torch.Generator().manual_seed(0)
    assert isinstance(ranker, HSTURanker)
    longest = config.max_history
    for past, count in (
        (0, 1),
        (1, 2),
        (longest // 2, 7),
        (max(0, longest - 8), 300),
        (longest - 1, 100),
        (longest // 3, 3),
        (5 % longest, 8),
    ):
        room = longest - (graph.name == "rank_append")  # for at least one new event
        yield ranker_inputs(ranker, graph.name, min(past, room), count, generator)


def ranker_inputs(ranker: HSTURanker, graph: str, past: int, count: int, generator: torch.Generator) -> dict[str, Tensor]:
    """`past` kept events, and `count` candidates (`rank`) or new events, as many as the model takes (`rank_append`)."""
    new = min(count, ranker.config.max_history - past) if graph == "rank_append" else 0
    events = past + new
    whole = history(ranker.config, 1, events + 1, generator)
    columns = {
        "items": whole["items"][:, :events],
        "actions": torch.randint(0, len(Action), (1, events), generator=generator),
        "ratings": torch.randn((1, events), generator=generator),
        "times": whole["times"][:, :events],
    }
    with torch.no_grad():
        kt, v = ranker.append(columns["items"], columns["actions"], columns["ratings"], columns["times"])
    layers = ranker.config.layers - (graph == "rank_append")
    times = {"past_times": columns["times"][0, :past]} if layers else {}
    kept = {**times, **by_layer(kt[:layers, 0, ..., :past], v[:layers, 0, :, :past])}
    if graph == "rank_append":
        return {**{name: column[0, past:] for name, column in columns.items()}, **kept}
    return {"candidates": torch.randint(1, ranker.config.items + 1, (count,), generator=generator), **kept}
