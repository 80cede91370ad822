"""The nearest items to a user's state by cosine: of the whole catalogue, or of the part that is asked for.

    exact   one scan in fp32, the fastest of a small catalogue
    bf16    a scan in half the bytes finds all that may belong to the answer, fp32 orders them; needs torch
    faiss   the same with faiss's quantised vectors; needs faiss-cpu
    cuda    one scan in fp32 on the GPU; needs torch and an NVIDIA GPU
    auto    cuda from CUDA_FROM items on for an engine that computes on a GPU; else bf16 from BF16_FROM on, where torch is installed and
            computes with one thread, as in a replica of one CPU, and the processor multiplies bf16; else exact. The default of the engines
            that compute by torch or TensorRT

All find the same items with the same scores, to the rounding of fp32. An index of your own is a subclass of NearestItems with its own
`search`, and a line in registry.INDEXES.
"""

from collections.abc import Sequence

import numpy as np

from cluster.errors import BackendFailed, UnknownChoice
from cluster.registry import INDEXES, choose
from cluster.values import Availability, Encoded, EncodeRequest, FloatArray, Int32Array

AUTO = "auto"
CUDA_FROM = 20_000
"""An H200 is faster than 16 cores from 3,000 items on for 32 users at a time, from 30,000 on for one user; see benchmarks/nearest.py."""
BF16_FROM = 50_000
"""With one thread bf16 is faster from 20,000 items on for 32 users at a time, from 100,000 on for one user; with 16 it is slower up to
100,000 at least; see benchmarks/nearest.py.
"""


class NearestItems:
    """An index over L2-normalised item vectors (V + 1, D); row 0 is padding and never returned. Equal scores are ordered by index."""

    def __init__(self, vectors: FloatArray) -> None:
        self._vectors = vectors

    def __len__(self) -> int:
        return len(self._vectors) - 1

    @classmethod
    def get_availability(cls) -> Availability:
        """Whether the libraries of this index are installed here."""
        return Availability.yes()

    @classmethod
    def is_fast(cls) -> bool:
        """Whether the index is fast on this processor, with the threads that this process computes with."""
        return True

    def answer(self, requests: Sequence[EncodeRequest], states_BD: FloatArray) -> list[Encoded]:
        """The items that each request asks for, given its state; one search serves all requests for the whole catalogue."""
        states_BD = finite(states_BD)
        whole = [row for row, request in enumerate(requests) if request.among is None]
        found = iter(self.search(states_BD[whole], [requests[row].top_n for row in whole]) if whole else ())
        return [
            next(found) if request.among is None else self.among(request.among, state, request.top_n)
            for request, state in zip(requests, states_BD, strict=True)
        ]

    def search(self, states_BD: FloatArray, counts: Sequence[int]) -> list[Encoded]:
        """The nearest of all items to each state, `counts` of them; fewer where there are fewer."""
        scores_BV = states_BD @ self._vectors[1:].T
        return [_best(state, scores, count) for state, scores, count in zip(states_BD, scores_BV, counts, strict=True)]

    def among(self, among: Int32Array, state: FloatArray, top_n: int) -> Encoded:
        """The best `top_n` items of `among`; indices that are no items are passed over."""
        items = np.unique(among)
        items = items[(items >= 1) & (items <= len(self))].astype(np.int32)
        return _best(state, self._vectors[items] @ state, top_n, items)


def known_index(name: str) -> str:
    """The name as it is. Raises UnknownChoice where it names no index."""
    if name not in (names := {*INDEXES, AUTO}):
        raise UnknownChoice("index", name, names)
    return name


def index_availability(name: str) -> Availability:
    """Whether the index of this name can be made here, and if not, what to install."""
    return Availability.yes() if name == AUTO else _kind(name).get_availability()


def make_index(name: str, vectors: FloatArray, *, on_gpu: bool = False) -> NearestItems:
    """The index of this name over `vectors`, as NearestItems takes them. Raises BackendUnavailable where it cannot be made here.

    `on_gpu`: whether the engine that it is for computes on a GPU, by which `auto` chooses.
    """
    kind = _kind(_fastest(len(vectors) - 1, on_gpu=on_gpu) if name == AUTO else name)
    kind.get_availability().require()
    return kind(vectors)


def finite(states_BD: FloatArray) -> FloatArray:
    """The states as they are. Raises BackendFailed where one holds NaN or infinity: the engine that made it broke."""
    if not np.isfinite(states_BD).all():
        raise BackendFailed("the encoder returned a state that is not finite")
    return states_BD


def _kind(name: str) -> type[NearestItems]:
    kind: type[NearestItems] = choose("index", INDEXES, name)
    return kind


def _fastest(items: int, *, on_gpu: bool) -> str:
    if on_gpu and items >= CUDA_FROM and index_availability("cuda").ok:
        return "cuda"
    return "bf16" if items >= BF16_FROM and index_availability("bf16").ok and _kind("bf16").is_fast() else "exact"


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
