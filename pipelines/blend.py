"""Blend what the encoder retrieves with what the decoder generates: a log-linear rule over both lists together.

    score = (1 - w) * log p_retrieval + w * log p_generation

p_retrieval is the softmax of cosine / temperature over the retrieved pool, p_generation the probability the decoder gave the item. An item
that only one list holds gets a floor in the other: the least probability there and, for the generator, a margin below it, since an item
that its beam did not find may be far less probable. Constants of a request, such as the pool's normalisation, move all scores alike.
"""

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cluster.bundle import BlendRecord
from cluster.errors import BundleError
from cluster.values import Int32Array, StageReport
from pipelines.candidates import Candidates, contained

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Float64Array: TypeAlias = npt.NDArray[np.float64]
TEMPERATURE = 0.05
"""The default temperature of the encoder's training loss."""


@dataclass(frozen=True, slots=True)
class BlendWeights:
    """`generator`: w, 0 (retrieval's order) to 1 (generation's); `temperature`: of the cosines, best that of the encoder's training;
    `margin`: by how much, in natural logarithms, an item that no path reached is below the last one that was reached.

    The defaults serve a model for which no rule was fitted.
    """

    generator: float = 0.5
    temperature: float = TEMPERATURE
    margin: float = 1.0

    @classmethod
    def of(cls, record: BlendRecord | None) -> "BlendWeights":
        """The weights in a manifest, the defaults where it has none. Raises BundleError at values that no rule can have."""
        if record is None:
            return cls()
        names = {field.name for field in fields(cls)}
        if set(record.weights) != names:
            raise BundleError(f"the manifest's blend has the weights {sorted(record.weights)}, not {sorted(names)}; train the model again")
        weights = cls(**record.weights)
        if not (0 <= weights.generator <= 1 and 0 < weights.temperature < math.inf and 0 <= weights.margin < math.inf):
            limits = "generator must be 0 to 1, temperature above 0, margin not below 0, none of them infinite"
            raise BundleError(f"the manifest's blend has {weights}; {limits}")
        return weights

    def record(self, fitted_on: str, quality: Mapping[str, Mapping[str, float]]) -> BlendRecord:
        """The weights' record for the manifest; `quality`: strategy -> metrics."""
        return BlendRecord(weights=asdict(self), fitted_on=fitted_on, quality={name: dict(one) for name, one in quality.items()})


@dataclass(frozen=True, slots=True, eq=False)
class Evidence:
    """Both stages' scores of the N items in either list: first the retrieved items in their order, then those that only the decoder named.

    `retrieval`, `generation`: log-probabilities (N,), floors in place; `named` (N,): whether the decoder named the item.
    """

    items: Int32Array
    retrieval: Float64Array
    generation: Float64Array
    named: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, retrieved: tuple[Int32Array, Floats], generated: tuple[Int32Array, Floats], temperature: float) -> "Evidence":
        """The evidence of two lists, each without repetition: items with cosines, items with log-probabilities."""
        order = np.argsort(retrieved[0])
        added = ~contained(generated[0], retrieved[0][order])
        items = np.concatenate([retrieved[0], generated[0][added]]).astype(np.int32)
        places = len(retrieved[0]) - 1 + np.cumsum(added)  # of those that are added; the others have one already
        places[~added] = order[np.searchsorted(retrieved[0], generated[0][~added], sorter=order)]
        log_probs = generated[1].astype(np.float64)
        generation, named = np.full(len(items), log_probs.min() if len(log_probs) else 0.0), np.zeros(len(items), bool)
        generation[places], named[places] = log_probs, True
        return cls(items, _log_softmax(retrieved[1] / temperature, int(added.sum())), generation, named)

    def scores(self, weights: BlendWeights) -> Float64Array:
        """The score of each item by the rule. Concatenated evidence of several requests is scored as each would be by itself."""
        w, floor = weights.generator, weights.margin * ~self.named
        scores: Float64Array = (1 - w) * self.retrieval + w * (self.generation - floor)
        return scores


def blend(retrieved: Candidates, generated: Candidates, weights: BlendWeights) -> Candidates:
    """Both lists as one, best first; equal scores keep retrieval's order. Items that must not be recommended are out already."""
    started = time.perf_counter()
    evidence = Evidence.of((retrieved.items, retrieved.scores), (generated.items, generated.scores), weights.temperature)
    scores = evidence.scores(weights)
    best = np.argsort(-scores, kind="stable")
    report = StageReport("blend", "log-linear", (time.perf_counter() - started) * 1000)
    return Candidates(evidence.items[best], scores[best].astype(np.float32), report, retrieved.degraded or generated.degraded)


def _log_softmax(logits: Floats, more: int) -> Float64Array:
    """The log-softmax of the logits, and its least value again for each of `more` items that were not retrieved."""
    if not len(logits):
        return np.zeros(more)
    shifted = logits.astype(np.float64) - float(logits.max())
    log_probs: Float64Array = shifted - np.log(np.exp(shifted).sum())
    return np.append(log_probs, np.full(more, log_probs.min()))
