"""Nearest items by faiss's scan of vectors in bf16, then by their fp32 vectors among the best of that scan.

The scan's scores are off by rounding, within a bound (rounding.py). Where the last item of the answer leads the last item found by more
than that, no other item can belong to the answer; otherwise, as among very similar vectors, all are searched in fp32.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np

from cluster.nearest import NearestItems
from cluster.values import Availability, Encoded, FloatArray, Int32Array
from integrations.index.rounding import Rounding, slices

_OVERSAMPLE = 4
"""How many items the scan finds for each one that is asked for."""


class FaissItems(NearestItems):
    """faiss.IndexScalarQuantizer, on the CPU. Needs half as much memory again as the vectors."""

    def __init__(self, vectors: FloatArray) -> None:
        super().__init__(vectors)
        import faiss  # noqa: PLC0415 - an optional package

        self._rough = faiss.IndexScalarQuantizer(vectors.shape[1], faiss.ScalarQuantizer.QT_bf16, faiss.METRIC_INNER_PRODUCT)
        for part in slices(vectors[1:]):
            self._rough.add(np.ascontiguousarray(part))
        self._rounding = Rounding(vectors[1:], lambda part: self._rough.sa_decode(self._rough.sa_encode(np.ascontiguousarray(part))))

    @classmethod
    def get_availability(cls) -> Availability:
        if find_spec("faiss") is None:
            return Availability.no("the index 'faiss' needs faiss-cpu, which is not installed; install genrec with its extra faiss")
        return Availability.yes()

    def search(self, states_BD: FloatArray, counts: Sequence[int]) -> list[Encoded]:
        wanted = _OVERSAMPLE * max(counts)
        if wanted >= len(self):
            return super().search(states_BD, counts)
        scores_BC, found_BC = self._rough.search(np.ascontiguousarray(states_BD), wanted)
        highest_left_B = scores_BC[:, -1] + self._rounding.bound(states_BD)
        rows = zip(states_BD, counts, found_BC, highest_left_B.tolist(), strict=True)
        return [self._proven(state, count, found.astype(np.int32) + 1, highest) for state, count, found, highest in rows]

    def _proven(self, state: FloatArray, count: int, found: Int32Array, highest_left: float) -> Encoded:
        """The best of the items `found`; of all, where an item that was not found, with at most `highest_left`, might rank before them."""
        answer = self.among(found, state, count)
        return answer if answer.scores[-1] > highest_left else super().search(state[None], [count])[0]
