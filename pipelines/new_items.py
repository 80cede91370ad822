"""Items that the model was not trained on: a vector from the items that they resemble, and a semantic ID of codes that the decoder knows.

    title and attributes -> known items with the same words -> mean of their vectors -> the free path nearest to it

Shapes: V known items, n new ones, D width; the joint catalogue holds the known items first.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from cluster.dataset import Catalogue
from cluster.semantic_ids import SemanticIds
from cluster.values import FloatArray, Int64Array, Item
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


@dataclass(frozen=True, eq=False)
class Resemblance:
    """What new items are like. `known` (K,): the indices of the items that count as known; `found`: for each new item the indices of the
    known ones most similar to it, and each one's share of the similarity; none where no word is shared.
    """

    known: Int64Array
    found: Sequence[tuple[Int64Array, npt.NDArray[np.float64]]]


def resemblance(joint: Catalogue, items: int, learnt: Int64Array | None = None) -> Resemblance:
    """For each item after the first `items`, the new ones, the RESEMBLED known items most like it by title and attributes.

    Similarity is the cosine of two items' words, each weighted by its rarity. Compared are the known items that share a word with the new
    one; a word that more than COMMON_LEAST of them, and more than COMMON_SHARE, have finds items only where no rarer one is shared.
    `learnt`: the indices of those that count as known, by default all: an item without learnt events was met in training as a wrong answer
    only, and its vector is where no user is.
    """
    known = np.arange(1, items + 1) if learnt is None else learnt
    return Resemblance(known, list(_resembled(joint, known, range(items + 1, len(joint) + 1))))


def place(alike: Resemblance, vectors: FloatArray, lengths: FloatArray) -> Placed:
    """Each new item at the mean of the known items that it is like, weighted by their similarity; one like none, at the mean of all.

    `vectors` (V + 1, D) and `lengths` (V + 1,) of the known items' embeddings; a new one is as long as those it is made of are on average.
    """
    everything = vectors[alike.known].mean(axis=0), lengths[alike.known].mean()
    means = [(shares @ vectors[items], lengths[items].mean()) if len(items) else everything for items, shares in alike.found]
    sums = np.array([mean for mean, _ in means], np.float32).reshape(-1, vectors.shape[1])
    units = sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-6)
    return Placed(units, np.array([length for _, length in means], np.float32), sum(not len(items) for items, _ in alike.found))


def extend_ids(ids: SemanticIds, vectors: FloatArray, joint: Catalogue, *, title_weight: float, learnt: int) -> SemanticIds:
    """The IDs with a path for each new item; `vectors` (V + n + 1, D) are of all items.

    `title_weight`: with which the IDs were made; `learnt`: from how many items: the codebooks know only those items' words.
    Raises DataError where no path is free, or the codebooks were made with another title weight.
    """
    clustered = with_titles(vectors, joint, title_weight, learnt) if title_weight else vectors
    return add_items(ids, clustered[ids.items + 1 :])


def _resembled(joint: Catalogue, known: Int64Array, new: range) -> Iterator[tuple[Int64Array, npt.NDArray[np.float64]]]:
    """For each new item the known items most similar to it, and each one's share of the similarity.

    Memory grows by two entries of a dictionary for each word, by an array for each word of new items, and by four bytes for each word of an
    item, eight for one of a known item that a new item has too.
    """
    number, numbers, ends = dict[str, int](), array("I"), array("Q", [0])  # the numbers of all items' words, one item after the other

    def add(words: Iterable[str]) -> None:
        numbers.extend(number.setdefault(word, len(number)) for word in words)
        ends.append(len(numbers))

    for item in new:
        add(sorted(_words(joint[item])))
    having = [array("I") for _ in number]  # of each word of a new item: the known items that have it too, as rows of `known`
    for row, item in enumerate(known.tolist()):
        add(_words(joint[item]))
        for word in numbers[ends[-2] :]:
            if word < len(having):
                having[word].append(row)
    counts, everything = Counter(numbers), 1 + len(known) + len(new)
    weights = [math.log(everything / counts[word]) ** 2 for word in range(len(number))]
    norms = np.sqrt([math.fsum(weights[word] for word in numbers[start:end]) for start, end in pairwise(ends)])
    own, norms = norms[: len(new)], norms[len(new) :]
    common = max(COMMON_LEAST, COMMON_SHARE * len(known))
    similarities, compared = np.zeros(len(known)), np.zeros(len(known), bool)
    for norm, (start, end) in zip(own, pairwise(ends), strict=False):  # of the new items, which come first
        similarities.fill(0)
        compared.fill(False)
        shared = {word: np.asarray(having[word]) for word in numbers[start:end] if having[word]}
        for word, rows in shared.items():
            similarities[rows] += weights[word]
        for rows in [rows for rows in shared.values() if len(rows) <= common] or shared.values():
            compared[rows] = True
        others = np.flatnonzero(compared)
        similarity = similarities[others] / (norms[others] * norm)
        best = np.argsort(-similarity, kind="stable")[:RESEMBLED]
        yield known[others[best]], similarity[best] / similarity[best].sum()


def _words(item: Item) -> set[str]:
    """The words of an item; an id that stands for a missing title is none."""
    return words_of(replace(item, title="") if item.title == item.item_id else item)
