"""The order in which a gateway reads its event store."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from cluster.errors import DeadlineExceeded
from cluster.traffic.turns import InTurns

T = TypeVar("T")


class ReadTurns:
    """Reads of an event store, `readers()` of them at a time: tenants take turns, so that one with many or long reads holds up no other.
    `answered`: how many reads the store has answered. For one event loop.
    """

    def __init__(self, readers: Callable[[], int] = lambda: 1) -> None:
        self.answered = 0
        self._turns = InTurns(readers)

    async def read(self, lane: str | None, question: Callable[[], Awaitable[T]], wait_s: float) -> T:
        """The store's answer to the question, which is asked when it is the lane's turn. `lane`: a tenant; None: one that no tenant is in.

        Raises DeadlineExceeded where the turn does not come within `wait_s` seconds, which says nothing about the store; else as the
        question does.
        """
        try:
            async with asyncio.timeout(wait_s):
                await self._turns.begin(lane)
        except TimeoutError:
            problem = f"other reads of the event store came first for {wait_s:g} s; ask for fewer histories at a time"
            raise DeadlineExceeded(problem) from None
        try:
            answer = await question()
        finally:
            self._turns.end()
        self.answered += 1
        return answer
