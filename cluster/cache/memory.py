"""A cache in this process: entries by key, evicted by a policy when it is full, gone when their time is over."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable

from cluster.cache.admission import AdaptiveAdmission, SampledKeys
from cluster.cache.entry import CacheStatistics, Entry, Key
from cluster.cache.hit_rate import HitRateWindow
from cluster.cache.namespaces import Namespaces
from cluster.cache.policy import DEFAULT_POLICY, make_policy

MOST_ALIVE = 8
"""How many entries that are not over a full cache looks at as a new one comes: all of them within an eighth of a cacheful."""


class MemoryCache:
    """At most `capacity_bytes` of entries, by their weights. Safe to share between threads.

    `admission`: what to take in, and what to evict, while the hit rate is too low. `namespace_share`: the share of the capacity, 0..1, that
    one namespace may take; beyond it, its own entries make room, in the order of the same policy. `clock`: seconds since 1970.
    `window`: of how many lookups the recent hit rate is.
    Raises UnknownChoice where there is no such policy, ValueError at a capacity below 1 or a share outside 0..1.
    """

    def __init__(
        self,
        policy: str = DEFAULT_POLICY,
        capacity_bytes: int = 64 * 2**20,
        *,
        admission: AdaptiveAdmission | None = None,
        clock: Callable[[], float] = time.time,
        namespace_share: float = 1.0,
        window: int = 1000,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.admission = admission
        self._clock = clock
        self._policy = make_policy(policy, capacity_bytes)
        self._namespaces = Namespaces(policy, capacity_bytes, namespace_share)
        self._entries: dict[Key, Entry] = {}
        self._pool = SampledKeys()
        self._window = HitRateWindow(window)
        self._deserved = HitRateWindow(window)  # as it would be if admission refused nothing
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Entries held, including expired ones that have not been looked up since."""
        return len(self._entries)

    def get(self, key: Key, *, counted: bool = True) -> Entry | None:
        """The entry, fresh or stale; None where it is missing or expired. `counted`: whether the statistics count the lookup, and admission
        goes by what comes of it.
        """
        with self._lock:
            entry = self._entries.get(key)
            freshness = entry.freshness(self._clock()) if entry else "absent"
            if freshness == "expired":
                self._forget(key)
                self._counts["expirations"] += 1
                entry = None
            if counted:
                self._count_lookup(key, hit=entry is not None, stale=freshness == "stale")
            self._note_lookup(key, hit=entry is not None, counted=counted)
            return entry

    def peek(self, key: Key) -> Entry | None:
        """As `get`, but counts no lookup and changes no order."""
        with self._lock:
            entry = self._entries.get(key)
            return entry if entry and entry.freshness(self._clock()) != "expired" else None

    def expect(self, key: Key) -> Entry | None:
        """As `peek`, for a key of which an entry is to be put before it is asked for: admission lets it in, and eviction gives it the time
        until then.
        """
        with self._lock:
            self._policy.expect(key)
            self._namespaces.expect(key)
            if self.admission:
                self.admission.expect(key)
        return self.peek(key)

    def entries(self) -> list[tuple[Key, Entry]]:
        """All keys and entries, those put earlier first; a key that was put again counts from then on."""
        with self._lock:
            return list(self._entries.items())

    def put(self, key: Key, entry: Entry) -> bool:
        """Take an entry in, in place of the key's old one; False where it is not taken: it is too heavy, over, or not worth its place.

        Where the new entry is not taken, the old one is gone all the same: it is out of date. Raises ValueError at a weight below 1.
        """
        if entry.weight < 1:
            raise ValueError(f"an entry must weigh 1 byte or more, not {entry.weight} ({key})")
        with self._lock:
            if self._admits(key, entry) and self._insert(key, entry):
                self._counts["insertions"] += 1
                return True
            self._forget(key)
            self._counts["rejections"] += 1
            return False

    def resize(self, capacity_bytes: int) -> None:
        """Take another capacity, 1 or more. What is over, and then what the policy would evict first, makes room; nothing else is lost."""
        with self._lock:
            if capacity_bytes < self.capacity_bytes:
                now = self._clock()
                over = [key for key, entry in self._entries.items() if entry.freshness(now) == "expired"]
                self._counts["expirations"] += sum(map(self._forget, over))
            self.capacity_bytes = capacity_bytes
            self._evict(self._namespaces.resize(capacity_bytes))
            self._evict(self._policy.resize(capacity_bytes))

    def evict_by(self, policy: str, namespace_share: float) -> None:
        """Take another policy and share. Where that leaves a namespace less room, what the old policy would evict first makes it; how often
        each entry was hit is forgotten. Raises as the constructor does, and nothing changes.
        """
        with self._lock:
            successor = make_policy(policy, self.capacity_bytes)
            self._namespaces = Namespaces(policy, self.capacity_bytes, namespace_share, self._namespaces.lookups)
            keys, self._policy = self._policy.drain(), successor
            rooms = defaultdict[str, int](lambda: self._namespaces.ceiling)
            for key in reversed(keys):
                if (weight := self._entries[key].weight) <= rooms[key.namespace]:
                    rooms[key.namespace] -= weight
                else:
                    self._evict((key,))
            for key in filter(self._entries.__contains__, keys):
                self._namespaces.admit(key, self._entries[key].weight)
                self._policy.admit(key, self._entries[key].weight)

    def remove(self, key: Key) -> bool:
        """Forget one entry; says whether it was there. Counts as an invalidation."""
        with self._lock:
            return bool(self._invalidate((key,)))

    def discard(self, keys: Iterable[Key]) -> None:
        """Forget entries without counting an invalidation: another shard has them now, or their model is retired."""
        with self._lock:
            for key in keys:
                self._forget(key)

    def invalidate(self, namespace: str | None = None, group: str | None = None) -> int:
        """Forget all entries, a namespace's, or a group's of a namespace; returns how many. Takes time in proportion to that number.

        Raises ValueError at a group without a namespace: groups of one name in different namespaces have nothing in common.
        """
        if group is not None and namespace is None:
            raise ValueError(f"group {group!r} cannot be invalidated without its namespace; give both")
        with self._lock:
            return self._invalidate(self._namespaces.keys(namespace, group))

    def statistics(self) -> CacheStatistics:
        with self._lock:
            entries, used = len(self._entries), self._policy.used
            return CacheStatistics(
                **self._counts,
                entries=entries,
                used_bytes=used,
                capacity_bytes=self.capacity_bytes,
                recent_hit_rate=self._window.rate,
                by_namespace=self._namespaces.statistics(entries, used),
            )

    def _count_lookup(self, key: Key, *, hit: bool, stale: bool) -> None:
        self._counts["hits" if hit else "misses"] += 1
        self._counts["stale_hits"] += stale
        self._window.record(hit)
        self._namespaces.count_lookup(key, hit)

    def _note_lookup(self, key: Key, *, hit: bool, counted: bool) -> None:
        if hit:
            self._policy.touch(key)
            self._namespaces.touch(key)
        if self.admission:
            if counted:
                self._deserved.record(self.admission.refused(key) or hit)
            self.admission.record(key, self._deserved.rate)

    def _admits(self, key: Key, entry: Entry) -> bool:
        if entry.weight > min(self.capacity_bytes, self._namespaces.ceiling) or entry.freshness(self._clock()) == "expired":
            return False
        if key in self._entries:
            return True
        self._drop_expired(key, entry.weight)
        if not self.admission or self.admission.admits(key) or self._policy.used + entry.weight <= self.capacity_bytes:
            return True
        self.admission.refuse(key, entry.weight, self.capacity_bytes)
        return False

    def _insert(self, key: Key, entry: Entry) -> bool:
        """Whether the entry stayed: one that became heavier may itself be the first to be evicted."""
        is_new = self._entries.pop(key, None) is None
        self._entries[key] = entry
        self._evict(self._namespaces.admit(key, entry.weight))
        if is_new and self.admission and self.admission.strict:
            self._evict_the_least_valuable(self.admission, entry.weight)
        if key in self._entries:
            self._evict(self._policy.admit(key, entry.weight))
        if key in self._entries:
            self._pool.add(key)
        return key in self._entries

    def _drop_expired(self, key: Key, weight: int) -> None:
        """Make room for a new key: look at entries in turns, and drop those that are over, until MOST_ALIVE are not."""
        now, alive = self._clock(), 0
        while alive < MOST_ALIVE and (self._policy.used + weight > self.capacity_bytes or self._namespaces.is_full_for(key, weight)):
            if self._entries[looked_at := self._pool.at_hand()].freshness(now) == "expired":
                self._forget(looked_at)
                self._counts["expirations"] += 1
            else:
                self._pool.passed()
                alive += 1

    def _evict_the_least_valuable(self, admission: AdaptiveAdmission, weight: int) -> None:
        while self._policy.used + weight > self.capacity_bytes:
            self._evict((admission.victim(self._pool, self._entries, self._clock()),))

    def _evict(self, keys: Iterable[Key]) -> None:
        self._counts["evictions"] += sum(self._forget(key) for key in keys)

    def _invalidate(self, keys: Iterable[Key]) -> int:
        forgotten = sum(self._forget(key) for key in keys)
        self._counts["invalidations"] += forgotten
        return forgotten

    def _forget(self, key: Key) -> bool:
        if self._entries.pop(key, None) is None:
            return False
        self._policy.remove(key)
        self._namespaces.remove(key)
        self._pool.discard(key)
        return True
