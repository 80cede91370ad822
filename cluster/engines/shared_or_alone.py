"""The order in which an engine is used: batches together, whatever changes the engine alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SharedOrAlone:
    """First come, first served: what waits to be alone lets no later one in. For one event loop."""

    def __init__(self) -> None:
        self._door, self._left = asyncio.Lock(), asyncio.Event()
        self._inside = 0
        self._left.set()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Use the engine beside others that do so together."""
        async with self._door:
            self._inside += 1
            self._left.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._left.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Use the engine once all others have left."""
        async with self._door:
            await self._left.wait()
            yield
