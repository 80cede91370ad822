"""The backend: a history -> its latest items' neighbours, added up -> the best of them, and a vector that stands for them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cluster.bundle import Bundle
from cluster.errors import BackendFailed, BackendUnavailable
from cluster.values import Availability, Encoded, EncodeRequest, FloatArray, UserSequence
from genrec_item_to_item.neighbours import Neighbours, read

FIT = "python -m genrec_item_to_item fit DATASET --out FILE"
BY_VECTOR = 1e-3
"""How much an item's cosine with the state counts beside its similarities: it orders what no neighbour speaks for."""


class ItemToItemEncoder:
    """`neighbours`: the file that `fit` wrote. `recent`: how many of the latest events count, each `fade` of the one after it.

    A user's state is the mean of the neighbours' vectors, each by its score: what reads states (explanations, diversity) finds it near
    the items that are recommended. There are no states for a decoder's prompt: those it was trained on are HSTU's.
    """

    def __init__(self, neighbours: str = "", recent: int = 20, fade: float = 0.9) -> None:
        self._path, self._recent, self._fade = neighbours, recent, fade
        self._neighbours: Neighbours | None = None

    def get_availability(self, bundle: Bundle) -> Availability:  # noqa: ARG002 - any model's items will do
        if not self._path:
            example = "encoder: {options: {item_to_item: {neighbours: FILE}}}"
            return Availability.no(f"no file of neighbours is configured; make one: {FIT}, and name it: {example}")
        if not Path(self._path).is_file():
            return Availability.no(f"{self._path} is not there; make it: {FIT.replace('FILE', self._path)}")
        return Availability.yes()

    def load(self, bundle: Bundle) -> None:
        self.get_availability(bundle).require()
        self._vectors, self._neighbours = bundle.item_vectors, read(Path(self._path), bundle.catalogue)

    def infer(self, request: EncodeRequest) -> Encoded:
        return self.batch_infer([request])[0]

    def batch_infer(self, requests: Sequence[EncodeRequest]) -> list[Encoded]:
        """Raises BackendFailed at an empty history and at an item that the model does not have."""
        if self._neighbours is None:
            raise BackendUnavailable("item_to_item has not been loaded, or was closed; call load(bundle)")
        return [self._answer(request, self._neighbours) for request in requests]

    def close(self) -> None:
        self._neighbours = None
        self.__dict__.pop("_vectors", None)

    def _answer(self, request: EncodeRequest, neighbours: Neighbours) -> Encoded:
        near = self._near(request.sequence, neighbours)
        state = self._state(request.sequence, near)
        scores = near + BY_VECTOR * (self._vectors @ state)
        allowed = np.arange(1, len(scores)) if request.among is None else np.unique(request.among)
        allowed = allowed[(allowed >= 1) & (allowed < len(scores))]
        best = allowed[np.argsort(-scores[allowed], kind="stable")[: request.top_n]]
        return Encoded(state, best.astype(np.int32), scores[best].astype(np.float32))

    def _near(self, sequence: UserSequence, neighbours: Neighbours) -> FloatArray:
        """What the latest items' neighbours make of every item, (V + 1,)."""
        items, size = sequence.items[-self._recent :], len(neighbours.items)
        if not len(items) or (items < 1).any() or (items >= size).any():
            raise BackendFailed(f"a history of {len(items)} events is empty, or names an item outside of 1..{size - 1}, the model's items")
        weights = self._fade ** np.arange(len(items) - 1, -1, -1)
        counts = (weights[:, None] * neighbours.similarities[items]).ravel()
        near = np.bincount(neighbours.items[items].ravel(), counts, size).astype(np.float32)
        return near / np.float32(weights.sum())

    def _state(self, sequence: UserSequence, near: FloatArray) -> FloatArray:
        """Of unit length; the mean of the history's own vectors where no item of it has a neighbour."""
        mean = near @ self._vectors if near.any() else self._vectors[sequence.items[-self._recent :]].sum(axis=0)
        length = np.linalg.norm(mean)
        return (mean / length if length > 0 else self._vectors[sequence.items[-1]]).astype(np.float32)
