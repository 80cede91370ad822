"""The nearest items to a user's state by cosine, exactly: a scan of the whole item table, or of the part that is asked for."""

from collections.abc import Sequence

import numpy as np

from cluster.errors import BackendFailed
from cluster.values import Encoded, EncodeRequest, FloatArray, Int32Array


class NearestItems:
    """An index over L2-normalised item vectors (V + 1, D); row 0 is padding and never returned. Equal scores are ordered by index."""

    def __init__(self, vectors: FloatArray) -> None:
        self._vectors = vectors

    def __len__(self) -> int:
        return len(self._vectors) - 1

    def answer(self, requests: Sequence[EncodeRequest], states_BD: FloatArray) -> list[Encoded]:
        """What each request asked for, given its state; one scan serves all those that ask for the whole catalogue."""
        whole = [state for request, state in zip(requests, finite(states_BD), strict=True) if request.among is None]
        scores_BV = iter(np.stack(whole) @ self._vectors[1:].T) if whole else iter(())
        return [
            _best(state, next(scores_BV), request.top_n) if request.among is None else self.among(request.among, state, request.top_n)
            for request, state in zip(requests, states_BD, strict=True)
        ]

    def among(self, among: Int32Array, state: FloatArray, top_n: int) -> Encoded:
        """The best of `among`; what is no item is passed over."""
        items = np.unique(among)
        items = items[(items >= 1) & (items <= len(self))].astype(np.int32)
        return _best(state, self._vectors[items] @ state, top_n, items)


def finite(states_BD: FloatArray) -> FloatArray:
    """The states as they are. Raises BackendFailed where one holds NaN or infinity: the engine that made it broke."""
    if not np.isfinite(states_BD).all():
        raise BackendFailed("the encoder returned a state that is not finite")
    return states_BD


def _best(state: FloatArray, scores: FloatArray, top_n: int, items: Int32Array | None = None) -> Encoded:
    """The `top_n` best of `items`, ascending indices that default to 1..V, by their `scores`; fewer where there are fewer."""
    count = min(top_n, len(scores))
    chosen = np.argsort(-scores, kind="stable") if count == len(scores) else _largest(scores, count)
    chosen = chosen[:count]
    return Encoded(state=state, items=(chosen + 1).astype(np.int32) if items is None else items[chosen], scores=scores[chosen])


def _largest(scores: FloatArray, count: int) -> "np.ndarray[tuple[int], np.dtype[np.intp]]":
    """Positions of the `count` largest scores, best first, the lower position first where they are equal."""
    threshold = np.partition(scores, len(scores) - count)[len(scores) - count]
    reached = np.flatnonzero(scores >= threshold)
    best: np.ndarray[tuple[int], np.dtype[np.intp]] = reached[np.argsort(-scores[reached], kind="stable")]
    return best
