"""The shared cache as one replica uses it: get an entry, or the right to compute it, or wait for it; send the computed entry."""

import asyncio
import itertools
import os
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from cluster.cache.codec import CountingCodec
from cluster.cache.entry import Entry, Key
from cluster.cache.shard import Held, Leased
from cluster.cache.shared import ShardedCache
from cluster.cache.tier_values import TierSettings
from cluster.cache.write_behind import WriteBehind

T = TypeVar("T")
TRIES = 10
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Arrived:
    """A decoded entry; `awaited`: another replica was computing it when we asked."""

    entry: Entry
    awaited: bool


@dataclass(frozen=True, slots=True)
class Right:
    """The right to compute an entry and put it with this epoch. `holder`: of the lease; "" where another replica holds it."""

    epoch: int
    holder: str


class SecondTier:
    """`refused` is called with each key that was erased while its entry was computed, so that the entry was not taken in."""

    def __init__(self, shared: ShardedCache, codec: CountingCodec[Any], settings: TierSettings, refused: Callable[[Key], object]) -> None:
        self.shared = shared
        self._codec, self._settings = codec, settings
        self.writes = WriteBehind(shared, settings.max_writes, refused)
        self._name = f"{os.uname().nodename}-{os.getpid()}-{next(_numbers)}"
        self._asked = itertools.count()
        self._releases: set[asyncio.Task[None]] = set()
        self._late: set[asyncio.Task[Any]] = set()  # questions that go on though the one that asked waits no longer

    async def find(self, key: Key, within_s: float = inf) -> Entry | None:
        """The entry, decoded; a miss grants no right to compute it. None where no answer comes within that many seconds."""
        found = await self._in_time(self.shared.mget([key]), within_s)
        entry = found.entries.get(key) if found else None
        return None if entry is None else self._codec.decoded(entry)

    async def obtain(self, key: Key, newer_than: float, within_s: float = inf) -> Arrived | Right | None:
        """An entry that is fresh until after `newer_than`, or the right to compute it. The right comes with the lease, or without it where
        the holder takes too long; with a limited `within_s` no holder is waited for. None where the shared cache does not answer within
        that many seconds: the entry that is then computed stays in this replica.
        """
        wait_s = self._settings.wait_s if within_s == inf else 0.0
        return await self._in_time(self._obtained(key, newer_than, wait_s), within_s, late=lambda answer: self._give_back(key, answer))

    async def _obtained(self, key: Key, newer_than: float, wait_s: float) -> Arrived | Right | None:
        until = _now() + wait_s
        holder = f"{self._name}-{next(self._asked)}"  # a new name each time, so that a late release does not end the next one's lease
        for _ in range(TRIES):  # each replica whose computation fails takes its turn; more tries than that have another cause
            leased = await self.shared.lease(key, holder, self._settings.lease_s, newer_than)
            entry = await self._awaited(key, leased, until - _now(), newer_than) if isinstance(leased, Held) else leased
            if isinstance(entry, Entry):
                if (decoded := self._codec.decoded(entry)) is not None:
                    return Arrived(decoded, awaited=isinstance(leased, Held))
                newer_than = max(newer_than, entry.fresh_until)
            elif not isinstance(leased, Held) or _now() >= until:
                return _right(leased, holder)
        return None

    def put(self, key: Key, entry: Entry, epoch: int) -> bool:
        """Send the entry soon, in the background; returns whether there was room for it."""
        return self.writes.put(key, entry, epoch)

    def release(self, key: Key, right: Right) -> None:
        """Give back the lease in the background, so that the next replica computes the entry."""
        if not right.holder:
            return
        task = asyncio.get_running_loop().create_task(self.shared.release(key, right.holder))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def flush(self) -> None:
        """Wait until all that was put and released so far has been sent."""
        await asyncio.gather(*self._late)
        await asyncio.gather(self.writes.flush(), *self._releases)

    async def _in_time(self, asking: Coroutine[Any, Any, T], within_s: float, late: Callable[[T], object] = lambda _: None) -> T | None:
        """What the shared cache answers; None where that takes longer. The call then goes on by itself, so that a shard that hangs is
        found out, and `late` is given its answer. So it is where the caller leaves, even as the answer comes.
        """
        if within_s == inf:
            return await asking
        task, in_time = asyncio.get_running_loop().create_task(asking), False
        try:
            await asyncio.wait([task], timeout=max(0.0, within_s))
            in_time = task.done()
        finally:
            if not in_time:
                self._late.add(task)
                task.add_done_callback(lambda done: late(done.result()))
                task.add_done_callback(self._late.discard)
        return task.result() if in_time else None

    def _give_back(self, key: Key, answer: Arrived | Right | None) -> None:
        if isinstance(answer, Right):
            self.release(key, answer)

    async def _awaited(self, key: Key, held: Held, left_s: float, newer_than: float) -> Entry | None:
        return await self.shared.wait(key, min(left_s, held.seconds), newer_than) if left_s > 0 else None


def _right(leased: Leased | None, holder: str) -> Right | None:
    if leased is None or isinstance(leased, Entry):
        return None
    return Right(leased.epoch, "" if isinstance(leased, Held) else holder)


def _now() -> float:
    return asyncio.get_running_loop().time()
