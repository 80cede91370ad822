"""Entries on their way to the shared cache: collected while a call is under way, sent together in the next. No answer waits for them."""

import asyncio
from collections.abc import Callable
from itertools import islice

from cluster.cache.entry import Entry, Key
from cluster.cache.shared import SharedCache
from cluster.no_request import no_requests_context

BATCH = 64


class WriteBehind:
    """Holds at most `limit` entries; more are dropped and counted. `refused` is told of each key that was erased in the meantime.

    To be made outside of requests: entries are sent in that context.
    """

    def __init__(self, shared: SharedCache, limit: int, refused: Callable[[Key], object] = lambda _: None) -> None:
        self.dropped = 0
        self._shared, self._limit, self._refused = shared, limit, refused
        self._pending: dict[Key, tuple[Entry, int | None]] = {}
        self._sender: asyncio.Task[None] | None = None
        self._context = no_requests_context()

    def put(self, key: Key, entry: Entry, epoch: int | None = None) -> bool:
        """With the epoch in which its computation began; without one, where it belongs to this moment and not to what went before. Says
        whether there was room for it.
        """
        if len(self._pending) >= self._limit and key not in self._pending:
            self.dropped += 1
            return False
        self._pending[key] = (entry, epoch)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.get_running_loop().create_task(self._send(), context=self._context)
        return True

    def forget(self, concerned: Callable[[Key], bool]) -> None:
        """Send these no more."""
        for key in [key for key in self._pending if concerned(key)]:
            del self._pending[key]

    async def flush(self) -> None:
        """Until all that was put so far has been sent."""
        if self._sender is not None:
            await asyncio.shield(self._sender)

    async def _send(self) -> None:
        while self._pending:
            batch = {key: self._pending.pop(key) for key in [*islice(self._pending, BATCH)]}
            epochs = {key: epoch for key, (_, epoch) in batch.items() if epoch is not None}
            if undated := batch.keys() - epochs.keys():
                epochs.update((await self._shared.mget([*undated], counted=False)).epochs)
            for key in await self._shared.mput({key: entry for key, (entry, _) in batch.items()}, epochs):
                self._refused(key)
