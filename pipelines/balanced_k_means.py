"""K-means whose clusters are of nearly equal size, in blocks that fit the memory. Shapes: n points, D width, K centroids."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from cluster.values import FloatArray, Int64Array

ROUNDS = 25
BALANCED_ROUNDS = 5
SLACK = 1.25
"""A first code may hold so many times its fair share of the items."""
BLOCK_BYTES = 64 << 20
"""The most bytes of distances between items and codes that are held at once."""


def k_means(points: FloatArray, size: int, rng: np.random.Generator) -> FloatArray:
    """Centroids (K, D) of Lloyd's rounds from random points; a centroid that loses all its points takes the farthest one."""
    centroids = points[rng.choice(len(points), size, replace=False)].copy()
    for _ in range(ROUNDS):
        code, distance = nearest(distances_of(points, centroids), np.arange(len(points)))
        centroids, empty = _means(points, code, centroids)
        if len(empty):
            centroids[empty] = points[np.argsort(-distance, kind="stable")[: len(empty)]]
    return centroids


def balanced_codes(points: FloatArray, centroids: FloatArray, cell: Int64Array) -> tuple[Int64Array, FloatArray]:
    """Each point's code, such that no code of a cell holds more than its share; and the centroids, moved to the means of their points.

    The first level is one cell, where codes may hold SLACK times their share; in deeper cells each item beyond the share is a collision.
    """
    code = np.zeros(len(points), np.int64)
    order = np.argsort(cell, kind="stable")
    cells = np.split(order, np.flatnonzero(np.diff(cell[order])) + 1)
    slack = SLACK if len(cells) == 1 else 1.0
    for _ in range(BALANCED_ROUNDS):
        for rows in cells:
            capacity = int(np.ceil(slack * len(rows) / len(centroids)))
            code[rows] = assign(distances_of(points[rows], centroids), capacity)
        centroids, _ = _means(points, code, centroids)
    return code, centroids


class Distances(Protocol):
    """Squared distances of points from centroids, (n, K): the matrix itself, or an object that computes the rows that are asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: Int64Array, /) -> FloatArray: ...


def assign(distances: Distances, capacity: int) -> Int64Array:
    """A column for each row (n, K), the nearest that has room: a column takes at most `capacity` rows, the nearest of those that ask."""
    count, size = distances.shape
    code = np.full(count, -1, np.int64)
    room = np.full(size, capacity)
    while (waiting := np.flatnonzero(code < 0)).size:
        wanted, distance = nearest(distances, waiting, full=room <= 0)
        order = np.lexsort((distance, wanted))
        taken = order[rank_in_runs(wanted[order]) < room[wanted[order]]]
        code[waiting[taken]] = wanted[taken]
        room -= np.bincount(wanted[taken], minlength=len(room))
    return code


def nearest(distances: Distances, rows: Int64Array, full: npt.NDArray[np.bool_] | None = None) -> tuple[Int64Array, FloatArray]:
    """The nearest column of each row, the first of equals, and how far it is; never one that is `full` (K,)."""
    code, distance = np.empty(len(rows), np.int64), np.empty(len(rows), np.float32)
    at_once = max(1, BLOCK_BYTES // (4 * distances.shape[1]))
    for start in range(0, len(rows), at_once):
        block = distances[rows[start : start + at_once]]
        if full is not None:
            block[:, full] = np.inf
        code[start : start + at_once] = block.argmin(axis=1)
        distance[start : start + at_once] = block.min(axis=1)
    return code, distance


def distances_of(points: FloatArray, centroids: FloatArray) -> Distances:
    """The matrix where it fits in BLOCK_BYTES; else its rows are computed whenever they are asked for."""
    whole = 4 * len(points) * len(centroids) <= BLOCK_BYTES
    return squared_distances(points, centroids) if whole else _ComputedDistances(points, centroids)


@dataclass(frozen=True, eq=False)
class _ComputedDistances:
    """Distances with rows that are computed when they are asked for: a million items by 2,048 codes would be 8 GB."""

    points: FloatArray
    centroids: FloatArray

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.points), len(self.centroids)

    def __getitem__(self, rows: Int64Array, /) -> FloatArray:
        return squared_distances(self.points[rows], self.centroids)


def squared_distances(points: FloatArray, centroids: FloatArray) -> FloatArray:
    """The squared distance of each point from each centroid, (n, K)."""
    distances: FloatArray = points @ centroids.T
    distances *= -2
    distances += (points**2).sum(axis=1, keepdims=True)
    distances += (centroids**2).sum(axis=1)
    return distances


def _means(points: FloatArray, code: Int64Array, centroids: FloatArray) -> tuple[FloatArray, Int64Array]:
    """The mean of each code's points, or its old centroid where it has none; and the codes that have none."""
    counts = np.bincount(code, minlength=len(centroids))
    sums = np.zeros_like(centroids)
    np.add.at(sums, code, points)
    means: FloatArray = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centroids)
    return means.astype(np.float32), np.flatnonzero(counts == 0)


def rank_in_runs(values: npt.NDArray[np.int64]) -> Int64Array:
    """0, 1, ... within each run of equal values."""
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    return np.arange(len(values)) - np.repeat(starts, np.diff(np.append(starts, len(values))))
