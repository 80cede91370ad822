"""Entries on their way to the shared cache: collected while one call is under way, and sent together in the next. No answer waits."""

import asyncio
from collections.abc import Callable
from itertools import islice

from cluster.background import no_requests_context
from cluster.cache.entry import Entry, Key
from cluster.cache.shared import ShardedCache

BATCH = 64


class WriteBehind:
    """Holds at most `limit` entries; further ones are dropped and counted. `refused` is called with each key that was erased meanwhile.

    To be made outside of requests: entries are sent in the context in which it was made.
    """

    def __init__(self, shared: ShardedCache, limit: int, refused: Callable[[Key], object] = lambda _: None) -> None:
        self.dropped = 0
        self._shared, self._limit, self._refused = shared, limit, refused
        self._pending: dict[Key, tuple[Entry, int | None]] = {}
        self._sending: dict[Key, tuple[Entry, int | None]] = {}
        self._sender: asyncio.Task[None] | None = None
        self._context = no_requests_context()

    def put(self, key: Key, entry: Entry, epoch: int | None = None) -> bool:
        """Take an entry to be sent; returns whether there was room for it. `epoch`: when its computation began; without one, the entry is
        of this moment, and no earlier erasure concerns it.
        """
        if len(self._pending) >= self._limit and key not in self._pending:
            self.dropped += 1
            return False
        self._pending[key] = (entry, epoch)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send(), context=self._context)
        return True

    def __contains__(self, key: object) -> bool:
        """Whether an entry of the key is on its way."""
        return key in self._pending or key in self._sending

    def forget(self, concerned: Callable[[Key], bool]) -> None:
        """Drop the concerned entries that have not been sent. One that waits for its epoch would be given that of after the erasure."""
        for waiting in (self._pending, self._sending):
            for key in [key for key in waiting if concerned(key)]:
                del waiting[key]

    async def flush(self) -> None:
        """Wait until all entries that were put so far have been sent."""
        if self._sender is not None:
            await asyncio.shield(self._sender)

    async def _send(self) -> None:
        while self._pending:
            self._sending = {key: self._pending.pop(key) for key in [*islice(self._pending, BATCH)]}
            epochs = {key: epoch for key, (_, epoch) in self._sending.items() if epoch is not None}
            if undated := self._sending.keys() - epochs.keys():
                epochs.update(await self._shared.epochs([*undated]))
            for key in await self._shared.mput({key: entry for key, (entry, _) in self._sending.items()}, epochs):
                self._refused(key)
            self._sending = {}
