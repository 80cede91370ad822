"""Entries on their way to the shared cache: collected while a call is under way, sent together in the next. No answer waits for them."""

import asyncio
from collections.abc import Callable
from itertools import islice

from cluster.cache.entry import Entry, Key
from cluster.cache.shared import SharedCache

BATCH = 64


class WriteBehind:
    """Holds at most `limit` entries; more are dropped and counted. `refused` is told of each key that was erased in the meantime."""

    def __init__(self, shared: SharedCache, limit: int, refused: Callable[[Key], object]) -> None:
        self.dropped = 0
        self._shared, self._limit, self._refused = shared, limit, refused
        self._pending: dict[Key, tuple[Entry, int]] = {}
        self._sender: asyncio.Task[None] | None = None

    def put(self, key: Key, entry: Entry, epoch: int) -> None:
        if len(self._pending) >= self._limit and key not in self._pending:
            self.dropped += 1
            return
        self._pending[key] = (entry, epoch)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send())

    async def flush(self) -> None:
        """Until all that was put so far has been sent."""
        if self._sender is not None:
            await asyncio.shield(self._sender)

    async def _send(self) -> None:
        while self._pending:
            batch = {key: self._pending[key] for key in islice(self._pending, BATCH)}
            for key in batch:
                del self._pending[key]
            entries = {key: entry for key, (entry, _) in batch.items()}
            for key in await self._shared.mput(entries, {key: epoch for key, (_, epoch) in batch.items()}):
                self._refused(key)
