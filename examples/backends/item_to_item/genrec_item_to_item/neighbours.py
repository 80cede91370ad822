"""Each item's neighbours, learnt from what users chose one after the other.

    similarity(i, j) = sum over users of both of 2 ** (-|t_i - t_j| / half-life)  /  sqrt(n_i n_j)

n is an item's number of events: the cosine of item-to-item collaborative filtering (Linden, Smith, York: Amazon.com recommendations, 2003),
where two events count the less the further they are apart in time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from cluster.dataset import Catalogue, Dataset, Interactions
from cluster.errors import BackendUnavailable
from cluster.values import FloatArray, Int32Array

DAY_S = 86_400


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Row i: the most similar items of item i, catalogue indices (V + 1, N), 0 where it has fewer, and their similarities."""

    items: Int32Array
    similarities: FloatArray


def fit(events: Interactions, size: int, *, half_life_days: float = 30.0, window: int = 50, count: int = 100) -> Neighbours:
    """The `count` nearest of each of `size` items; of a user's events those up to `window` apart are compared."""
    pairs, weights = map(np.concatenate, zip(*_pairs(events, size + 1, half_life_days * DAY_S, window), strict=True))
    keys, places = np.unique(pairs, return_inverse=True)
    left, right = np.divmod(keys, size + 1)
    popularity = events.popularity(size)
    similarities = np.bincount(places, weights) / np.sqrt(popularity[left] * popularity[right])
    return _nearest(left, right, similarities.astype(np.float32), size, count)


def _pairs(events: Interactions, base: int, half_life_s: float, window: int) -> Iterator[tuple[npt.NDArray[np.int64], FloatArray]]:
    """(item x base + other item), both ways, and what the pair counts, for all events of one user that are 1, 2 ... `window` apart."""
    users, items = np.repeat(np.arange(events.users), events.lengths), events.items.astype(np.int64)
    yield np.empty(0, np.int64), np.empty(0, np.float32)
    for apart in range(1, min(window, int(events.lengths.max(initial=1)) - 1) + 1):
        same = (users[apart:] == users[:-apart]) & (items[apart:] != items[:-apart])
        one, other = items[:-apart][same], items[apart:][same]
        seconds = (events.timestamps[apart:] - events.timestamps[:-apart])[same]
        keys, places = np.unique(np.minimum(one, other) * base + np.maximum(one, other), return_inverse=True)
        weights = np.bincount(places, np.exp2(-seconds / half_life_s), len(keys)).astype(np.float32)
        low, high = np.divmod(keys, base)
        yield np.concatenate([keys, high * base + low]), np.concatenate([weights, weights])


def _nearest(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64], scores: FloatArray, size: int, count: int) -> Neighbours:
    """The best of each item; of equal ones the lower index first."""
    order = np.lexsort((right, -scores, left))
    left, right, scores = left[order], right[order], scores[order]
    places = np.arange(len(left)) - np.searchsorted(left, left)
    kept = places < count
    items, similarities = np.zeros((size + 1, count), np.int32), np.zeros((size + 1, count), np.float32)
    items[left[kept], places[kept]], similarities[left[kept], places[kept]] = right[kept], scores[kept]
    return Neighbours(items, similarities)


def write(neighbours: Neighbours, dataset: Dataset, path: Path) -> None:
    """By item ids, so that the file outlives the versions of a model, whose indices may differ."""
    ids = np.array(["", *(item.item_id for item in dataset.catalogue.items)])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez_compressed(file, ids=ids, items=neighbours.items, similarities=neighbours.similarities)


def read(path: Path, catalogue: Catalogue) -> Neighbours:
    """As catalogue indices of a model. Raises BackendUnavailable where it is no such file, or shares no item with the catalogue."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            ids, items, similarities = arrays["ids"], arrays["items"], arrays["similarities"]
    except (OSError, EOFError, KeyError, ValueError, BadZipFile) as error:
        raise BackendUnavailable(f"{path} holds no neighbours: {error}; make it again: python -m genrec_item_to_item fit") from error
    index = np.array([catalogue.index_of(str(item_id)) or 0 for item_id in ids], np.int32)
    if not index.any():
        raise BackendUnavailable(f"{path} names none of this model's {len(catalogue)} items: it was made from other data")
    rows, known = np.zeros((len(catalogue) + 1, items.shape[1]), np.int32), np.flatnonzero(index)
    shares = np.zeros(rows.shape, np.float32)
    rows[index[known]] = index[items[known]]
    shares[index[known]] = similarities[known] * (rows[index[known]] > 0)
    return Neighbours(rows, shares)
