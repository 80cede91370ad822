"""The entries of batches: so many run at a time in this process, however many batches there are.

    taken on ──► waits for its turn ──► runs ──► answered
       └───────► 503                    the entries of other batches take up the room, and still do after `max_wait_ms`

Except while a batch is read, it takes no place of single requests, so that these never wait for entries. Lanes take turns; so do the
batches of one lane: each queues at most `max_concurrent_entries` entries.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from starlette.exceptions import HTTPException

from cluster.config import AdmissionSettings
from cluster.traffic.turns import InTurns
from deployments.http import problems

T = TypeVar("T")
_WEIGHT = 0.1


@dataclass(eq=False, slots=True)
class _Batch:
    """One that waits for room for its entries."""

    lane: str | None
    entries: int
    let_in: asyncio.Future[None]


class Batches:
    """The entries of batches in one process. `places`: gives how many requests may run at a time now, and so the most entries that do.

    `refused`: called for each batch that is turned away. `held`: entries that run or wait; `taken_on`: batches with such entries.
    """

    def __init__(self, settings: AdmissionSettings, places: Callable[[], int], refused: Callable[[], None] = lambda: None) -> None:
        self.settings, self._places, self._refused = settings, places, refused
        self.held, self.taken_on = 0, 0
        self._held_by_tenant: Counter[str] = Counter()
        self._held_by_lane: Counter[str | None] = Counter()  # lane -> entries
        self._turns = InTurns(lambda: self._most)
        self._line: list[_Batch] = []  # as they came
        self._mean_s = 0.0

    async def run(self, entries: Sequence[Callable[[], Awaitable[T]]], of: Counter[str], lane: str | None = None) -> list[T]:
        """The answers of a batch in the order of its entries; `of`: tenant -> entries. `lane`: takes turns with other lanes.

        Raises HTTPException (503) where there is no room in time, and the error of the first entry that fails; the others then end, too.
        """
        answers, left = dict[int, T](), iter(enumerate(entries))

        async def work() -> None:
            for position, entry in left:
                async with self._turn(lane):
                    answers[position] = await entry()
                self._end(1, lane)
                await asyncio.sleep(0)  # a cached entry never suspends: without this, no other request would run between entries

        async with self._held_entries(of, lane):
            self.taken_on += 1
            try:
                async with asyncio.TaskGroup() as workers:
                    for _ in range(min(len(entries), self.settings.max_concurrent_entries)):
                        workers.create_task(work())
            except BaseExceptionGroup as failures:
                raise failures.exceptions[0] from None
            finally:
                self.taken_on -= 1
                self._end(len(entries) - len(answers), lane)
        return [answers[position] for position in range(len(entries))]

    @asynccontextmanager
    async def _held_entries(self, of: Counter[str], lane: str | None) -> AsyncIterator[None]:
        """Within the block, the batch's entries count as held. Raises HTTPException (503) where there is no room for them in time."""
        for tenant, count in of.items():
            share = self.settings.max_concurrent_share * self.settings.max_held_entries
            if self.settings.max_concurrent_share < 1 and self._held_by_tenant[tenant] and self._held_by_tenant[tenant] + count > share:
                raise self._refusal(f"tenant {tenant!r} has its share of the entries of batches under way", count)
        self._held_by_tenant.update(of)
        try:
            await self._find_room(of.total(), lane)
            yield
        finally:
            self._held_by_tenant -= of  # keeps what is above zero: a tenant without any is forgotten

    async def _find_room(self, count: int, lane: str | None) -> None:
        """Wait for room. Next is the batch of the lane that holds the fewest entries, and of these the first to come: it is waited for,
        so that small batches do not overtake a large one for ever. Where no entry is held, any batch fits.
        """
        batch = _Batch(lane, count, asyncio.get_running_loop().create_future())
        self._line.append(batch)
        self._let_in()
        try:
            async with asyncio.timeout(self.settings.max_wait_ms / 1e3):
                await batch.let_in
        except TimeoutError:
            self._leave(batch)
            raise self._refusal(f"{self.held} entries of batches are under way or wait; ask again later", count) from None
        except asyncio.CancelledError:
            self._leave(batch)
            raise

    def _leave(self, batch: _Batch) -> None:
        if batch in self._line:
            self._line.remove(batch)
            self._let_in()
        else:  # it was let in at the same moment
            self._end(batch.entries, batch.lane)

    def _let_in(self) -> None:
        while waiting := [batch for batch in self._line if not batch.let_in.done()]:
            batch = min(waiting, key=lambda one: self._held_by_lane[one.lane])
            if self.held and self.held + batch.entries > self.settings.max_held_entries:
                return
            self._line.remove(batch)
            self.held += batch.entries
            self._held_by_lane[batch.lane] += batch.entries
            batch.let_in.set_result(None)

    @asynccontextmanager
    async def _turn(self, lane: str | None) -> AsyncIterator[None]:
        await self._turns.begin(lane)
        try:
            began = monotonic()
            yield
            self._mean_s += (monotonic() - began - self._mean_s) * (_WEIGHT if self._mean_s else 1.0)
        finally:
            self._turns.end()

    @property
    def running(self) -> int:
        """Entries that run."""
        return self._turns.running

    @property
    def _most(self) -> int:
        return min(self.settings.max_concurrent_entries, self._places())

    def _end(self, count: int, lane: str | None) -> None:
        self.held -= count
        self._held_by_lane[lane] -= count
        if not self._held_by_lane[lane]:
            del self._held_by_lane[lane]
        self._let_in()

    def _refusal(self, detail: str, count: int) -> HTTPException:
        self._refused()
        beyond = max(1, self.held + count - self.settings.max_held_entries)
        return problems.overloaded(detail, wait_s=beyond * self._mean_s / self._most)
