"""Semantic IDs from item vectors: residual k-means, balanced at every level, and a last level that makes each item's path unique.

    item vector -> nearest centroid (code 1) -> what is left of it -> nearest centroid (code 2) -> ... -> a number within the cell

Each level's codes are shared by all items, so that a decoder learns them once; balance keeps cells small and every code in use.
Shapes: V items, D width, K codes of a level.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cluster.errors import ConfigError, DataError
from cluster.semantic_ids import SemanticIds
from cluster.values import FloatArray, Int32Array, Int64Array
from pipelines.balanced_k_means import balanced_codes, k_means, rank_in_runs

Path: TypeAlias = tuple[int, ...]
MOST_CODES = 65_536
"""The most codes of a level. With more, clustering takes hours, and the decoder is mostly an embedding table."""


@dataclass(frozen=True, slots=True)
class LevelUse:
    """How many of a level's `size` codes are used, their `perplexity` (`size` where all are equally full), and the items of the fullest."""

    size: int
    used: int
    perplexity: float
    fullest: int


@dataclass(frozen=True, slots=True)
class Report:
    """`shared`: the share of items that only the last level tells apart; `largest_cell`: the most items with paths equal up to there."""

    levels: tuple[LevelUse, ...]
    shared: float
    largest_cell: int

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "levels": [asdict(level) for level in self.levels]}


def codes_a_level(items: int, levels: int, codes: int | None = None) -> int:
    """How many codes a level has. `codes`: the number asked for; None: as few as make two cells for each item.

    Raises ConfigError where the levels or codes are too few or the codes too many.
    """
    if levels < 2 or items < 1:
        raise ConfigError(f"semantic IDs of {levels} levels for {items} items cannot be made; give at least 2 levels and 1 item")
    size = codes or fitting_codes(items, levels)
    if size < 2:
        raise ConfigError(f"{size} codes a level tell nothing apart; give at least 2")
    if (most := codes or min(size, items)) > MOST_CODES:
        raise ConfigError(f"{most:,} codes a level are more than {MOST_CODES:,}; give fewer, or more levels than {levels}")
    return size


def build_semantic_ids(vectors: FloatArray, *, levels: int = 3, codes: int | None = None, seed: int = 0) -> SemanticIds:
    """IDs of `levels` codes for the item vectors (V + 1, D), of which row 0 is padding.

    `codes`: how many a level has, by default as few as make two cells for each item.
    Raises ConfigError where the levels or codes are too few or the codes too many, DataError where a vector is not finite.
    """
    items = len(vectors) - 1
    size = codes_a_level(items, levels, codes)
    if not np.isfinite(vectors).all():
        raise DataError("an item vector is NaN or infinite; train the encoder again with a lower learning rate")
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


def fitting_vocabulary(items: int, levels: int) -> int:
    """The tokens of IDs with as many codes as fit: token 0, each level's, and one of the last, as balanced cells hold one item each."""
    return 2 + (levels - 1) * min(codes_a_level(items, levels), items)


def add_items(ids: SemanticIds, clustered: FloatArray) -> SemanticIds:
    """The IDs with more items, unknown to the decoder: the path of each is the free one whose codes are nearest to its vector.

    `clustered` (n, D) are vectors as `build_semantic_ids` took them: of a model trained with a title weight, rows of `with_titles`.
    While such a path is free, only codes that items have at their level are used: those the decoder was trained on, so it needs no
    training. Then codes that no item has are used too, which the codebooks of a catalogue of few items may hold.
    Raises DataError where a vector is of another width than the codebooks or not finite, where there are no codebooks, and where fewer
    paths are free than are needed.
    """
    _check_fits(ids, clustered)
    taken, codes = Counter(_beginnings(ids.codes[1:].tolist())), []
    used, every = [np.unique(column) for column in ids.codes[1:].T], [np.arange(size) for size in ids.sizes]
    room = math.prod(map(len, used))
    for vector in np.asarray(clustered, np.float32):
        codes.append(_free_path(ids, vector, taken, used if taken[()] < room else every))
        taken.update(_beginnings(codes[-1:]))
    return replace(ids, codes=np.concatenate([ids.codes, np.array(codes, np.int32).reshape(-1, ids.levels)]))


def _check_fits(ids: SemanticIds, clustered: FloatArray) -> None:
    if len(ids.codebooks) != ids.levels - 1:
        raise DataError(f"these semantic IDs have {len(ids.codebooks)} codebooks for {ids.levels} levels; train anew to add items")
    for width in {book.shape[1] for book in ids.codebooks} - {clustered.shape[1]}:
        cure = "give what the items were clustered by, with the titles' columns where the model was trained with --title-weight"
        raise DataError(f"a vector of {clustered.shape[1]} columns does not fit codebooks of {width}; {cure}")
    if not np.isfinite(clustered).all():
        raise DataError("the vector of a new item is NaN or infinite; no path is near it")
    if len(clustered) > (paths := math.prod(ids.sizes)) - ids.items:
        new = f"{len(clustered)} new items need a path each" if len(clustered) > 1 else "a new item needs a path"
        raise DataError(f"{new}, and {ids.items} of {paths} paths are taken; train anew, with the new items among the others")


def _free_path(ids: SemanticIds, vector: FloatArray, taken: Mapping[Path, int], choices: Sequence[Int64Array]) -> Path:
    """The path that takes, level by level, the nearest code of `choices` with a free path, of which there is one. `taken`: how many taken
    paths begin with a path; while any path of `choices` is free, all of them are of these.
    """
    path: Path = ()
    for level, book in enumerate(ids.codebooks, start=1):
        room = math.prod(map(len, choices[level:]))
        nearest = choices[level - 1][np.argsort(((book[choices[level - 1]] - vector) ** 2).sum(axis=1), kind="stable")]
        code = next(code for code in nearest.tolist() if taken[*path, code] < room)
        path, vector = (*path, code), vector - book[code]
    return next((*path, last) for last in choices[-1].tolist() if not taken[*path, last])


def _beginnings(paths: Iterable[Sequence[int]]) -> Iterator[Path]:
    """All beginnings of each path, from none of its codes to all of them."""
    return (tuple(path[:length]) for path in paths for length in range(len(path) + 1))


def report(ids: SemanticIds) -> Report:
    """Codebook use and collisions."""
    _, cell_sizes = np.unique(ids.codes[1:, :-1], axis=0, return_counts=True)
    uses = tuple(_use(ids.codes[1:, level], size) for level, size in enumerate(ids.sizes))
    return Report(uses, float(cell_sizes[cell_sizes > 1].sum() / ids.items), int(cell_sizes.max()))


def _number_within(cell: npt.NDArray[np.int64]) -> Int64Array:
    """The items of each cell numbered 0, 1, ... in their order."""
    order = np.argsort(cell, kind="stable")
    numbers = np.empty(len(cell), np.int64)
    numbers[order] = rank_in_runs(cell[order])
    return numbers


def _use(codes: Int32Array, size: int) -> LevelUse:
    counts = np.bincount(codes, minlength=size)
    shares = counts[counts > 0] / counts.sum()
    return LevelUse(size, int((counts > 0).sum()), float(np.exp(-(shares * np.log(shares)).sum())), int(counts.max()))
