"""The common part of stores over a page pool: holding, counting, forgetting. Each store has its own way to find and keep rows."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from threading import RLock
from typing import Any

import numpy as np

from cluster.values import Int64Array
from integrations.hstu.state.pool import PagePool, Plane
from integrations.hstu.state.rows import common_rows
from integrations.hstu.state.store import Held, Owner, Rows, StateStatistics, StateStore


class PooledHeld:
    """Rows of one history in pages that this holder has retained, so that they stay readable when the owner is forgotten."""

    __slots__ = ("_pool", "anchor", "forgotten", "owner", "pages", "released", "rows")

    def __init__(self, pool: PagePool, owner: Owner, rows: int, pages: list[int], anchor: Any) -> None:
        self._pool, self.owner, self.rows, self.pages, self.anchor = pool, owner, rows, pages, anchor
        self.forgotten = self.released = False

    def read(self, out: Rows, start: int = 0, stop: int | None = None) -> None:
        last = self.rows if stop is None else stop
        if self.released or last > self.rows:
            raise ValueError(f"rows {start}..{last - 1} of {self.rows} rows of {self.owner}{', which were released' * self.released}")
        self._pool.gather(self.pages, last, out, start)


class PooledStates(StateStore, ABC):
    """A StateStore over a page pool. One lock: rows are written under it and read without it, from pages that the reader has retained. What
    is left of users in pages is overwritten without it.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._lock = RLock()
        self._counts: Counter[str] = Counter()
        self._holds: dict[Owner, set[PooledHeld]] = {}

    @property
    def planes(self) -> Mapping[str, Plane]:
        return self.pool.planes

    def match(self, owner: Owner, rows: Int64Array) -> PooledHeld:
        with self._lock:
            held = self._find(owner, rows)
            self.pool.retain(held.pages)
            self._holds.setdefault(owner, set()).add(held)
            counts = self._counts
            counts["hits" if held.rows else "misses"] += 1
            counts["hit_rows"] += held.rows
            counts["asked_rows"] += len(rows)
        return held

    def commit(self, held: Held, rows: Int64Array, start: int, new: Rows) -> None:
        mine = self._mine(held)
        given = self.pool.rows_of(new)
        if not 0 <= start <= held.rows or given != len(rows) - start:
            raise ValueError(f"{given} rows were given as rows {start}..{len(rows) - 1}, behind {held.rows} that are held")
        with self._lock:
            if mine.forgotten:  # erased while it was encoded: it must not come back
                return
            kept = self._keep(mine, rows, start, new)
            self._counts.update({"commits": 1, "rejected": not kept})

    def release(self, held: Held) -> None:
        with self._lock:
            mine = self._mine(held)
            mine.released = True
            freed = self.pool.release(mine.pages)
            self._holds[mine.owner].remove(mine)
            if not self._holds[mine.owner]:
                del self._holds[mine.owner]
            self._let_go(mine)
        if freed:  # their owners, others' among them, were erased or evicted meanwhile
            self.pool.wipe(mine.pages)

    def _forget(self, owners: Callable[[], Collection[Owner]]) -> int:
        with self._lock:
            dropped = sum(map(self.drop, owners()))
        self.pool.wipe()
        return dropped

    def drop(self, owner: Owner) -> int:
        """As `forget`, but the rows stay in memory until other rows take the place or the pool is wiped."""
        with self._lock:
            for held in self._holds.get(owner, ()):
                held.forgotten = True
            self._counts["forgotten"] += self._has(owner)
            return self._drop(owner)

    def owners(self) -> set[Owner]:
        with self._lock:
            return self._owners() | self._holds.keys()

    def kept_rows(self, owner: Owner) -> int:
        if not self._lock.acquire(blocking=False):
            return 0
        try:
            return len(self._history(owner)[0])
        finally:
            self._lock.release()

    def hottest(self) -> list[Owner]:
        with self._lock:
            return self._latest()

    def copy(self, owner: Owner) -> tuple[Int64Array, Rows]:
        with self._lock:
            rows, pages = self._history(owner)
            self.pool.retain(pages)
        try:
            copies = {name: np.empty(plane.stacked(len(rows)), plane.dtype) for name, plane in self.pool.planes.items()}
            self.pool.gather(pages, len(rows), copies)
        finally:
            if self.pool.release(pages):  # forgotten meanwhile
                self.pool.wipe(pages)
        return rows, copies

    def adopt(self, owner: Owner, rows: Int64Array, new: Rows) -> int:
        if self.pool.rows_of(new) != len(rows):
            raise ValueError(f"{self.pool.rows_of(new)} rows were given for a history of {len(rows)}")
        with self._lock:
            own, pages = self._history(owner)
            if len(own) >= len(rows) or common_rows(own, rows) < len(own):
                return 0
            held = self._find(owner, rows)
            try:
                self._keep(held, rows, 0, new)
            finally:
                self._let_go(held)
            self._counts["adopted"] += self._has(owner)
            return (len(self._history(owner)[1]) - len(pages)) * self.pool.page_bytes

    def statistics(self, elsewhere: Mapping[Owner, int] | None = None) -> StateStatistics:
        """`elsewhere`: owners with rows in another memory, and how many; those that have none here are counted, too."""
        with self._lock:
            used, held = self.pool.used_bytes, sum(map(len, self._holds.values()))
            others = [rows for owner, rows in (elsewhere or {}).items() if not self._has(owner)]
            return StateStatistics(
                users=self._users() + len(others),
                rows=self._rows() + sum(others),
                held=held,
                pages=used // self.pool.page_bytes,
                used_bytes=used,
                budget_bytes=self.pool.budget_bytes,
                **self._counts,
            )

    def _mine(self, held: Held) -> PooledHeld:
        if not isinstance(held, PooledHeld) or held.released or held not in self._holds.get(held.owner, ()):
            raise ValueError(f"{held} is not held here; it was released, or is another store's")
        return held

    def _room(self, count: int) -> list[int]:
        """Take so many pages, or as many as there are once everything that no request holds is evicted."""
        while self.pool.free < count and self._evict():
            self._counts["evictions"] += 1
        return self.pool.alloc(min(count, self.pool.free)) or []

    @abstractmethod
    def _find(self, owner: Owner, rows: Int64Array) -> PooledHeld:
        """The kept rows of the history, locked against eviction until `_let_go`; their pages are not retained yet."""

    @abstractmethod
    def _keep(self, held: PooledHeld, rows: Int64Array, start: int, new: Rows) -> bool:
        """Keep as many of the rows as find room; returns whether those were all."""

    @abstractmethod
    def _let_go(self, held: PooledHeld) -> None: ...

    @abstractmethod
    def _evict(self) -> bool:
        """Give up one entry that no request holds; returns False where there is none."""

    @abstractmethod
    def _drop(self, owner: Owner) -> int:
        """Remove the owner; returns how many rows are kept less."""

    @abstractmethod
    def _has(self, owner: Owner) -> bool: ...

    @abstractmethod
    def _latest(self) -> list[Owner]:
        """The owners with rows, the most recently used first."""

    @abstractmethod
    def _history(self, owner: Owner) -> tuple[Int64Array, list[int]]:
        """The owner's latest history: its row identities, and its pages from the first on."""

    @abstractmethod
    def _owners(self) -> set[Owner]: ...

    @abstractmethod
    def _users(self) -> int: ...

    @abstractmethod
    def _rows(self) -> int: ...
