"""Least frequently used: the key with the fewest hits leaves; of several such keys, the one that was used least recently."""

from collections import OrderedDict
from typing import Generic

from cluster.cache.policy import KeyT, WeighedPolicy


class _Level(Generic[KeyT]):
    """The keys with the same number of uses, in the order they reached it, between the levels next below and next above."""

    __slots__ = ("above", "below", "keys", "uses")

    def __init__(self, uses: int) -> None:
        self.uses = uses
        self.keys: OrderedDict[KeyT, None] = OrderedDict()
        self.above: _Level[KeyT] = self
        self.below: _Level[KeyT] = self

    def insert_above(self, uses: int) -> "_Level[KeyT]":
        level = _Level[KeyT](uses)
        level.below, level.above = self, self.above
        self.above.below = level
        self.above = level
        return level

    def discard(self, key: KeyT) -> None:
        """Take a key out; a level without keys leaves the chain."""
        del self.keys[key]
        if not self.keys:
            self.below.above, self.above.below = self.above, self.below


class LfuPolicy(WeighedPolicy[KeyT]):
    """A chain of levels, one per number of uses that occurs: the lowest is found in constant time (Shah, Mitra and Matani, 2010)."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._bottom = _Level[KeyT](0)  # holds no keys: the chain is a ring through it
        self._levels: dict[KeyT, _Level[KeyT]] = {}

    def touch(self, key: KeyT) -> None:
        level = self._levels[key]
        self._place(key, level)
        level.discard(key)

    def _insert(self, key: KeyT, weight: int) -> None:  # noqa: ARG002 - the level does not depend on it
        self._place(key, self._bottom)

    def _forget(self, key: KeyT) -> None:
        self._levels.pop(key).discard(key)

    def _victim(self) -> KeyT:
        key = next(iter(self._bottom.above.keys))
        self._forget(key)
        return key

    def _place(self, key: KeyT, below: _Level[KeyT]) -> None:
        """Put a key at one use more than `below` stands for."""
        level = below.above
        if level.uses != below.uses + 1:
            level = below.insert_above(below.uses + 1)
        level.keys[key] = None
        self._levels[key] = level
