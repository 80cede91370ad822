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
ITEMS_AT_A_TIME = 64
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
    """For each item, up to SIMILAR_ITEMS other items of the history, those with the largest cosines, the largest first; of equal ones, that
    of the lower index. The cosines of ITEMS_AT_A_TIME items are there at a time.
    """
    met, found = np.unique(history), list[tuple[SimilarItem, ...]]()
    vectors_MD = vectors_VD[met]
    for start in range(0, len(items), ITEMS_AT_A_TIME):
        some = items[start : start + ITEMS_AT_A_TIME]
        cosines = vectors_VD[some] @ vectors_MD.T
        cosines[some[:, None] == met] = -np.inf  # what came back is like itself: that explains nothing
        found += [_named(met[places], values, catalogue) for places, values in zip(*_largest(cosines), strict=True)]
    return found


def _largest(cosines: npt.NDArray[np.floating[Any]]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.floating[Any]]]:
    """The places and the values of the SIMILAR_ITEMS largest of each row, the largest first. They are overwritten by -inf."""
    rows, most = len(cosines), min(SIMILAR_ITEMS, cosines.shape[1])
    places, values = np.empty((rows, most), np.intp), np.empty((rows, most), cosines.dtype)
    for rank in range(most):
        places[:, rank] = best = cosines.argmax(axis=1)
        values[:, rank] = cosines[np.arange(rows), best]
        cosines[np.arange(rows), best] = -np.inf
    return places, values


def _named(items: Int32Array, cosines: npt.NDArray[np.floating[Any]], catalogue: Catalogue) -> tuple[SimilarItem, ...]:
    pairs = zip(items.tolist(), cosines.tolist(), strict=True)
    return tuple(SimilarItem(catalogue[item], cosine) for item, cosine in pairs if np.isfinite(cosine))
