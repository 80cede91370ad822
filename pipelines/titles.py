"""Titles and attributes of items: as vectors, for clustering together with the encoder's, and the words that make items alike."""

import hashlib
import re
import sys
import unicodedata
from collections import Counter
from functools import cache

import numpy as np

from cluster.dataset import Catalogue
from cluster.values import FloatArray, Item

TEXT_DIM = 128


def with_titles(vectors: FloatArray, catalogue: Catalogue, weight: float, learnt: int | None = None) -> FloatArray:
    """The item vectors (V + 1, D) with TEXT_DIM further columns for titles and attributes, which have the `weight` 0..1."""
    text = title_vectors(catalogue, learnt)
    return np.concatenate([vectors * np.sqrt(1 - weight), text * np.sqrt(weight)], axis=1, dtype=np.float32)


def title_vectors(catalogue: Catalogue, learnt: int | None = None) -> FloatArray:
    """Random indexing of titles and attributes: the sum of a random vector for each word, weighted by its rarity, (V + 1, TEXT_DIM).

    Rows are of unit length, zeros where an item has no word; row 0 is zeros. See Kanerva et al. 2000.
    `learnt`: only so many items, the first ones, decide which words there are and how rare. Vectors are comparable only where these items
    are the same: one more word changes the random vectors of all words after it.
    """
    words = [_pieces_of(item) for item in catalogue.items]
    counts = Counter(word for each in words[:learnt] for word in each)
    number = {word: row for row, word in enumerate(sorted(counts))}
    rarity = np.log((1 + len(words[:learnt])) / np.array([counts[word] for word in number] or [1], np.float32))
    directions = np.random.default_rng(0).standard_normal((len(rarity), TEXT_DIM)) * rarity[:, None]
    vectors = np.zeros((len(words) + 1, TEXT_DIM), np.float32)
    for row, each in enumerate(words, start=1):
        vectors[row] = directions[sorted(number[word] for word in each if word in number)].sum(axis=0)
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-6)
    return vectors


def words_digest(catalogue: Catalogue) -> str:
    """A digest of all items' words: where it is the same, so are the vectors of `title_vectors`."""
    digest = hashlib.sha256()
    for item in catalogue.items:
        digest.update(repr(sorted(_pieces_of(item))).encode())
    return digest.hexdigest()


def words_of(item: Item) -> set[str]:
    """The words of its title and attributes, in lower case and composed (NFC); combining marks belong to the letters before them, and the
    joiners U+200C and U+200D to the letters on both sides.
    """
    text = _text(item)
    if text.isascii():  # has neither marks nor joiners; the pattern without them is ten times as fast
        return set(re.findall(r"\w+", text))
    return set(_word().findall(unicodedata.normalize("NFC", text)))


def _pieces_of(item: Item) -> set[str]:
    """As `words_of`, but cut at combining marks and joiners, and not composed: the codebooks of trained versions know these words."""
    return set(re.findall(r"\w+", _text(item)))


def _text(item: Item) -> str:
    return " ".join([item.title, *item.attributes.values()]).lower()


@cache
def _word() -> re.Pattern[str]:
    """The pattern of a word; that of all combining marks takes a tenth of a second to make."""
    marks = "".join(mark for mark in map(chr, range(sys.maxunicode + 1)) if unicodedata.category(mark).startswith("M"))
    return re.compile(rf"\w[\w{marks}]*(?:[\u200c\u200d]+[\w{marks}]+)*")
