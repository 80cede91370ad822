"""The quality gate for int8 and bf16, which move states too far for a tolerance of numbers: they serve where the same items are found.

The gate needs no torch: an engine asks it when it is loaded.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from cluster.bundle import Bundle
from cluster.values import EncodeRequest, FloatArray, Int64Array, UserSequence
from cluster.window import Window
from integrations.hstu.engine_batch import engine_batch
from integrations.hstu.limits import limits
from integrations.hstu.user_behavior_schema import BehaviourBatch

NEAREST = 10
_USERS = 8
_SHARES = (1, 2, 8, 50)
"""The longest history of a batch, as divisors of the longest there can be: the whole, a half, an eighth and a fiftieth."""
_NOW = 1_700_000_000

States = Callable[[BehaviourBatch], FloatArray]


@dataclass(frozen=True, slots=True)
class Quality:
    """States compared with those of full precision, as means over users: the share of equal items among the ten nearest, and the cosine.

    The minimum over users would not do: some states are next to zero before they are scaled to length 1, so rounding turns them far.
    """

    overlap: float
    cosine: float

    def shortcoming(self, least: "Quality") -> str:
        """Which figure is below what it must be (NaN always is); empty where none is."""
        if not self.overlap >= least.overlap:
            return f"{self.overlap:.1%} of the ten nearest items are those of full precision; at least {least.overlap:.0%} must be"
        if not self.cosine >= least.cosine:
            return f"the cosine of states with those of full precision is {self.cosine:.4f}; it must be at least {least.cosine:g}"
        return ""


LEAST = Quality(overlap=0.9, cosine=0.99)


def compare(bundle: Bundle, states: States, reference: States) -> Quality:
    """The quality of `states` on the bundle's probes. Both take a batch and give its states (B, D)."""
    pairs = [(states(batch), reference(batch)) for batch in probes(bundle.popularity, limits(bundle.manifest.model).max_history)]
    mine, theirs = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return figures(mine, theirs, bundle.item_vectors)


def figures(states_BD: FloatArray, reference_BD: FloatArray, vectors_VD: FloatArray) -> Quality:
    """The quality of unit-length states; the first row of the vectors is padding."""
    cosines = np.einsum("bd,bd->b", states_BD, reference_BD)
    pairs = zip(_nearest(states_BD, vectors_VD), _nearest(reference_BD, vectors_VD), strict=True)
    shared = [np.intersect1d(mine, theirs).size / len(theirs) for mine, theirs in pairs]
    return Quality(float(np.mean(shared)), float(np.mean(cosines)))


def _nearest(states_BD: FloatArray, vectors_VD: FloatArray) -> Int64Array:
    return np.argsort(-(states_BD @ vectors_VD[1:].T), axis=1, kind="stable")[:, :NEAREST]


def probes(popularity: Int64Array, max_history: int) -> Iterator[BehaviourBatch]:
    """Seeded histories of 32 users: items as frequent as in the training data, lengths from one event to `max_history`.

    A bundle holds no user's history. `popularity` (V + 1,) is the bundle's.
    """
    rng = np.random.default_rng(0)
    share = (popularity[1:] + 1) / (popularity[1:] + 1).sum()
    for part in _SHARES:
        longest = max(1, max_history // part)
        lengths = [longest, *rng.integers(1, longest, _USERS - 1, endpoint=True)]
        requests = [EncodeRequest(_history(rng, share, int(length)), NEAREST) for length in lengths]
        yield engine_batch(requests, Window.of(max_history), len(share))


def _history(rng: np.random.Generator, share: "np.ndarray[tuple[int], np.dtype[np.float64]]", length: int) -> UserSequence:
    """`length` events, seconds to months apart, the latest a gap before the request."""
    items = rng.choice(len(share), length, p=share).astype(np.int32) + 1
    gaps = np.exp(rng.uniform(0, 16, length)).astype(np.int64)
    times = _NOW - gaps[::-1].cumsum()[::-1]
    return UserSequence(items, times, np.zeros(length, np.int8), np.full(length, np.nan, np.float32), _NOW)
