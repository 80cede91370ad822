"""An index from namespaces and groups to their keys, a ceiling for each namespace, and counts of each namespace's lookups."""

from collections.abc import Iterable
from itertools import chain, islice

from cluster.cache.entry import Key, NamespaceStatistics
from cluster.cache.policy import Policy, make_policy

COUNTED_NAMESPACES = 1000
OTHERS = "(others)"
"""Further namespaces, beyond COUNTED_NAMESPACES, are counted together under this name, as callers may invent names."""


class Namespaces:
    """The keys held, by namespace and group. `ceiling`: the bytes that one namespace may take. `lookups`: the hits and misses so far
    of each. Not thread-safe.
    """

    def __init__(self, policy: str, capacity: int, share: float, lookups: dict[str, list[int]] | None = None) -> None:
        if not 0 < share <= 1:
            raise ValueError(f"namespace_share must be greater than 0 and at most 1 (no ceiling), not {share}")
        self.lookups = {} if lookups is None else lookups
        self._policy_name = policy if share < 1 else ""
        self._share = share
        self._held: dict[str, _Held] = {}
        self.resize(capacity)

    def resize(self, capacity: int) -> list[Key]:
        """Share another capacity; returns keys over the new ceiling, which the caller is to `remove`."""
        self.ceiling = max(1, int(self._share * capacity))
        policies = [held.policy for held in self._held.values() if held.policy is not None]
        return [key for policy in policies for key in policy.resize(self.ceiling)]

    def admit(self, key: Key, weight: int) -> list[Key]:
        """Index a key, or give it a new weight; returns keys of its namespace over the ceiling, which the caller is to `remove`."""
        held = self._held.get(key.namespace)
        if held is None:
            policy: Policy[Key] | None = make_policy(self._policy_name, self.ceiling) if self._policy_name else None
            held = self._held[key.namespace] = _Held(policy)
        held.add(key, weight)
        return held.policy.admit(key, weight) if held.policy is not None else []

    def touch(self, key: Key) -> None:
        """Note a hit of a key that is there, for the order in which the namespace's own entries make room."""
        policy = self._held[key.namespace].policy
        if policy is not None:
            policy.touch(key)

    def expect(self, key: Key) -> None:
        """Note that a key is to be admitted before it is asked for, as `touch` notes a hit."""
        held = self._held.get(key.namespace)
        if held is not None and held.policy is not None:
            held.policy.expect(key)

    def is_full_for(self, key: Key, weight: int) -> bool:
        """Whether keys of the namespace would have to leave for this one, which is not there."""
        held = self._held.get(key.namespace)
        return held is not None and held.used + weight > self.ceiling

    def remove(self, key: Key) -> None:
        held = self._held.get(key.namespace)
        if held:
            held.discard(key)
            if not held.entries:
                del self._held[key.namespace]

    def keys(self, namespace: str | None, group: str | None) -> list[Key]:
        """All keys, those of a namespace, or those of a group of it."""
        if namespace is None:
            return list(chain.from_iterable(held.keys() for held in self._held.values()))
        held = self._held.get(namespace)
        return list(held.keys(group)) if held else []

    def count_lookup(self, key: Key, hit: bool) -> None:
        lookups = self.lookups.get(key.namespace)
        if lookups is None:
            name = key.namespace if len(self.lookups) < COUNTED_NAMESPACES else OTHERS
            lookups = self.lookups.setdefault(name, [0, 0])
        lookups[not hit] += 1

    def statistics(self, entries: int, used: int) -> dict[str, NamespaceStatistics]:
        """Of COUNTED_NAMESPACES each, first of those whose lookups are counted; of the others together, under OTHERS, what is left of all
        `entries` and the bytes `used`. Takes no longer where more namespaces are held.
        """
        names = chain(self.lookups, (name for name in self._held if name not in self.lookups))
        found = {name: self._statistics_of(name) for name in islice((name for name in names if name != OTHERS), COUNTED_NAMESPACES)}
        hits, misses = self.lookups.get(OTHERS, (0, 0))
        entries -= sum(one.entries for one in found.values())
        used -= sum(one.used_bytes for one in found.values())
        others = NamespaceStatistics(hits, misses, entries, used)
        return found if others == NamespaceStatistics() else found | {OTHERS: others}

    def _statistics_of(self, name: str) -> NamespaceStatistics:
        hits, misses = self.lookups.get(name, (0, 0))
        held = self._held.get(name)
        return NamespaceStatistics(hits, misses, held.entries, held.used) if held else NamespaceStatistics(hits, misses)


class _Held:
    """The keys of one namespace. `policy`: in which order they make room; None without a ceiling."""

    __slots__ = ("entries", "groups", "policy", "used")

    def __init__(self, policy: Policy[Key] | None) -> None:
        self.policy = policy
        self.groups: dict[str, dict[Key, int]] = {}
        self.entries = 0
        self.used = 0

    def keys(self, group: str | None = None) -> Iterable[Key]:
        return chain.from_iterable(self.groups.values()) if group is None else self.groups.get(group, ())

    def add(self, key: Key, weight: int) -> None:
        self.discard_weight(key)
        self.groups.setdefault(key.group, {})[key] = weight
        self.entries += 1
        self.used += weight

    def discard(self, key: Key) -> None:
        self.discard_weight(key)
        if not self.groups.get(key.group):
            self.groups.pop(key.group, None)
        if self.policy is not None:  # an empty policy is false, as all that is empty
            self.policy.remove(key)

    def discard_weight(self, key: Key) -> None:
        weight = self.groups.get(key.group, {}).pop(key, 0)
        self.used -= weight
        self.entries -= weight > 0
