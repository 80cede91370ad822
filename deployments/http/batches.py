"""The entries of batches: so many run at a time in this process, however many batches there are.

    taken on ──► waits for its turn ──► runs ──► answered
       └───────► 503                    the entries of other batches take up the room, and still do after `max_wait_ms`

Except while a batch is read, it takes no place of single requests, so that these never wait for entries. Callers take turns, and the
batches of a caller do: each asks for as many turns at a time as there are.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count as numbers
from time import monotonic
from typing import TypeAlias, TypeVar

from starlette.exceptions import HTTPException

from cluster.config import AdmissionSettings
from cluster.traffic.turns import Turns
from deployments.http import problems

T = TypeVar("T")
_WEIGHT = 0.1
Turn: TypeAlias = tuple[int, asyncio.Future[None]]


@dataclass(eq=False, slots=True)
class _Batch:
    """One that waits for room for its entries."""

    caller: str | None
    entries: int
    taken_on: asyncio.Future[None]


class Batches:
    """The entries of batches in one process. `places`: gives how many requests may run at a time now, and so the most entries that do.

    `refused`: called for each batch that is turned away. `held`: entries that run or wait; `taken_on`: batches with such entries.
    """

    def __init__(self, settings: AdmissionSettings, places: Callable[[], int], refused: Callable[[], None] = lambda: None) -> None:
        self.settings, self._places, self._refused = settings, places, refused
        self.held, self.running, self.taken_on = 0, 0, 0
        self._held_of: Counter[str] = Counter()
        self._held_by: Counter[str | None] = Counter()  # caller -> entries
        self._turns, self._numbers = Turns[Turn](), numbers()
        self._line: list[_Batch] = []  # as they came
        self._mean_s = 0.0

    async def run(self, entries: Sequence[Callable[[], Awaitable[T]]], of: Counter[str], caller: str | None = None) -> list[T]:
        """The answers of a batch in the order of its entries; `of`: tenant -> entries. `caller`: takes turns with the others.

        Raises HTTPException (503) where there is no room in time, and the error of the first entry that fails; the others then end, too.
        """
        answers, left = dict[int, T](), iter(enumerate(entries))

        async def work() -> None:
            for position, entry in left:
                async with self._turn(caller):
                    answers[position] = await entry()
                self._end(1, caller)
                await asyncio.sleep(0)  # what is kept is answered without a wait, and other requests have their turn between two of them

        async with self._taken_on(of, caller):
            self.taken_on += 1
            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(min(len(entries), self.settings.max_concurrent_entries)):
                        workers.create_task(work())
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
            finally:
                self.taken_on -= 1
                self._end(len(entries) - len(answers), caller)
        return [answers[position] for position in range(len(entries))]

    @asynccontextmanager
    async def _taken_on(self, of: Counter[str], caller: str | None) -> AsyncIterator[None]:
        """Within the block, the batch's entries count as held. Raises HTTPException (503) where there is no room for them in time."""
        for tenant, count in of.items():
            share = self.settings.max_concurrent_share * self.settings.max_held_entries
            if self.settings.max_concurrent_share < 1 and self._held_of[tenant] and self._held_of[tenant] + count > share:
                raise self._refusal(f"tenant {tenant!r} has its share of the entries of batches under way", count)
        self._held_of.update(of)
        try:
            await self._find_room(of.total(), caller)
            yield
        finally:
            self._held_of -= of  # keeps what is above zero: a tenant without any is forgotten

    async def _find_room(self, count: int, caller: str | None) -> None:
        """Wait for room. Next is the batch of the caller that holds the fewest entries, and of these the first to come: it is waited for,
        so that small batches do not overtake a large one for ever. Where no entry is held, any batch fits.
        """
        batch = _Batch(caller, count, asyncio.get_running_loop().create_future())
        self._line.append(batch)
        self._let_in()
        try:
            async with asyncio.timeout(self.settings.max_wait_ms / 1e3):
                await batch.taken_on
        except (TimeoutError, asyncio.CancelledError) as error:
            if batch in self._line:
                self._line.remove(batch)
                self._let_in()
            else:  # it was taken on at the same moment
                self._end(count, caller)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise self._refusal(f"{self.held} entries of batches are under way or wait; ask again later", count) from None

    def _let_in(self) -> None:
        while waiting := [batch for batch in self._line if not batch.taken_on.done()]:
            batch = min(waiting, key=lambda one: self._held_by[one.caller])
            if self.held and self.held + batch.entries > self.settings.max_held_entries:
                return
            self._line.remove(batch)
            self.held += batch.entries
            self._held_by[batch.caller] += batch.entries
            batch.taken_on.set_result(None)

    @asynccontextmanager
    async def _turn(self, caller: str | None) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._turns.put(caller, (next(self._numbers), turn))
        self._give_turns()
        try:
            await turn
            began = monotonic()
            yield
            self._mean_s += (monotonic() - began - self._mean_s) * (_WEIGHT if self._mean_s else 1.0)
        finally:
            if not turn.cancelled():
                self.running -= 1
            self._give_turns()

    def _give_turns(self) -> None:
        while self._turns and self.running < self._most:
            _, turn = self._turns.take()
            if not turn.done():
                self.running += 1
                turn.set_result(None)

    @property
    def _most(self) -> int:
        return min(self.settings.max_concurrent_entries, self._places())

    def _end(self, count: int, caller: str | None) -> None:
        self.held -= count
        self._held_by[caller] -= count
        if not self._held_by[caller]:
            del self._held_by[caller]
        self._let_in()

    def _refusal(self, detail: str, count: int) -> HTTPException:
        self._refused()
        beyond = max(1, self.held + count - self.settings.max_held_entries)
        return problems.overloaded(detail, wait_s=beyond * self._mean_s / self._most)
