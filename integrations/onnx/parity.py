"""The gate for every compiled artifact: it answers as the model does, within a stated tolerance, or it is refused.

Artifacts in int8 pass the gate of quality_gate.py instead.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from cluster.compilation import Precision
from cluster.engines.stage_rules import STATE_TOLERANCE, distance_of_predictions
from cluster.errors import CompileError
from cluster.values import FloatArray, Int64Array
from integrations.onnx.graphs import Graph
from integrations.onnx.samples import Inputs

Run = Callable[[Inputs], Mapping[str, Any]]


@dataclass(frozen=True)
class Tolerance:
    """The largest difference of any output from the model's, and the least share of the ten nearest items that must be the same. Whatever
    the precision, a user's state may differ by STATE_TOLERANCE at most: beyond that, backends disagree.
    """

    max_abs_error: float
    top10_agreement: float


# A time that falls into the neighbouring bucket, for a logarithm rounded otherwise, moves an output by about 1e-5: fp32 stands above that.
TOLERANCES: Mapping[Precision, Tolerance] = {"fp32": Tolerance(1e-4, 0.99), "fp16": Tolerance(2e-2, 0.9)}
_STATES = ("state", "states")
_BEST = 10
_TIE = 1e-5
"""Scores this close tie, whatever the precision: rounding may put either first, as with a candidate that is listed twice."""


def measure(graph: Graph, run: Run, samples: Iterable[Inputs], vectors: FloatArray) -> dict[str, float]:
    """`max_abs_error` over all outputs but item indices, NaN where one is NaN, `state_error`, the same over users' states, 0 where the
    graph gives none, and `top10_agreement`, of `run` against the model.

    The ten are the items nearest to the state by `vectors`, or those of more than ten candidates with the best first prediction; the
    agreement is 1 where no sample has them.
    """
    errors, agreements = defaultdict[str, list[float]](list), []
    for inputs in samples:
        with torch.no_grad():
            outputs = graph.module(*inputs.values())
        expected = dict(zip(graph.outputs, outputs if isinstance(outputs, tuple) else (outputs,), strict=True))
        actual = run(inputs)
        for name in graph.outputs:
            if name != "nearest":
                errors[name].append(_difference(name, actual[name], expected[name].numpy()))
        right = _scores({name: output.numpy() for name, output in expected.items()}, vectors)
        if right is not None:
            agreements.append(_agreement(_best(actual, vectors), right))
    largest = {name: float(np.max(found)) for name, found in errors.items()}
    return {
        "max_abs_error": float(np.max(list(largest.values()))),
        "state_error": float(np.max([largest.get(name, 0.0) for name in _STATES])),
        "top10_agreement": float(np.mean(agreements)) if agreements else 1.0,
    }


def require_parity(parity: Mapping[str, float], precision: Precision) -> None:
    """Raises CompileError where the measured parity is outside the tolerance of its precision (NaN always is)."""
    allowed = TOLERANCES[precision]
    error, state_error, agreement = parity["max_abs_error"], parity["state_error"], parity["top10_agreement"]
    if not error <= allowed.max_abs_error:
        raise CompileError(f"its outputs are {error:.2g} from the model's; {precision} allows at most {allowed.max_abs_error:.2g}")
    if not state_error <= STATE_TOLERANCE:
        raise CompileError(f"its states are {state_error:.2g} from the model's; every precision allows at most {STATE_TOLERANCE:.2g}")
    if not agreement >= allowed.top10_agreement:
        raise CompileError(f"{agreement:.1%} of its ten nearest items are the model's; {precision} requires {allowed.top10_agreement:.0%}")


def _difference(name: str, actual: FloatArray, expected: FloatArray) -> float:
    """The largest difference; for predictions by `distance_of_predictions`."""
    if actual.shape != expected.shape:
        raise CompileError(f"it returns shape {actual.shape} where the model returns {expected.shape}")
    if name == "predictions":
        return distance_of_predictions(expected, actual)
    return float(np.abs(actual - expected).max(initial=0.0))


def _scores(outputs: Mapping[str, Any], vectors: FloatArray) -> FloatArray | None:
    """(B, V): what orders each user's items, or the candidates; None where the outputs order nothing, or no more than ten candidates: these
    are the best in any order.
    """
    if "predictions" in outputs:
        predictions: FloatArray = outputs["predictions"]
        return predictions[:, 0][None] if len(predictions) > _BEST else None
    return outputs["state"] @ vectors[1:].T if "state" in outputs else None


def _best(outputs: Mapping[str, Any], vectors: FloatArray) -> Int64Array:
    """The places of each user's ten best, (B, 10), or of as many as were asked for."""
    if "nearest" in outputs:
        nearest: Int64Array = outputs["nearest"] - 1
        return nearest[:, :_BEST]
    scores = _scores(outputs, vectors)
    assert scores is not None  # where the model orders something, so do its compiled forms
    return np.argsort(-scores, axis=1, kind="stable")[:, :_BEST]


def _agreement(chosen: Int64Array, scores: FloatArray) -> float:
    """The share of the chosen places that are among as many best by the model's scores, or tie with the last of them."""
    right, count = 0, chosen.shape[1]
    for places, mine in zip(chosen, scores, strict=True):
        last = np.sort(mine)[-count] - _TIE
        right += int(np.count_nonzero(mine[np.unique(places[(places >= 0) & (places < len(mine))])] >= last))
    return right / chosen.size
