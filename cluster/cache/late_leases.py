"""Leases without a holder: the answer came after the deadline, or its caller was gone by then.

The holder does not know that it holds, and other callers would wait for it: such a lease is given back as soon as its answer is there.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from cluster.cache.entry import Entry
from cluster.cache.shard import Held, Leased

Release: TypeAlias = Callable[[], Awaitable[None]]
logger = logging.getLogger(__name__)


class LateLeases:
    """At most `limit` calls at a time, each awaited for `within_s` at most; leases beyond that end with their time."""

    def __init__(self, within_s: float, limit: int = 1000) -> None:
        self._within_s, self._limit = within_s, limit
        self._tasks: set[asyncio.Task[None]] = set()

    def give_back(self, call: "asyncio.Future[Leased]", release: Release) -> None:
        """Let the `call` of `lease` go on, and `release` what it may have been granted, in the background."""
        if len(self._tasks) >= self._limit:
            call.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._given_back(call, release))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give back what is answered in time, and let go of the rest."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._within_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _given_back(self, call: "asyncio.Future[Leased]", release: Release) -> None:
        leased = await self._tried(call)
        if not isinstance(leased, Entry | Held):  # granted, or the answer was lost on its way
            await self._tried(release())

    async def _tried(self, call: Awaitable[Any]) -> Any:
        """Its answer; None where it fails or takes too long, as a lease that is not given back ends with its time."""
        try:
            async with asyncio.timeout(self._within_s):
                return await call
        except Exception as error:  # noqa: BLE001 - a foreign store may raise anything; the breaker has counted the call itself
            logger.debug("a lease that came too late: %s: %s", type(error).__name__, error)
            return None
