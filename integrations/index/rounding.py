"""How far a product of rounded vectors can be off.

    |v.s - v'.s'|  <=  |v| |s - s'|  +  |v - v'| |s'|        v', s': v and s rounded (Cauchy-Schwarz)

The norms on the right are measured, which bounds the error three times as tightly as the format's unit roundoff does. With the bound, a
scan of rounded vectors proves which items cannot belong to the answer.
"""

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from cluster.values import FloatArray

Rounded: TypeAlias = Callable[[FloatArray], FloatArray]
"""Vectors (n, D) -> the same rounded, in fp32."""
SLICE = 65_536
_FP32_SUM = 2.0**-23
"""Largest error of a sum in fp32 per term, relative to the sum of magnitudes, however the terms are ordered."""


def slices(vectors: FloatArray) -> Iterator[FloatArray]:
    """The rows in slices, so that only one slice's intermediate results are in memory at a time."""
    return (vectors[start : start + SLICE] for start in range(0, len(vectors), SLICE))


class Rounding:
    """The error that rounding makes in these vectors (V, D)."""

    def __init__(self, vectors_VD: FloatArray, rounded: Rounded) -> None:
        self._rounded, self._dim = rounded, vectors_VD.shape[1]
        self._error = max((_lengths(part - rounded(part)).max() for part in slices(vectors_VD)), default=0.0)
        self._longest = max((_lengths(part).max() for part in slices(vectors_VD)), default=0.0)

    def bound(self, states_BD: FloatArray) -> FloatArray:
        """(B,): how far any item's product with the state may be from that of the rounded two, summed in fp32."""
        rounded_BD = self._rounded(states_BD)
        lengths_B = _lengths(rounded_BD)
        bound: FloatArray = self._longest * (_lengths(states_BD - rounded_BD) + self._dim * _FP32_SUM * lengths_B) + self._error * lengths_B
        return bound


def _lengths(vectors: FloatArray) -> FloatArray:
    lengths: FloatArray = np.linalg.norm(vectors, axis=1)
    return lengths
