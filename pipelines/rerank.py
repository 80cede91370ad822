"""Choose the answer's items out of the candidates: newer ones, and ones that differ from each other, where the caller prefers them.

Relevance is a candidate's score, scaled to 0..1 between the worst and the best of the pool, plus `freshness` times its recency. Diversity
is maximal marginal relevance (Carbonell and Goldstein 1998): each next item is the one with the most of

    (1 - diversity) * relevance - diversity * (largest cosine with an item chosen before)

Shapes: P candidates, D width of the item vectors.
"""

import numpy as np
import numpy.typing as npt

from cluster.values import FloatArray, Int64Array
from pipelines.candidates import Candidates

FRESHNESS_HALF_LIFE_S = 30 * 24 * 3600
"""An item first met that long ago counts half as fresh as one first met now."""
CLOCKS_APART_S = 86_400
"""An item that is first met later than so many seconds from now does not exist yet; up to then clocks may differ."""

Positions = npt.NDArray[np.intp]


def rerank(
    candidates: Candidates, k: int, *, diversity: float, freshness: float, vectors_VD: FloatArray, first_seen_V: Int64Array, now: int
) -> Candidates:
    """The `k` items to recommend, in their order, with the scores they came with. Without diversity and freshness: the first `k`.

    `vectors_VD` and `first_seen_V` are by catalogue index; `now` and `first_seen_V` are in seconds since 1970.
    """
    if not diversity and not freshness:
        return candidates if len(candidates.items) <= k else candidates.at(slice(k))
    relevance_P = normalised(candidates.scores) + np.float32(freshness) * recency(first_seen_V[candidates.items], now)
    if not diversity:
        return candidates.at(np.argsort(-relevance_P, kind="stable")[:k])
    return candidates.at(most_diverse(relevance_P, vectors_VD[candidates.items], k, diversity))


def normalised(scores_P: FloatArray) -> FloatArray:
    """The scores scaled from 0 for the worst to 1 for the best; all 0 where they are equal."""
    if not len(scores_P) or not (span := float(np.ptp(scores_P))):
        return np.zeros(len(scores_P), np.float32)
    relative: FloatArray = (scores_P - scores_P.min()) / np.float32(span)
    return relative


def most_diverse(relevance_P: FloatArray, vectors_PD: FloatArray, k: int, diversity: float) -> Positions:
    """Positions of `k` candidates in the order in which they are chosen; of two equal ones, the first is chosen first.

    Each choice is compared with all candidates, in k * P * D multiplications; no array is made for it but their P results.
    """
    chosen = np.zeros(min(k, len(relevance_P)), np.intp)
    nearest_P = np.full(len(relevance_P), -np.inf, np.float32)
    worth_P, gain_P = ((1 - diversity) * relevance_P).astype(np.float32), relevance_P.astype(np.float32)
    for step in range(len(chosen)):
        best = chosen[step] = gain_P.argmax()
        worth_P[best] = -np.inf  # for good: each item is chosen once
        np.maximum(nearest_P, vectors_PD @ (diversity * vectors_PD[best]), out=nearest_P)
        np.subtract(worth_P, nearest_P, out=gain_P)
    return chosen


def recency(first_seen: Int64Array, now: int) -> FloatArray:
    """How new items are at `now`: 1 where first met then, half as much each half-life earlier, 0 where unknown (0) or far in the future."""
    ages = np.maximum(0, now - first_seen) / FRESHNESS_HALF_LIFE_S
    fresh: FloatArray = np.where((first_seen > 0) & (first_seen <= now + CLOCKS_APART_S), np.exp2(-ages), 0).astype(np.float32)
    return fresh
