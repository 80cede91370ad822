"""The last fallback, and the answer to a newcomer: what most people chose."""

import numpy as np

from cluster.values import FloatArray, Int32Array, Int64Array

POPULARITY = "popularity"
"""In the report of a list of popular items, the stage and the backend."""


class Popularity:
    """Items by their number of events in the training data; ties go to the lower catalogue index."""

    def __init__(self, counts: Int64Array) -> None:
        order = np.argsort(-counts[1:], kind="stable").astype(np.int32) + 1
        self._ranked: Int32Array = order
        self._place: Int32Array = np.empty(len(counts), np.int32)
        self._place[order] = np.arange(len(order))
        self._share: FloatArray = (counts / max(1, counts.sum())).astype(np.float32)

    def nearest(self, top_n: int, among: Int32Array | None = None) -> tuple[Int32Array, FloatArray]:
        """The `top_n` most popular items, or of those in `among`, which has each once, and each one's share of all events: (N,), (N,)."""
        ranked = self._ranked if among is None else among[np.argsort(self._place[among])]
        items = ranked[:top_n]
        return items, self._share[items]
