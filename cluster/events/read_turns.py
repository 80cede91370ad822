"""The order in which a gateway reads its event store.

a read for an answer ───────────────────────────────────────────────► its lane's turn ──► the store
a read for an answer that is computed ahead ──► one of half the readers ──► its lane's turn ──► the store
a read for a caller that asks for it ──► one of all readers but one ──► its lane's turn ──► the store
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from itertools import takewhile
from typing import Any, TypeVar

from cluster.background import AHEAD, Background, lane_of
from cluster.errors import BackendUnavailable, DeadlineExceeded
from cluster.traffic.turns import InTurns

T = TypeVar("T")


class ReadTurns:
    """Reads of an event store, `readers()` of them at a time, two at least: lanes take turns, so that a caller with many or long reads
    holds up no other. Those for answers that are computed ahead have turns of the caller that caused them, and leave half of the readers to
    the others, however many callers cause them. Reads for callers that ask for them have no deadline, so they leave a reader.

    A turn lasts until the store has done with the read, which is cancelled where its caller leaves; the caller itself leaves at once. To be
    made outside of requests, for one event loop.
    """

    def __init__(self, readers: Callable[[], int] = lambda: 2) -> None:
        self._turns, self._asked_for = InTurns(readers), InTurns(lambda: max(1, readers() - 1))
        self._ahead = InTurns(lambda: max(1, readers() // 2))
        self._answered = self._overdue = 0
        self._under_way, self._for_answers = Background(), set[asyncio.Task[Any]]()

    async def read(self, tenant: str, question: Callable[[], Coroutine[Any, Any, T]], wait_s: float) -> T:
        """The store's answer, however long it takes. Where the turn does not come within `wait_s` seconds, raises DeadlineExceeded, or
        BackendUnavailable where the store is silent: it answers no read meanwhile; else as the question does.
        """
        answered = self._answered
        try:
            reading = await self._begun(tenant, question, wait_s, self._asked_for, self._turns)
        except DeadlineExceeded:
            if self._answered == answered:
                raise BackendUnavailable(f"the event store has answered no read for {wait_s:g} s") from None
            raise
        return await self._answer(reading)

    async def read_for_answer(self, tenant: str | None, question: Callable[[], Coroutine[Any, Any, T]], within_s: float) -> T:
        """The store's answer within so many seconds from the turn, which is waited for as long. `tenant`: None: no tenant's, in a lane
        apart, whatever it is begun for.

        Raises TimeoutError where the store is silent: it takes longer or, while this one waited for its turn, took longer over another read
        for an answer and answered none; of reads for answers ahead the latter says little, as half of the readers may be free. Raises
        DeadlineExceeded where the turn does not come though the store is not silent; else as the question does.
        """
        answered, overdue, before = self._answered, self._overdue, set(self._for_answers)
        ahead = AHEAD.get() and tenant is not None
        try:
            reading = await self._begun(tenant, question, within_s, *((self._ahead, self._turns) if ahead else (self._turns,)))
        except DeadlineExceeded:
            if not ahead and self._answered == answered and (self._overdue > overdue or before & self._for_answers):
                raise TimeoutError from None
            raise
        self._for_answers.add(reading)
        reading.add_done_callback(self._for_answers.discard)
        try:
            return await self._answer(reading, within_s)
        except TimeoutError:
            self._overdue += 1
            raise

    async def _begun(
        self, tenant: str | None, question: Callable[[], Coroutine[Any, Any, T]], wait_s: float, *lines: InTurns
    ) -> "asyncio.Task[T]":
        """The read, which has its turn in each of the lines, one after the other."""
        begun = list(takewhile(InTurns.begin_at_once, lines))
        try:
            if len(begun) < len(lines):
                lane = None if tenant is None else lane_of(tenant)
                async with asyncio.timeout(wait_s):
                    for line in lines[len(begun) :]:
                        await line.begin((lane, self._ahead in lines))  # behind its caller's it would hold up those ahead of others
                        begun.append(line)
        except BaseException as error:
            for line in begun:
                line.end()
            if not isinstance(error, TimeoutError):
                raise
            problem = f"other reads of the event store came first for {wait_s:g} s; ask for fewer histories at a time"
            raise DeadlineExceeded(problem) from None
        reading = self._under_way.start(question())
        reading.add_done_callback(lambda done: _ended(done, lines))
        return reading

    async def _answer(self, reading: "asyncio.Task[T]", within_s: float | None = None) -> T:
        """What the read returns or raises. Raises TimeoutError, and cancels the read, where it takes longer."""
        try:
            await asyncio.wait([reading], timeout=within_s)
        finally:
            if not (ended := reading.done()):
                reading.cancel()
        if not ended:
            raise TimeoutError
        answer = reading.result()
        self._answered += 1
        return answer


def _ended(reading: "asyncio.Task[Any]", lines: Iterable[InTurns]) -> None:
    if not reading.cancelled():
        reading.exception()  # seen, though its caller may have left
    for line in lines:
        line.end()
