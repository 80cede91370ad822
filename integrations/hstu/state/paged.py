"""A page table for each user: the latest history of each, the least recently used user given up for others.

A history is compared with the kept one row by row. That is exact, costs 24 bytes a row beside the hundreds or thousands of its K and V, and
takes 4 us for 2,048 rows, where digests of their pages take 78 us; so after an edit or a cut inside a page, the rows before it stay kept.
"""

from cluster.values import Int64Array
from integrations.hstu.state.lru_list import Link, LruList
from integrations.hstu.state.pool import PagePool
from integrations.hstu.state.pooled import PooledHeld, PooledStates
from integrations.hstu.state.rows import NO_ROWS, common_rows
from integrations.hstu.state.store import Owner, Rows


class UserPages(Link):
    """One user's rows: their identities, and their pages in order. A user is in the LRU list while no request holds it."""

    __slots__ = ("dropped", "holders", "identities", "owner", "pages")

    def __init__(self, owner: Owner) -> None:
        super().__init__()
        self.owner = owner
        self.identities = NO_ROWS
        self.pages: list[int] = []
        self.holders = 0
        self.dropped = False


class PagedStates(PooledStates):
    """A StateStore with one history a user. A user that is held is not evicted."""

    def __init__(self, pool: PagePool) -> None:
        super().__init__(pool)
        self._tables: dict[Owner, UserPages] = {}
        self._idle: LruList[UserPages] = LruList()
        self._kept_rows = self._kept_users = 0

    def _find(self, owner: Owner, rows: Int64Array) -> PooledHeld:
        user = self._tables.setdefault(owner, UserPages(owner))
        if user.linked:
            self._idle.remove(user)
        user.holders += 1
        common = common_rows(user.identities, rows)
        return PooledHeld(self.pool, owner, common, user.pages[: self.pool.pages_for(common)], user)

    def _let_go(self, held: PooledHeld) -> None:
        user: UserPages = held.anchor
        user.holders -= 1
        if user.holders or user.dropped:
            return
        if user.pages:
            self._idle.push(user)
        else:
            del self._tables[user.owner]

    def _keep(self, held: PooledHeld, rows: Int64Array, start: int, new: Rows) -> bool:
        user: UserPages = held.anchor
        common = common_rows(user.identities, rows)
        if common == len(rows):  # all of it is there, perhaps with more behind it: an older request came late
            return True
        if common < start:  # another holder committed a different history in the meantime
            return False
        if common < len(user.identities) and (common := self._cut(user, common)) < start:
            return False
        user.pages += self._room(self.pool.pages_for(len(rows)) - len(user.pages))
        kept = min(len(rows), len(user.pages) * self.pool.page_rows)
        self.pool.scatter(user.pages, common, new, common - start)
        self._set(user, rows[:kept].copy())
        return kept == len(rows)

    def _cut(self, user: UserPages, common: int) -> int:
        """Keep only the first `common` rows, so that others can follow; fewer where the last page is being read, and none is free for a
        copy.
        """
        whole, part = divmod(common, self.pool.page_rows)
        last = user.pages[whole : whole + 1] if part else []
        self.pool.release(user.pages[whole + len(last) :])
        del user.pages[whole + len(last) :]
        if last and self.pool.references(last[0]) > 1:
            copy = self._room(1)
            for page in copy:
                self.pool.copy(last[0], page, part)
            self.pool.release(last)
            user.pages[whole:] = copy
        self._set(user, user.identities[: min(common, len(user.pages) * self.pool.page_rows)])
        return len(user.identities)

    def _set(self, user: UserPages, identities: Int64Array) -> None:
        self._kept_rows += len(identities) - len(user.identities)
        self._kept_users += bool(len(identities)) - bool(len(user.identities))
        user.identities = identities

    def _evict(self) -> bool:
        user = self._idle.pop()
        if user is not None:
            self._drop(user.owner)
        return user is not None

    def _drop(self, owner: Owner) -> int:
        user = self._tables.pop(owner, None)
        if user is None:
            return 0
        if user.linked:
            self._idle.remove(user)
        user.dropped = True
        count = len(user.identities)
        self._set(user, NO_ROWS)
        self.pool.release(user.pages)
        user.pages = []
        return count

    def _has(self, owner: Owner) -> bool:
        return bool(self._tables.get(owner, UserPages(owner)).pages)

    def _latest(self) -> list[Owner]:
        held = [user.owner for user in self._tables.values() if user.holders and user.pages]
        return held + [user.owner for user in self._idle][::-1]

    def _history(self, owner: Owner) -> tuple[Int64Array, list[int]]:
        user = self._tables.get(owner, UserPages(owner))
        return user.identities, list(user.pages)

    def _owners(self) -> set[Owner]:
        return set(self._tables)

    def _users(self) -> int:
        return self._kept_users

    def _rows(self) -> int:
        return self._kept_rows
