"""Say why items were recommended: what each stage gave them, and which items of the history they are like."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.dataset import Catalogue
from cluster.values import Explanation, FloatArray, Int32Array, SimilarItem
from pipelines.candidates import Candidates
from pipelines.popularity import POPULARITY

SIMILAR_ITEMS = 3
FIELDS = {"encode": "retrieval", "generate": "generation", "blend": "blended", "rank": "ranking", POPULARITY: "popularity"}
"""Stage -> the field of an explanation that holds its score."""


def explain(
    items: Int32Array,
    lists: Sequence[Candidates],
    similar: Sequence[tuple[SimilarItem, ...]],
    recency_N: FloatArray | None = None,
) -> list[Explanation]:
    """One explanation for each of the N items. `lists`: what each stage found; `similar`: by `most_similar`; `recency_N`: None where
    freshness did not count.
    """
    scores = {FIELDS[one.report.stage]: dict(zip(one.items.tolist(), one.scores.tolist(), strict=True)) for one in lists}
    found: list[dict[str, Any]] = [{field: by_item.get(item) for field, by_item in scores.items()} for item in items.tolist()]
    fresh = [None] * len(items) if recency_N is None else recency_N.tolist()
    return [Explanation(**found[n], freshness=fresh[n], similar=similar[n]) for n in range(len(items))]


def most_similar(items: Int32Array, history: Int32Array, vectors_VD: FloatArray, catalogue: Catalogue) -> list[tuple[SimilarItem, ...]]:
    """For each item, up to SIMILAR_ITEMS other items of the history, those with the largest cosines, the largest first."""
    met = np.unique(history)
    cosines = vectors_VD[items] @ vectors_VD[met].T
    cosines[items[:, None] == met] = -np.inf  # what came back is like itself: that explains nothing
    return [_named(met[places], row[places], catalogue) for row, places in zip(cosines, map(_largest, cosines), strict=True)]


def _largest(row: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.intp]:
    """The places of the SIMILAR_ITEMS largest values, the largest first, equal ones in order of place. The others are not sorted."""
    among = np.arange(len(row)) if len(row) <= SIMILAR_ITEMS else np.flatnonzero(row >= np.partition(row, -SIMILAR_ITEMS)[-SIMILAR_ITEMS])
    return among[np.argsort(-row[among], kind="stable")][:SIMILAR_ITEMS]


def _named(items: Int32Array, cosines: npt.NDArray[np.floating[Any]], catalogue: Catalogue) -> tuple[SimilarItem, ...]:
    pairs = zip(items.tolist(), cosines.tolist(), strict=True)
    return tuple(SimilarItem(catalogue[item], cosine) for item, cosine in pairs if np.isfinite(cosine))
