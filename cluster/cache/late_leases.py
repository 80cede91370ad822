"""Leases that were granted too late: the answer of `lease` came after the deadline, or after its caller had left.

Its holder does not know of the lease, for which other callers would wait: it is given back as soon as the answer is there.
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
    """Awaits at most `limit` calls at a time, each for `within_s` at most; the leases of others end with their time."""

    def __init__(self, within_s: float, limit: int = 1000) -> None:
        self._within_s, self._limit = within_s, limit
        self._tasks: set[asyncio.Task[None]] = set()

    def give_back(self, call: "asyncio.Future[Leased]", release: Release) -> None:
        """Await the `call` of `lease` in the background, and `release` the lease that it may be granted."""
        if len(self._tasks) >= self._limit:
            call.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._given_back(call, release))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Give back the leases of calls that are answered in time, and cancel the other calls."""
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
        """The call's answer; None where it fails or takes too long: a lease that is not given back ends with its time."""
        try:
            async with asyncio.timeout(self._within_s):
                return await call
        except Exception as error:  # noqa: BLE001 - a foreign store may raise anything; the breaker has counted the call itself
            logger.debug("a lease that came too late: %s: %s", type(error).__name__, error)
            return None
