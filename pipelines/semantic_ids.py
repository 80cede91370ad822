"""Semantic IDs from item vectors: residual k-means, balanced at every level, and a last level that makes each item's path unique.

    item vector -> nearest centroid (code 1) -> what is left of it -> nearest centroid (code 2) -> ... -> a number within the cell

Each level's codes are shared by all items, so that a decoder learns them once; balance keeps cells small and every code in use.
Shapes: V items, D width, K codes of a level.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.dataset import Catalogue
from cluster.errors import ConfigError, DataError
from cluster.semantic_ids import SemanticIds
from cluster.values import FloatArray, Int32Array, Int64Array

ROUNDS = 25
BALANCED_ROUNDS = 5
TEXT_DIM = 128
SLACK = 1.25
"""How many times its fair share of the items a first code may hold."""


@dataclass(frozen=True, slots=True)
class LevelUse:
    """How many of a level's `size` codes are used, their `perplexity` (`size` where all are equally full) and the fullest one's items."""

    size: int
    used: int
    perplexity: float
    fullest: int


@dataclass(frozen=True, slots=True)
class Report:
    """`shared`: share of the items that only the last level tells from others; `largest_cell`: how many share a path but for that level."""

    levels: tuple[LevelUse, ...]
    shared: float
    largest_cell: int

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "levels": [asdict(level) for level in self.levels]}


def build_semantic_ids(vectors: FloatArray, *, levels: int = 3, codes: int | None = None, seed: int = 0) -> SemanticIds:
    """IDs of `levels` codes for the item vectors (V + 1, D), whose row 0 is padding.

    `codes`: how many a level has, by default as few as make two cells for each item.
    Raises ConfigError where the levels or codes are too few, DataError where a vector is not finite.
    """
    items = len(vectors) - 1
    if levels < 2 or items < 1:
        raise ConfigError(f"semantic IDs of {levels} levels for {items} items cannot be made; give at least 2 levels and 1 item")
    if not np.isfinite(vectors).all():
        raise DataError("an item vector is NaN or infinite; train the encoder again with a lower learning rate")
    size = codes or fitting_codes(items, levels)
    if size < 2:
        raise ConfigError(f"{size} codes a level tell nothing apart; give at least 2")
    left = np.asarray(vectors[1:], np.float32)
    cell, chosen, books = np.zeros(items, np.int64), [], []
    for level in range(levels - 1):
        book = k_means(left, min(size, items), np.random.default_rng([seed, level]))
        code, book = balanced_codes(left, book, cell)
        left = left - book[code]
        cell = np.unique(cell * len(book) + code, return_inverse=True)[1]
        chosen.append(code)
        books.append(book)
    chosen.append(_number_within(cell))
    path = np.stack(chosen, axis=1).astype(np.int32)
    sizes = (*(len(book) for book in books), int(path[:, -1].max()) + 1)
    return SemanticIds(np.concatenate([np.zeros((1, levels), np.int32), path]), sizes, tuple(books))


def fitting_codes(items: int, levels: int) -> int:
    """The smallest power of two, 8 at least, of which all levels but the last make two cells for every item: few then share one."""
    size = 8
    while size ** (levels - 1) < 2 * items:
        size *= 2
    return size


def k_means(points: FloatArray, size: int, rng: np.random.Generator) -> FloatArray:
    """Centroids (K, D) of Lloyd's rounds from random points; a centroid that loses all its points takes the farthest one."""
    centroids = points[rng.choice(len(points), size, replace=False)].copy()
    for _ in range(ROUNDS):
        distances = squared_distances(points, centroids)
        code = distances.argmin(axis=1)
        centroids, empty = _means(points, code, centroids)
        if len(empty):
            centroids[empty] = points[np.argsort(-distances.min(axis=1), kind="stable")[: len(empty)]]
    return centroids


def balanced_codes(points: FloatArray, centroids: FloatArray, cell: Int64Array) -> tuple[Int64Array, FloatArray]:
    """Each point's code, no code of a cell fuller than its share, and the centroids moved to what they hold.

    The first level is one cell, whose codes may hold SLACK times their share; in deeper cells an item too many costs a collision.
    """
    code = np.zeros(len(points), np.int64)
    cells = [np.flatnonzero(cell == number) for number in range(int(cell.max()) + 1)]
    slack = SLACK if len(cells) == 1 else 1.0
    for _ in range(BALANCED_ROUNDS):
        for rows in cells:
            capacity = int(np.ceil(slack * len(rows) / len(centroids)))
            code[rows] = assign(squared_distances(points[rows], centroids), capacity)
        centroids, _ = _means(points, code, centroids)
    return code, centroids


def assign(distances: FloatArray, capacity: int) -> Int64Array:
    """The nearest column for each row (n, K) with at most `capacity` rows a column, which takes the nearest of those that ask for it."""
    code = np.full(len(distances), -1, np.int64)
    room = np.full(distances.shape[1], capacity)
    while (waiting := np.flatnonzero(code < 0)).size:
        asked = np.where(room > 0, distances[waiting], np.inf)
        wanted = asked.argmin(axis=1)
        order = np.lexsort((asked[np.arange(len(waiting)), wanted], wanted))
        taken = order[_rank_in_runs(wanted[order]) < room[wanted[order]]]
        code[waiting[taken]] = wanted[taken]
        room -= np.bincount(wanted[taken], minlength=len(room))
    return code


def add_item(ids: SemanticIds, vector: FloatArray) -> SemanticIds:
    """The IDs with one item more, unknown to the decoder: its path is the free one whose codes are nearest to its vector (D,).

    Only codes that the decoder was trained on are used, so it needs no training. Raises DataError where every path is taken.
    """
    taken = {tuple(path) for path in ids.codes[1:].tolist()}
    for cell in _nearest_cells(ids.codebooks, np.asarray(vector, np.float32)):
        for last in range(ids.sizes[-1]):
            if (*cell, last) not in taken:
                return replace(ids, codes=np.concatenate([ids.codes, np.array([[*cell, last]], np.int32)]))
    raise DataError(f"all {len(taken)} paths are taken; train anew, with more codes or levels")


def report(ids: SemanticIds) -> Report:
    """Codebook use and collisions."""
    _, cell_sizes = np.unique(ids.codes[1:, :-1], axis=0, return_counts=True)
    uses = tuple(_use(ids.codes[1:, level], size) for level, size in enumerate(ids.sizes))
    return Report(uses, float(cell_sizes[cell_sizes > 1].sum() / ids.items), int(cell_sizes.max()))


def with_titles(vectors: FloatArray, catalogue: Catalogue, weight: float) -> FloatArray:
    """The item vectors (V + 1, D) with TEXT_DIM columns beside them of what titles and attributes say, whose `weight` is 0..1."""
    text = title_vectors(catalogue)
    return np.concatenate([vectors * np.sqrt(1 - weight), text * np.sqrt(weight)], axis=1, dtype=np.float32)


def title_vectors(catalogue: Catalogue) -> FloatArray:
    """Random indexing of titles and attributes: the sum of a random vector for each word, weighted by its rarity, (V + 1, TEXT_DIM).

    Rows are of unit length; row 0 is zeros. See Kanerva et al. 2000.
    """
    words = [set(re.findall(r"\w+", " ".join([item.title, *item.attributes.values()]).lower())) for item in catalogue.items]
    counts = Counter(word for each in words for word in each)
    number = {word: row for row, word in enumerate(sorted(counts))}
    rarity = np.log((1 + len(words)) / np.array([counts[word] for word in number] or [1], np.float32))
    directions = np.random.default_rng(0).standard_normal((len(rarity), TEXT_DIM)) * rarity[:, None]
    vectors = np.zeros((len(words) + 1, TEXT_DIM), np.float32)
    for row, each in enumerate(words, start=1):
        vectors[row] = directions[[number[word] for word in each]].sum(axis=0)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    return vectors


def squared_distances(points: FloatArray, centroids: FloatArray) -> FloatArray:
    """(n, K)."""
    crossed: FloatArray = points @ centroids.T
    distances: FloatArray = (points**2).sum(axis=1, keepdims=True) - 2 * crossed + (centroids**2).sum(axis=1)
    return distances


def _means(points: FloatArray, code: Int64Array, centroids: FloatArray) -> tuple[FloatArray, Int64Array]:
    """The mean of each code's points, or its old centroid where it has none; and the codes that have none."""
    counts = np.bincount(code, minlength=len(centroids))
    sums = np.zeros_like(centroids)
    np.add.at(sums, code, points)
    means: FloatArray = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centroids)
    return means.astype(np.float32), np.flatnonzero(counts == 0)


def _number_within(cell: npt.NDArray[np.int64]) -> Int64Array:
    """0, 1, ... for the items of each cell, in their order."""
    order = np.argsort(cell, kind="stable")
    numbers = np.empty(len(cell), np.int64)
    numbers[order] = _rank_in_runs(cell[order])
    return numbers


def _rank_in_runs(values: npt.NDArray[np.int64]) -> Int64Array:
    """0, 1, ... within each run of equal values."""
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
    return np.arange(len(values)) - np.repeat(starts, np.diff(np.append(starts, len(values))))


def _nearest_cells(codebooks: Sequence[FloatArray], vector: FloatArray) -> Iterator[tuple[int, ...]]:
    """All paths but for the last level, the nearest first code's first, and within it likewise."""
    if not codebooks:
        yield ()
        return
    book, *deeper = codebooks
    for code in np.argsort(((book - vector) ** 2).sum(axis=1), kind="stable").tolist():
        for rest in _nearest_cells(deeper, vector - book[code]):
            yield (code, *rest)


def _use(codes: Int32Array, size: int) -> LevelUse:
    counts = np.bincount(codes, minlength=size)
    shares = counts[counts > 0] / counts.sum()
    return LevelUse(size, int((counts > 0).sum()), float(np.exp(-(shares * np.log(shares)).sum())), int(counts.max()))
