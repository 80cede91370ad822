"""Eviction policies: in which order keys leave a full cache.

A policy knows keys and their weights, neither values nor time. It is not thread-safe: its owner holds the lock. A policy is added by
a line in `POLICIES`, and its name in `CacheSettings.policy`.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Generic, Protocol, TypeVar

from cluster.registry import choose

KeyT = TypeVar("KeyT", bound=Hashable)

POLICIES: Mapping[str, str] = {
    "s3fifo": "cluster.cache.s3fifo:S3FifoPolicy",
    "lru": "cluster.cache.lru:LruPolicy",
    "lfu": "cluster.cache.lfu:LfuPolicy",
    "fifo": "cluster.cache.fifo:FifoPolicy",
    "arc": "cluster.cache.arc:ArcPolicy",
}
DEFAULT_POLICY = "s3fifo"


class Policy(Protocol[KeyT]):
    """The order in which keys are evicted. Weights and the capacity are whole numbers of one unit (bytes, or 1 a key), weights 1 or more.

    `used` never exceeds `capacity`. `admit` takes a key in and returns those evicted for it, first evicted first; a key heavier than the
    capacity is not taken in and is itself among them. Admitting a key that is there changes its weight and leaves it in its place; grown
    heavier, it may itself be evicted. `touch` notes a hit of a key that is there (KeyError otherwise). `expect` notes that a key is to be
    admitted before it is asked for. `remove` forgets a key without an eviction and says whether it was there.
    Each of these takes constant time, amortised.

    Two look at all keys: `resize` changes the capacity and returns the keys evicted for it, those heavier than it, then others in the
    policy's order (ValueError below 1); `drain` evicts all keys and returns them, first evicted first.
    """

    capacity: int
    used: int

    def __contains__(self, key: object, /) -> bool: ...
    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[KeyT]: ...
    def touch(self, key: KeyT) -> None: ...
    def expect(self, key: KeyT) -> None: ...
    def admit(self, key: KeyT, weight: int) -> list[KeyT]: ...
    def remove(self, key: KeyT) -> bool: ...
    def resize(self, capacity: int) -> list[KeyT]: ...
    def drain(self) -> list[KeyT]: ...


def make_policy(name: str, capacity: int) -> Policy[Any]:
    """The policy of that name, empty. Raises UnknownChoice, and ValueError at a capacity below 1."""
    policy: Policy[Any] = choose("cache policy", POLICIES, name)(capacity)
    return policy


class WeighedPolicy(ABC, Generic[KeyT]):
    """The common part of the policies: they keep weights, and evict one key after the other until the new one fits.

    A policy says in which order (`_victim`) and keeps its queues (`_insert`, `_forget`).
    """

    def __init__(self, capacity: int) -> None:
        self._measure(capacity)
        self.used = 0
        self._weights: dict[KeyT, int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._weights

    def __len__(self) -> int:
        return len(self._weights)

    def __iter__(self) -> Iterator[KeyT]:
        return iter(self._weights)

    @abstractmethod
    def touch(self, key: KeyT) -> None: ...

    def expect(self, key: KeyT) -> None:
        """Changes nothing where all new keys are treated alike."""

    def admit(self, key: KeyT, weight: int) -> list[KeyT]:
        if weight < 1:
            raise ValueError(f"the weight of a key must be 1 or more, not {weight} ({key!r})")
        if weight > self.capacity:
            self.remove(key)
            return [key]
        if key in self._weights:
            return self._reweigh(key, weight)
        evicted = self._make_room(key, weight)
        self.used += weight
        self._weights[key] = weight
        self._insert(key, weight)
        return evicted

    def remove(self, key: KeyT) -> bool:
        if key not in self._weights:
            return False
        self._forget(key)
        self.used -= self._weights.pop(key)
        return True

    def resize(self, capacity: int) -> list[KeyT]:
        self._measure(capacity)
        heavy = [key for key, weight in self._weights.items() if weight > capacity]
        for key in heavy:
            self.remove(key)
        return heavy + self._evict_down_to(capacity)

    def drain(self) -> list[KeyT]:
        return self._evict_down_to(0)

    def _measure(self, capacity: int) -> None:
        """Take this capacity, and what is a share of it. Raises ValueError below 1."""
        if capacity < 1:
            raise ValueError(f"the capacity of a cache policy must be 1 or more, not {capacity}")
        self.capacity = capacity

    @abstractmethod
    def _insert(self, key: KeyT, weight: int) -> None:
        """Queue a new key; there is room for it."""

    @abstractmethod
    def _victim(self) -> KeyT:
        """Unqueue the key that leaves next. There is at least one."""

    @abstractmethod
    def _forget(self, key: KeyT) -> None:
        """Unqueue a key that is in the policy."""

    def _make_room(self, key: KeyT, weight: int) -> list[KeyT]:  # noqa: ARG002 - some policies choose victims by the key that comes
        return self._evict_down_to(self.capacity - weight)

    def _reweigh(self, key: KeyT, weight: int) -> list[KeyT]:
        self.used += weight - self._weights[key]
        self._weights[key] = weight
        return self._evict_down_to(self.capacity)

    def _evict_down_to(self, used: int) -> list[KeyT]:
        evicted = []
        while self.used > used:
            key = self._victim()
            self.used -= self._weights.pop(key)
            evicted.append(key)
        return evicted


class WeighedQueue(Generic[KeyT]):
    """Keys with their weights, first in first out, and their total weight (`used`)."""

    __slots__ = ("used", "weights")

    def __init__(self) -> None:
        self.weights: OrderedDict[KeyT, int] = OrderedDict()
        self.used = 0

    def __contains__(self, key: object) -> bool:
        return key in self.weights

    def append(self, key: KeyT, weight: int) -> None:
        """Add a new key as the newest."""
        self.weights[key] = weight
        self.used += weight

    def pop_oldest(self) -> tuple[KeyT, int]:
        key, weight = self.weights.popitem(last=False)
        self.used -= weight
        return key, weight

    def remove(self, key: KeyT) -> int:
        """Take a key out; returns its weight. Raises KeyError where it is missing."""
        weight = self.weights.pop(key)
        self.used -= weight
        return weight

    def reweigh(self, key: KeyT, weight: int) -> None:
        self.used += weight - self.weights[key]
        self.weights[key] = weight
