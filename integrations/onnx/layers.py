"""How graphs name the kept keys and values: one input for each layer, since taking a layer out of one large input copies all of it."""

from collections.abc import Iterable
from typing import Any


def by_layer(past_kt: Any, past_v: Any) -> dict[str, Any]:
    """K^T (layers, B, H, K, P) and V (layers, B, H, P, W), arrays or tensors, as the graph's inputs: every layer's K^T, then every V."""
    kts = {f"past_kt_{layer}": kt for layer, kt in enumerate(past_kt)}
    return {**kts, **{f"past_v_{layer}": v for layer, v in enumerate(past_v)}}


def graph_inputs(names: Iterable[str], inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs, split by layer, that a graph takes: the exporter drops inputs on which no output depends."""
    given = inputs | by_layer(inputs["past_kt"], inputs["past_v"])
    return {name: given[name] for name in names}
