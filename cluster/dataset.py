"""Behaviours of many users and the catalogue they refer to, as columns."""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from cluster.errors import DataError
from cluster.values import Behaviour, BoolArray, Int8Array, Int32Array, Int64Array, Item, UserSequence

_WHEN = attrgetter("timestamp")
JSON_KEPT = 100_000
"""How many items' JSON is kept at most: about 30 MB."""


@dataclass(frozen=True)
class Catalogue:
    """All items in index order: the item with catalogue index i is `items[i - 1]` (index 0 is padding)."""

    items: Sequence[Item]

    def __post_init__(self) -> None:
        if len(self._index) != len(self.items):
            twice, _ = Counter(item.item_id for item in self.items).most_common(1)[0]
            raise DataError(f"item {twice!r} stands twice in the catalogue; item ids must be unique")

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        if not 1 <= index <= len(self.items):
            raise IndexError(f"catalogue index {index} is outside 1..{len(self.items)}")
        return self.items[index - 1]

    def index_of(self, item_id: str) -> int | None:
        """The catalogue index of an item id, or None where the catalogue does not know it."""
        return self._index.get(item_id)

    def sequence(self, behaviours: Sequence[Behaviour], request_time: int) -> tuple[UserSequence, tuple[str, ...]]:
        """The behaviours with items of this catalogue in the order of time (ties keep their order), and the item ids it does not hold."""
        times = [one.timestamp for one in behaviours]
        if times != (ascending := sorted(times)):
            behaviours, times = sorted(behaviours, key=_WHEN), ascending
        index_of = self._index.get
        indices = [index_of(one.item_id) for one in behaviours]
        unknown: tuple[str, ...] = ()
        if None in indices:
            known = [index is not None for index in indices]
            unknown = tuple(dict.fromkeys(one.item_id for one, index in zip(behaviours, indices, strict=True) if index is None))
            behaviours, times = list(compress(behaviours, known)), list(compress(times, known))
            indices = [index for index in indices if index is not None]
        values = [one.value for one in behaviours]
        sequence = UserSequence(
            items=np.array(indices, np.int32),
            timestamps=np.array(times, np.int64),
            actions=np.array([one.action.code for one in behaviours], np.int8),
            values=np.full(len(values), np.nan, np.float32) if values.count(None) == len(values) else np.array(values, np.float32),
            request_time=request_time,
        )
        return sequence, unknown

    def look_up(self, item_ids: Collection[str]) -> tuple[set[int], list[str]]:
        """The catalogue indices of the item ids, and those of the ids that the catalogue does not hold."""
        indices = list(map(self._index.get, item_ids))
        known = {index for index in indices if index is not None}
        if None not in indices:
            return known, []
        return known, [item_id for item_id, index in zip(item_ids, indices, strict=True) if index is None]

    def unknown(self, item_ids: Iterable[str]) -> tuple[str, ...]:
        """The item ids that the catalogue does not hold, each once."""
        return tuple(item_id for item_id in dict.fromkeys(item_ids) if self.index_of(item_id) is None)

    @cached_property
    def beginnings(self) -> "Beginnings":
        """Catalogue index -> the beginning of the item's JSON in an answer."""
        return Beginnings(self.items)

    @cached_property
    def _index(self) -> Mapping[str, int]:
        return {item.item_id: index for index, item in enumerate(self.items, start=1)}


class Beginnings(dict[int, str]):
    """Catalogue index -> `{"item_id":"50","title":"...","attributes":{...},"score":`, made when it is first asked for, and kept; the latest
    JSON_KEPT of them.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._items, self._kept = items, deque[int]()  # a dict's first key is found by a walk over all that were removed before it

    def __missing__(self, index: int) -> str:
        item = self._items[index - 1]
        fields = {"item_id": item.item_id, "title": item.title, "attributes": dict(item.attributes)}
        begun = self[index] = msgspec.json.encode(fields).decode()[:-1] + ',"score":'
        self._kept.append(index)
        if len(self) > JSON_KEPT:
            self.pop(self._kept.popleft(), None)
        return begun


@dataclass(frozen=True, eq=False)
class Interactions:
    """Events grouped by user and sorted by time within each (ties keep file order).

    User u's events are rows `offsets[u]:offsets[u + 1]` of `items` (catalogue indices), `timestamps` (seconds),
    `actions` (`Action.code`) and `values` (NaN where there is none), which files give as float64; a `sequence` has them as float32.
    """

    user_ids: Sequence[str]
    offsets: Int64Array
    items: Int32Array
    timestamps: Int64Array
    actions: Int8Array
    values: npt.NDArray[np.floating]

    def __len__(self) -> int:
        return len(self.items)

    @property
    def users(self) -> int:
        return len(self.user_ids)

    @property
    def lengths(self) -> Int64Array:
        """Events of each user, (users,)."""
        return np.diff(self.offsets)

    def sequence(self, user: int, *, drop_last: int = 0, request_time: int | None = None) -> UserSequence:
        """User number `user`'s events less the last `drop_last`, asked at `request_time` (default: at the first dropped event)."""
        start, end = int(self.offsets[user]), int(self.offsets[user + 1])
        stop = max(start, end - drop_last)
        if request_time is None:
            request_time = int(self.timestamps[min(stop, end - 1)]) if end > start else 0
        rows = slice(start, stop)
        values = self.values[rows].astype(np.float32)
        return UserSequence(self.items[rows], self.timestamps[rows], self.actions[rows], values, request_time)

    def where(self, kept: BoolArray) -> "Interactions":
        """The events that are True in `kept`, (events,). Users stay, also those that have no event left."""
        offsets = np.concatenate([[0], np.cumsum(kept)])[self.offsets]
        return Interactions(self.user_ids, offsets, self.items[kept], self.timestamps[kept], self.actions[kept], self.values[kept])

    def popularity(self, catalogue_size: int) -> Int64Array:
        """Events per catalogue index, (catalogue_size + 1,); entry 0 is padding and stays 0."""
        return np.bincount(self.items, minlength=catalogue_size + 1).astype(np.int64)

    def first_seen(self, catalogue_size: int) -> Int64Array:
        """When each catalogue index was first met, in seconds, 0 where never, (catalogue_size + 1,)."""
        never = np.iinfo(np.int64).max
        first = np.full(catalogue_size + 1, never, np.int64)
        np.minimum.at(first, self.items, self.timestamps)
        return np.where(first == never, 0, first)


@dataclass(frozen=True)
class Dataset:
    """What a reader returns. `skipped_rows`: bad rows that were skipped on request; `source`: where the data came from."""

    name: str
    interactions: Interactions
    catalogue: Catalogue
    source: str
    skipped_rows: int = 0
