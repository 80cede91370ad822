"""Semantic IDs: each item's path of codes, coarse to fine, by which a decoder names it.

The codes of a level are tokens of the decoder. Token 0 names nothing: vLLM's prefix cache cannot tell it from a soft prompt's rows.

    token = 1 + (sizes of the levels above) + code
"""

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from cluster.errors import BundleError
from cluster.values import FloatArray, Int32Array


@dataclass(frozen=True, eq=False)
class SemanticIds:
    """`codes` (V + 1, levels): an item's code at each level, unique as a row; row 0 is padding. `sizes`: how many codes a level has.

    `codebooks`: the centroids of each level but the last, (size, D) of residuals; the last level only tells apart what shares the rest.
    """

    codes: Int32Array
    sizes: tuple[int, ...]
    codebooks: tuple[FloatArray, ...] = ()

    @property
    def levels(self) -> int:
        return len(self.sizes)

    @property
    def items(self) -> int:
        """V."""
        return len(self.codes) - 1

    @property
    def vocabulary(self) -> int:
        """How many tokens there are, token 0 included."""
        return 1 + sum(self.sizes)

    @cached_property
    def first_tokens(self) -> tuple[int, ...]:
        """The token of code 0 of each level."""
        return tuple(int(first) for first in 1 + np.cumsum((0, *self.sizes[:-1])))

    @cached_property
    def tokens(self) -> Int32Array:
        """The codes as tokens, (V + 1, levels); row 0 is padding and holds zeros."""
        tokens: Int32Array = (self.codes + np.asarray(self.first_tokens)).astype(np.int32)
        tokens[0] = 0
        return tokens

    @cached_property
    def version(self) -> str:
        """A digest of every item's path: what was learnt or cached for one version means nothing in another."""
        shape = np.array(self.sizes, np.int32).tobytes()
        return hashlib.sha256(shape + np.ascontiguousarray(self.codes, np.int32).tobytes()).hexdigest()[:16]


def write_semantic_ids(ids: SemanticIds, path: Path) -> None:
    """Write semantic IDs as an .npz file."""
    books = {f"codebook_{level}": book for level, book in enumerate(ids.codebooks)}
    np.savez_compressed(path, codes=ids.codes, sizes=np.array(ids.sizes, np.int32), **books)  # type: ignore[arg-type]


def read_semantic_ids(path: Path) -> SemanticIds:
    """The semantic IDs that `write_semantic_ids` wrote. Raises BundleError where the file is damaged."""
    try:
        with path.open("rb") as file, np.load(file) as arrays:  # numpy leaves a path that it opened itself open at an error
            books: Sequence[FloatArray] = [arrays[name] for name in sorted(arrays.files) if name.startswith("codebook_")]
            ids = SemanticIds(arrays["codes"], tuple(arrays["sizes"].tolist()), tuple(books))
    except (OSError, EOFError, KeyError, ValueError, BadZipFile, zlib.error) as error:
        raise BundleError(f"{path} does not hold semantic IDs: {error}") from error
    if ids.codes.ndim != 2 or ids.codes.shape[1] != ids.levels or (ids.codes < 0).any() or (ids.codes >= ids.sizes).any():
        raise BundleError(f"{path} holds codes of shape {ids.codes.shape} that do not fit levels of {ids.sizes} codes")
    return ids
