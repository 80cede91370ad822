"""The items of an answer in columns: catalogue indices and scores. An object for each item is made only where one is asked for."""

import math
from collections.abc import Sequence
from typing import overload

from cluster.dataset import Catalogue
from cluster.values import ScoredItem


class TitledItems(Sequence[ScoredItem]):
    """Items of one catalogue, best first, with the scores that `stage` gave them: `indices` and `scores` are of one length."""

    __slots__ = ("_json", "catalogue", "indices", "scores", "stage")

    def __init__(self, catalogue: Catalogue, indices: list[int], scores: list[float], stage: str) -> None:
        self.catalogue, self.indices, self.scores, self.stage = catalogue, indices, scores, stage
        self._json = b""

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, position: int) -> ScoredItem: ...
    @overload
    def __getitem__(self, position: slice) -> tuple[ScoredItem, ...]: ...
    def __getitem__(self, position: int | slice) -> ScoredItem | tuple[ScoredItem, ...]:
        if isinstance(position, slice):
            return tuple(self)[position]
        return ScoredItem(self.catalogue[self.indices[position]], self.scores[position], self.stage)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, TitledItems | tuple) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # as any sequence that compares by its elements and can be large

    def __repr__(self) -> str:
        return f"TitledItems({tuple(self)!r})"

    def item_ids(self) -> list[str]:
        """The items' ids, as requests and answers name them."""
        items = self.catalogue.items
        return [items[index - 1].item_id for index in self.indices]

    def as_json(self) -> bytes:
        """A JSON array, in UTF-8, with the fields of messages.ScoredItemOut for each item; a score that is no finite number is null."""
        if not self._json:
            end = self._end()
            self._json = f"[{f'{end},'.join(begun)}{end}]".encode() if (begun := self._begun()) else b"[]"
        return self._json

    def each_as_json(self) -> list[str]:
        """The JSON of each item, as in `as_json`."""
        end = self._end()
        return [begun + end for begun in self._begun()]

    def _begun(self) -> list[str]:
        """The JSON of each item, up to its score."""
        said = self.catalogue.beginnings
        numbers = map(repr, self.scores) if math.isfinite(sum(self.scores)) else map(_number, self.scores)
        return [said[index] + number for index, number in zip(self.indices, numbers, strict=True)]

    def _end(self) -> str:
        return f',"stage":"{self.stage}","explanation":null}}'


def _number(score: float) -> str:
    return repr(score) if math.isfinite(score) else "null"


def item_ids(items: Sequence[ScoredItem]) -> list[str]:
    """The ids of an answer's items, best first."""
    return items.item_ids() if isinstance(items, TitledItems) else [one.item.item_id for one in items]
