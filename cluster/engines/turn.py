"""Who may use an engine: batches together, whatever changes the engine alone."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Turn:
    """First come, first served: what waits to be alone lets no later one in. For one event loop."""

    def __init__(self) -> None:
        self._door, self._left = asyncio.Lock(), asyncio.Event()
        self._inside = 0
        self._left.set()

    @asynccontextmanager
    async def together(self) -> AsyncIterator[None]:
        """Beside others that share it."""
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
        """Once all others have left."""
        async with self._door:
            await self._left.wait()
            yield
