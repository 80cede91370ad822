"""What a cache holds, under what name, and how it counts what it does."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

Freshness: TypeAlias = Literal["fresh", "stale", "expired"]
ANEW = 1e15
"""The time, in seconds since 1970, until after which an entry must be fresh where no kept one will do: none is for that long."""
ENTRY_BYTES = 1200
"""What an entry takes beside its payload: the key, the entry, and their places in the indexes of its cache and of the policy's. About 1,000
by each of the policies, and up to 1,600 where a tenant has a share of its own.
"""


class Key(NamedTuple):
    """What an entry is found by, and what it is forgotten by.

    `namespace`: a tenant; `group`: a user of that tenant, "" for no user in particular; `digest`: of all else that the answer depends
    on (model version, settings, version of the history, parameters of the request).
    """

    namespace: str
    group: str
    digest: str


def weight_of(payload_bytes: float) -> int:
    """The weight of an entry that has a payload of so many bytes."""
    return ENTRY_BYTES + round(payload_bytes)


@dataclass(frozen=True, slots=True)
class Entry:
    """A cached answer. `weight` is what it takes of the capacity, in bytes, 1 or more; `payload` is bytes where processes share the cache.

    It is fresh before `fresh_until`, from there on stale (it may be served while a new one is computed) and gone from `stale_until` on.
    All times are seconds since 1970 (`time.time()`): entries travel between processes. `fresh_s`: for how many seconds it was to be fresh,
    0 where that is not known; refreshing ahead of time needs it. `cost_ms`: how long the answer took to compute. `degraded`: it is kept
    only where there is no better one.
    """

    payload: Any
    weight: int
    fresh_until: float
    stale_until: float
    cost_ms: float = 0.0
    fresh_s: float = 0.0
    degraded: bool = False

    @classmethod
    def lasting(
        cls, payload: Any, weight: int, *, now: float, fresh_s: float, stale_s: float = 0.0, cost_ms: float = 0.0, degraded: bool = False
    ) -> "Entry":
        """An entry computed `now`: fresh for `fresh_s` seconds, and stale for `stale_s` more."""
        return cls(payload, weight, now + fresh_s, now + fresh_s + stale_s, cost_ms, fresh_s, degraded)

    def gives_way_to(self, kept: "Entry | None") -> bool:
        """Whether the entry that is kept now, perhaps a stale one, stays in place of this one, which is degraded and ends earlier."""
        return self.degraded and kept is not None and kept.stale_until > self.stale_until

    def freshness(self, now: float) -> Freshness:
        if now >= max(self.stale_until, self.fresh_until):
            return "expired"
        return "fresh" if now < self.fresh_until else "stale"


@dataclass(frozen=True, slots=True)
class NamespaceStatistics:
    """Lookups of one namespace since the start (a stale hit is a hit), and what it holds now."""

    hits: int = 0
    misses: int = 0
    entries: int = 0
    used_bytes: int = 0

    def __add__(self, other: "NamespaceStatistics") -> "NamespaceStatistics":
        return NamespaceStatistics(
            self.hits + other.hits, self.misses + other.misses, self.entries + other.entries, self.used_bytes + other.used_bytes
        )


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What a cache did since its start, and what it holds now.

    `hits` counts every lookup that found something, `stale_hits` those of them that found it stale; a lookup of an expired entry is a miss.
    `expirations`: expired entries that were found and dropped; `evictions`: entries that made room; `rejections`: entries not taken in;
    `invalidations`: entries removed on request. `recent_hit_rate`: of the latest lookups, 0..1, None before there were enough of them.
    """

    hits: int = 0
    stale_hits: int = 0
    misses: int = 0
    insertions: int = 0
    evictions: int = 0
    expirations: int = 0
    rejections: int = 0
    invalidations: int = 0
    entries: int = 0
    used_bytes: int = 0
    capacity_bytes: int = 0
    recent_hit_rate: float | None = None
    by_namespace: Mapping[str, NamespaceStatistics] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        """The share of all lookups that hit, 0..1; None before the first lookup."""
        lookups = self.hits + self.misses
        return self.hits / lookups if lookups else None


_SUMMED = (
    "hits", "stale_hits", "misses", "insertions", "evictions", "expirations", "rejections", "invalidations",
    "entries", "used_bytes", "capacity_bytes",
)  # fmt: skip


def merged(statistics: Iterable[CacheStatistics]) -> CacheStatistics:
    """The statistics of several caches as if they were one; the recent hit rate is the mean of theirs, weighted by lookups."""
    parts = list(statistics)
    by_namespace: dict[str, NamespaceStatistics] = {}
    for part in parts:
        for name, counted in part.by_namespace.items():
            by_namespace[name] = by_namespace.get(name, NamespaceStatistics()) + counted
    sums: dict[str, int] = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
    return CacheStatistics(**sums, recent_hit_rate=_mean_recent(parts), by_namespace=by_namespace)


def _mean_recent(parts: list[CacheStatistics]) -> float | None:
    known = [(part.recent_hit_rate, part.hits + part.misses) for part in parts if part.recent_hit_rate is not None]
    lookups = sum(weight for _, weight in known)
    return sum(rate * weight for rate, weight in known) / lookups if lookups else None
