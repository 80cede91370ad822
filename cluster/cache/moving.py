"""A shard that gives away entries that it no longer owns, and takes over entries that it owns now.

    gateway -> follow(layout) -> for each batch of entries that others own: owner.take_over(entries, its epoch before they were read)

An entry is in one shard, or in two while it is on its way. An erasure removes it from both, and from its way, by two rules: a shard takes
over no entry that an erasure since the giver read it covers; and an erasure is repeated until two rounds in a row found the same shards,
all in the same layout (see ElasticCache). In one layout an entry moves once, from a shard that does not own it to the one that does: after
the first round it is only there, or on its way there, and the second round erases the former and has the latter refused.

An owner that cannot be reached costs its entries, never an answer. Leases do not move: a key that changes its owner may be computed twice.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cluster.cache.entry import Entry, Key
from cluster.cache.layout import Layout
from cluster.cache.memory import MemoryCache
from cluster.cache.rendezvous import pick
from cluster.cache.shard import CacheShard

BATCH = 128
"""How many entries are looked at, and given away, at a time. Requests go on between batches."""
TRIES, PAUSE_S, GIVE_WITHIN_S = 3, 0.5, 5.0
UNKNOWN_EPOCH = -1
logger = logging.getLogger(__name__)


class Peer(Protocol):
    """Another shard."""

    async def take_over(self, entries: Mapping[Key, Entry], epoch: int, layout: Layout) -> int: ...


@dataclass(frozen=True, slots=True)
class ShardState:
    """The layout that a shard follows, whether it still has to give entries away, and the share of a core that it uses."""

    layout: Layout
    moving: bool
    busy: float


class MovingShard(CacheShard):
    """`name`: the shard's own, with a number at the end; `peer`: finds another shard by its name, and may raise; `busy`: gives the share of
    a core that this one uses.
    """

    def __init__(
        self,
        name: str,
        memory: MemoryCache,
        peer: Callable[[str], Awaitable[Peer]],
        *,
        busy: Callable[[], float] = lambda: 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(memory, clock)
        self._name, self._peer, self._busy = name, peer, busy
        self._layout: Layout | None = None
        self._owners: list[str] = []
        self._move: asyncio.Task[None] | None = None

    async def mput(self, entries: Mapping[Key, Entry], epochs: Mapping[Key, int]) -> frozenset[Key]:
        """Put the entries that no erasure since their epochs concerns; returns the keys of all others, but those of entries that another
        shard owns: such an entry is neither taken in nor refused, it is a miss.
        """
        own = {key: entry for key, entry in entries.items() if self._owns(key)}
        for key in entries.keys() - own.keys():
            self._settle(key, None)
        return await super().mput(own, epochs)

    async def follow(self, layout: Layout) -> ShardState:
        """Give away entries that others own by this layout, in the background; an earlier layout than the present one changes nothing."""
        return ShardState(self._adopt(layout), self._move is not None and not self._move.done(), self._busy())

    async def erase(self, namespace: str | None, group: str | None, layout: Layout) -> tuple[int, Layout]:
        """Forget a group, a namespace or everything; returns how many entries there were, and the layout that the shard followed as they
        were removed.
        """
        latest = self._adopt(layout)
        return await self.invalidate(namespace, group), latest

    async def take_over(self, entries: Mapping[Key, Entry], epoch: int, layout: Layout) -> int:
        """Take in the entries that this shard owns, lacks, and has not erased since `epoch`; returns the epoch for entries that the giver
        reads from now on.
        """
        self._adopt(layout)
        for key, entry in entries.items():
            if self._owns(key) and self._epochs.admits(key, epoch) and self.memory.peek(key) is None:
                self.memory.put(key, entry)
        return self._epochs.now

    async def close(self) -> None:
        if self._move is not None:
            self._move.cancel()
        await super().close()

    def _owns(self, key: Key) -> bool:
        return self._layout is None or pick(key, self._owners) == self._name

    def _adopt(self, layout: Layout) -> Layout:
        """The latest layout that the shard has heard of. One without owners changes nothing."""
        if self._layout is not None and layout <= self._layout:
            return self._layout
        if not layout.owners:  # its gateway has heard of none
            return layout
        self._layout, self._owners = layout, layout.names(self._name.rpartition("-")[0])
        for key in [key for key in self._leases if not self._owns(key)]:
            self._settle(key, None)
        if self._move is not None:
            self._move.cancel()  # what is under way may arrive: its owner judges by the layout that it follows itself
        self._move = asyncio.get_running_loop().create_task(self._give_away(layout, self._owners))
        return layout

    async def _give_away(self, layout: Layout, owners: Sequence[str]) -> None:
        keys = [key for key, _ in self.memory.entries()]
        epochs: dict[str, int] = {}
        for start in range(0, len(keys), BATCH):
            batch: defaultdict[str, list[Key]] = defaultdict(list)
            for key in keys[start : start + BATCH]:
                if (owner := pick(key, owners)) != self._name:
                    batch[owner].append(key)
            for owner, theirs in batch.items():
                await self._give(owner, theirs, layout, epochs)
                self.memory.discard(theirs)
            await asyncio.sleep(0)

    async def _give(self, owner: str, keys: Sequence[Key], layout: Layout, epochs: dict[str, int]) -> None:
        """Have the owner take these entries over, or give them up. `epochs`: owner -> the epoch that it told last; UNKNOWN_EPOCH where it
        is out of reach, so that no time is lost with the next batch.
        """
        for attempt in range(TRIES if epochs.get(owner) != UNKNOWN_EPOCH else 0):
            if attempt:
                await asyncio.sleep(PAUSE_S)
            try:
                async with asyncio.timeout(GIVE_WITHIN_S):
                    peer = await self._peer(owner)
                    if owner not in epochs:
                        epochs[owner] = await peer.take_over({}, UNKNOWN_EPOCH, layout)
                    given = {key: entry for key in keys if (entry := self.memory.peek(key)) is not None}  # after its epoch was told
                    epochs[owner] = await peer.take_over(given, epochs[owner], layout)
            except Exception as error:  # noqa: BLE001 - a foreign process may raise anything; what it does not take is a miss
                logger.info("cache shard %s does not take over what it owns: %s: %s", owner, type(error).__name__, error)
                epochs.pop(owner, None)
            else:
                return
        epochs[owner] = UNKNOWN_EPOCH
