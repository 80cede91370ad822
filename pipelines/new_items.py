"""Items that the model was not trained on: a vector from the items that they resemble, and a semantic ID of codes that the decoder knows.

    title and attributes -> known items with the same words -> mean of their vectors -> the free path nearest to it

Shapes: V known items, n new ones, D width; the joint catalogue holds the known items first.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import numpy.typing as npt

from cluster.dataset import Catalogue
from cluster.semantic_ids import SemanticIds
from cluster.values import FloatArray, Int64Array
from pipelines.assign_ids import add_items
from pipelines.titles import with_titles, words_of

RESEMBLED = 10
"""From how many known items, the most similar ones, a new item's vector is made."""
COMMON_LEAST, COMMON_SHARE = 1_000, 0.01
"""A word that more known items have than both of these, a number and a share of them all, is common."""


@dataclass(frozen=True, eq=False)
class Placed:
    """New items among the known: `vectors` (n, D) of unit length, `lengths` (n,) of their embeddings, and how many are `unlike` all."""

    vectors: FloatArray
    lengths: FloatArray
    unlike: int

    @property
    def rows(self) -> FloatArray:
        """The rows that are added to the embedding table, (n, D)."""
        return self.vectors * self.lengths[:, None]


def place(joint: Catalogue, vectors: FloatArray, lengths: FloatArray, learnt: Int64Array | None = None) -> Placed:
    """Each new item at the mean of the RESEMBLED known items most like it by title and attributes, weighted by their similarity.

    Similarity is the cosine of two items' words, each weighted by its rarity. Compared are the known items that share a word with the new
    one; a word that more than COMMON_LEAST of them, and more than COMMON_SHARE, have finds items only where no rarer one is shared.
    An item that shares no word with a known one is placed at the mean of all. `vectors` (V + 1, D) and `lengths` (V + 1,) of the known
    items' embeddings; a new one is as long as those it is made of are on average. `learnt`: the indices of those that count as known,
    by default all: an item without learnt events was met in training as a wrong answer only, and its vector is where no user is.
    """
    if learnt is not None:
        joint = Catalogue([*(joint[item] for item in learnt.tolist()), *joint.items[len(vectors) - 1 :]])
        vectors, lengths = (np.concatenate([column[:1], column[learnt]]) for column in (vectors, lengths))
    known = len(vectors) - 1
    everything = vectors[1:].mean(axis=0), lengths[1:].mean()
    resembled = list(_resembled(joint, known))
    means = [(shares @ vectors[items], lengths[items].mean()) if len(items) else everything for items, shares in resembled]
    sums = np.array([mean for mean, _ in means], np.float32).reshape(-1, vectors.shape[1])
    units = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-6)
    return Placed(units, np.array([length for _, length in means], np.float32), sum(not len(items) for items, _ in resembled))


def extend_ids(ids: SemanticIds, vectors: FloatArray, joint: Catalogue, *, title_weight: float, learnt: int) -> SemanticIds:
    """The IDs with a path for each new item; `vectors` (V + n + 1, D) are of all items.

    `title_weight`: with which the IDs were made; `learnt`: from how many items: the codebooks know only those items' words.
    Raises DataError where no path is free, or the codebooks were made with another title weight.
    """
    clustered = with_titles(vectors, joint, title_weight, learnt) if title_weight else vectors
    return add_items(ids, clustered[ids.items + 1 :])


def _resembled(joint: Catalogue, known: int) -> Iterator[tuple[Int64Array, npt.NDArray[np.float64]]]:
    """For each new item the known items most similar to it, and each one's share of the similarity; none where no word is shared.

    By common words, which most items may have, items are found only where no rarer one is shared. An id that stands for a missing title
    has no words. Memory grows by a count for each word, and by the items of the new items' words.
    """
    joint = Catalogue([replace(item, title="") if item.title == item.item_id else item for item in joint.items])
    new = range(known + 1, len(joint) + 1)
    counts = Counter(word for item in joint.items for word in words_of(item))

    def weight(word: str) -> float:
        return math.log((1 + len(joint)) / counts[word]) ** 2

    norms = np.sqrt([0, *(math.fsum(map(weight, words_of(item))) for item in joint.items)])
    sharing = _items_with_words(joint, known, set().union(*(words_of(joint[item]) for item in new)))
    common = max(COMMON_LEAST, COMMON_SHARE * known)
    for item in new:
        shared = {word: sharing[word] for word in sorted(words_of(joint[item])) if word in sharing}
        rare = [items for items in shared.values() if len(items) <= common]
        others = reduce(np.union1d, rare or shared.values(), np.empty(0, np.int64))
        similarity = np.zeros(len(others))
        for word, items in shared.items():
            has = np.searchsorted(items, others, "right") > np.searchsorted(items, others)
            similarity += weight(word) * has
        similarity /= norms[others] * norms[item]
        best = np.argsort(-similarity, kind="stable")[:RESEMBLED]
        yield others[best], similarity[best] / similarity[best].sum()


def _items_with_words(joint: Catalogue, known: int, words: set[str]) -> dict[str, Int64Array]:
    """The known items that have each of the words, in order; without words that none has."""
    found: dict[str, list[int]] = defaultdict(list)
    for item in range(1, known + 1):
        for word in words_of(joint[item]) & words:
            found[word].append(item)
    return {word: np.array(items) for word, items in found.items()}
