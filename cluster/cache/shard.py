"""One shard of the shared cache: entries, and which caller computes a missing one.

    lease(key) -> the entry, or Granted (compute it, then mput or release), or Held (another caller computes it: wait)

Its methods never wait, except `wait`, so that on one event loop each is atomic.
"""

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cluster.cache.entry import ANEW, CacheStatistics, Entry, Key
from cluster.cache.epochs import Epochs
from cluster.cache.memory import MemoryCache
from cluster.cache.scopes import concerns


@dataclass(frozen=True, slots=True)
class Lookup:
    """The entries that were found, and for each key asked for the epoch with which to put a new entry."""

    entries: Mapping[Key, Entry]
    epochs: Mapping[Key, int]


@dataclass(frozen=True, slots=True)
class Granted:
    """The caller is the one that computes the key; its entry is put with this epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Held:
    """Another caller computes the key, for at most `seconds` more; a caller that computes it all the same puts it with this epoch."""

    seconds: float
    epoch: int


Leased: TypeAlias = Entry | Granted | Held


@dataclass(frozen=True, slots=True)
class _Lease:
    holder: str
    until: float


class CacheShard:
    """`clock` gives seconds since 1970, as entries do, and the first epoch (see Epochs)."""

    def __init__(self, memory: MemoryCache, clock: Callable[[], float] = time.time) -> None:
        self.memory = memory
        self._clock = clock
        self._epochs = Epochs(int(clock() * 1e9))
        self._leases: OrderedDict[Key, _Lease] = OrderedDict()
        self._waiting: defaultdict[Key, list[asyncio.Future[Entry | None]]] = defaultdict(list)

    async def mget(self, keys: Sequence[Key], *, counted: bool = True) -> Lookup:
        """The entries that are there. `counted`: whether the statistics count the lookups, as those of requests."""
        found = {key: entry for key in keys if (entry := self.memory.get(key, counted=counted)) is not None}
        return Lookup(found, await self.epochs(keys))

    async def epochs(self, keys: Sequence[Key]) -> Mapping[Key, int]:
        """For each key the epoch with which to put an entry of this moment. It is no lookup: eviction and admission do not go by it."""
        return dict.fromkeys(keys, self._epochs.now)

    async def mput(self, entries: Mapping[Key, Entry], epochs: Mapping[Key, int]) -> frozenset[Key]:
        """Put the entries that no erasure since their epochs concerns; returns the keys of all others, those without an epoch too. In place
        of a better one no degraded entry is put; the key's lease ends all the same, whichever caller has it.
        """
        refused = frozenset(key for key in entries if key not in epochs or not self._epochs.admits(key, epochs[key]))
        for key in entries.keys() - refused:
            entry = entries[key]
            if entry.gives_way_to(self.memory.peek(key)):
                self._settle(key, None)
                continue
            self.memory.put(key, entry)
            self._settle(key, entry)
        return refused

    async def lease(self, key: Key, holder: str, seconds: float, newer_than: float = 0.0) -> Leased:
        """The entry where it is fresh until after `newer_than`; otherwise the lease, which one holder has at a time. With `newer_than`
        the lookup does not count, and before ANEW the entry is to be computed ahead of requests for it.

        The lease ends with `mput`, `release`, an erasure of the key, or after `seconds`. A holder that asks again is granted it again: the
        answer to its first call may have been lost.
        """
        look = self.memory.get if newer_than == 0 else self.memory.expect if newer_than < ANEW else self.memory.peek
        if (entry := _newer(look(key), newer_than)) is not None:
            return entry
        lease, now = self._lease(key), self._clock()
        if lease is not None and lease.holder != holder:
            return Held(lease.until - now, self._epochs.now)
        self._leases[key] = _Lease(holder, now + seconds)
        return Granted(self._epochs.now)

    async def wait(self, key: Key, within_s: float, newer_than: float = 0.0) -> Entry | None:
        """The entry as soon as it is put; None once no caller computes it any more, or after `within_s`."""
        if (entry := _newer(self.memory.peek(key), newer_than)) is not None:
            return entry
        if (lease := self._lease(key)) is None:
            return None
        put: asyncio.Future[Entry | None] = asyncio.get_running_loop().create_future()
        self._waiting[key].append(put)
        try:
            async with asyncio.timeout(min(within_s, lease.until - self._clock())):
                return await put
        except TimeoutError:
            return None
        finally:
            self._stop_waiting(key, put)

    async def release(self, key: Key, holder: str) -> None:
        """Give the lease back without an entry; does nothing where `holder` no longer has it."""
        lease = self._lease(key)
        if lease is not None and lease.holder == holder:
            self._settle(key, None)

    async def invalidate(self, namespace: str | None = None, group: str | None = None) -> int:
        """Forget a group, a namespace or everything, and what is being computed of it; returns how many entries there were."""
        self._epochs.end(namespace, group)
        for key in [key for key in self._leases if concerns(key, namespace, group)]:
            self._settle(key, None)
        return self.memory.invalidate(namespace, group)

    async def statistics(self) -> CacheStatistics:
        return self.memory.statistics()

    async def close(self) -> None:
        """End all waits: their callers get None."""
        for key in list(self._waiting):
            self._settle(key, None)

    def _lease(self, key: Key) -> _Lease | None:
        """The key's lease, if it still runs. Expired leases are dropped, the oldest first: their holders may have died."""
        now = self._clock()
        while self._leases and next(iter(self._leases.values())).until <= now:
            self._leases.popitem(last=False)
        lease = self._leases.get(key)
        return lease if lease is not None and now < lease.until else None

    def _settle(self, key: Key, entry: Entry | None) -> None:
        self._leases.pop(key, None)
        for put in self._waiting.pop(key, []):
            if not put.done():
                put.set_result(entry)

    def _stop_waiting(self, key: Key, put: "asyncio.Future[Entry | None]") -> None:
        waiting = self._waiting.get(key, [])
        if put in waiting:
            waiting.remove(put)
        if not waiting:
            self._waiting.pop(key, None)


def _newer(entry: Entry | None, newer_than: float) -> Entry | None:
    return entry if entry is not None and entry.fresh_until > newer_than else None
