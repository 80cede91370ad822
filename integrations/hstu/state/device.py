"""Tensors of recent users on the accelerator, over a store of all users in host memory.

    match   rows on the device -> nothing to copy;  rows in the host's pages -> read on a side stream, whole pages at a time
    commit  new rows -> behind the user's tensors, at once;  and -> pinned memory -> the host's store, by a thread, once they are there;
            rows of a user that the host knows go there once they begin another page

Within the byte budget the least recently used user that no request holds makes room; a user that finds none is computed, and not kept.
Memory that a GPU reads by itself is pinned: PagedStates(PagePool(planes, budget_bytes=..., allocate=pinned)). torch is imported when used.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeAlias

from cluster.values import Int64Array
from integrations.hstu.state.copies import SideCopies, require
from integrations.hstu.state.device_users import DeviceUser, DeviceUsers
from integrations.hstu.state.pool import Plane
from integrations.hstu.state.pooled import PooledHeld, PooledStates
from integrations.hstu.state.rows import common_rows
from integrations.hstu.state.store import Held, Owner, Rows, StateStatistics, StateStore

if TYPE_CHECKING:
    import torch

Tensors: TypeAlias = "Mapping[str, torch.Tensor]"
_LOG = logging.getLogger(__name__)
IN_FLIGHT_BYTES = 1 << 30  # rows on their way to the host; a history's rows beyond that go with its next commit


class DeviceHeld:
    """The kept beginning of one history, as tensors. `host` is the same history's beginning in host memory, perhaps of fewer rows."""

    __slots__ = ("host", "owner", "ready", "released", "rows", "tier", "user", "written")

    def __init__(self, tier: "DeviceTier", host: PooledHeld, user: DeviceUser, rows: int, ready: Any) -> None:
        self.tier, self.host, self.user, self.rows, self.ready = tier, host, user, rows, ready
        self.owner = host.owner
        self.released = self.written = False  # written: rows are on their way to the host

    def planes(self, start: int = 0, stop: int | None = None) -> dict[str, "torch.Tensor"]:
        """Rows start..stop-1 (default: all held) of every plane, not copied: the current stream may read them until they are released."""
        last = self.rows if stop is None else stop
        if self.released or not 0 <= start <= last <= self.rows:
            raise ValueError(f"rows {start}..{last - 1} of {self.rows} rows of {self.owner}{', which were released' * self.released}")
        self.tier.copies.wait(self.user.ready)
        return self.user.rows_from(start, last)

    def read(self, out: Rows, start: int = 0, stop: int | None = None) -> None:
        """Copy rows start..stop-1 (default: all) into `out`: plane -> tensor on any device, or array."""
        import torch  # noqa: PLC0415

        planes = self.planes(start, stop)
        for name, array in out.items():
            axis = self.tier.users.planes[name].axis
            torch.as_tensor(array).narrow(axis, 0, planes[name].shape[axis]).copy_(planes[name])


class DeviceTier(StateStore):
    """A StateStore of tensors. `store` keeps the rows that have no room on the device, or were evicted from it.

    Computation is asked for by one thread, on its current stream; `forget`, `clear` and `statistics` may come from any.
    Raises BackendUnavailable where the device is not there.
    """

    def __init__(self, store: PooledStates, device: str, budget_bytes: int, *, in_flight_bytes: int = IN_FLIGHT_BYTES) -> None:
        self.store, self.device = store, require(device)
        self.copies = SideCopies(self.device)
        self.users = DeviceUsers(store.pool, self.device, budget_bytes)
        self._in_flight_bytes = in_flight_bytes
        self._lock = RLock()
        self._thread = ThreadPoolExecutor(1, "state-write-back")
        self._pending: deque[tuple[Future[None], int, Owner]] = deque()
        self._said = set[str]()
        self._held = 0

    @property
    def planes(self) -> Mapping[str, Plane]:
        return self.store.planes

    def match(self, owner: Owner, rows: Int64Array) -> DeviceHeld:
        with self._lock:
            self._reap()
            host = self.store.match(owner, rows)
            try:
                user, common, ready = self._on_device(owner, rows, host)
            except BaseException:  # as where the device is full
                self.users.drop(owner)
                self.store.release(host)
                raise
            self.users.hold(user)
            self.users.count(common, len(rows))
            self._held += 1
            return DeviceHeld(self, host, user, common, ready)

    def _on_device(self, owner: Owner, rows: Int64Array, host: PooledHeld) -> tuple[DeviceUser, int, Any]:
        """The user, how many of these rows are on the device, and the event after which rows that had to be loaded are there."""
        user = self.users.get(owner)
        common = common_rows(user.identities, rows) if user else 0
        if user is not None and common >= host.rows:
            return user, common, None
        del user  # unless it is held elsewhere, its memory is free before that of the new one is taken
        user = self.users.make(owner, rows[: host.rows], len(rows) + 1)
        return user, host.rows, self._load(user, host)

    def _load(self, user: DeviceUser, host: PooledHeld) -> Any:
        with self.copies.stream():
            for name in user.tensors:
                self.copies.keep(user.tensors[name])
                self.users.load(user, name, host.pages, host.rows)
        user.ready = self.copies.mark()
        return user.ready

    def commit(self, held: Held, rows: Int64Array, start: int, new: Rows) -> None:
        """Keep the history `rows`. `new`: rows start..len(rows)-1 of every plane, as tensors on the device or what becomes one; start is at
        most held.rows.
        """
        mine, tensors = self._mine(held), self.users.tensors(new)
        given = self.users.rows_of(tensors)
        if not 0 <= start <= mine.rows or given != len(rows) - start:
            raise ValueError(f"{given} rows were given as rows {start}..{len(rows) - 1}, behind {mine.rows} that are held")
        with self._lock:
            if mine.host.forgotten:  # erased while it was encoded: it must not come back
                return
            self.copies.wait(mine.user.ready)
            common = common_rows(mine.user.identities, rows)
            if common >= start:
                self._append(mine, rows, common, tensors, start)
                pages_for, behind = self.store.pool.pages_for, mine.host.rows
                if not behind or not mine.user.kept or pages_for(behind) < pages_for(len(rows)):
                    mine.written |= self._write_back(mine.user, mine.host, rows)

    def _append(self, mine: DeviceHeld, rows: Int64Array, common: int, new: Tensors, start: int) -> None:
        if common == len(rows):
            return
        edited = common < len(mine.user.identities)
        if len(rows) > mine.user.capacity or (edited and mine.user.holders > 1):
            mine.user = self.users.replace(mine.user, common, len(rows) + 1)
        mine.user.write(common, {name: self.users.narrow(name, tensor, common - start) for name, tensor in new.items()})
        mine.user.identities = rows.copy()

    def _write_back(self, user: DeviceUser, host: PooledHeld, rows: Int64Array) -> bool:
        """Start to copy the rows that the host lacks to it, unless they are too many. They are copied on the device first, as the user's
        tensors go on changing. Returns whether they are on their way.
        """
        start = host.rows
        if start == len(rows):
            return False
        parts = user.rows_from(start, len(rows))
        size = sum(part.nbytes for part in parts.values())
        if size + sum(sizes for _, sizes, _ in self._pending) > self._in_flight_bytes:
            self.users.counts["rejected"] += 1
            return False
        parts = {name: part.clone() for name, part in parts.items()}
        with self.copies.stream():
            staged = {name: self.copies.staging(part, self.users.host_dtype(name)) for name, part in parts.items()}
            for name, part in parts.items():
                staged[name].copy_(self.copies.keep(part), non_blocking=True)
        self._submit(size, host.owner, self._commit_host, self.copies.mark(), host, rows.copy(), staged)
        return True

    def _commit_host(self, done: Any, host: PooledHeld, rows: Int64Array, staged: Tensors) -> None:
        if done is not None:
            done.synchronize()
        self.store.commit(host, rows, host.rows, {name: tensor.numpy() for name, tensor in staged.items()})

    def release(self, held: Held) -> None:
        with self._lock:
            mine = self._mine(held)
            mine.released = True
            self._held -= 1
            self.users.let_go(mine.user)
            if mine.written or mine.ready is not None:
                self._submit(0, mine.owner, self._release_host, mine.ready, mine.host)
                return
        self.store.release(mine.host)

    def _release_host(self, read: Any, host: PooledHeld) -> None:
        """After the commit, since one thread does both in order, and after the pages were read."""
        if read is not None:
            read.synchronize()
        self.store.release(host)

    def _reap(self) -> None:
        """Drop finished copies to the host from the list. The user of one that failed is forgotten; each kind of error is logged once."""
        while self._pending and self._pending[0][0].done():
            copied, _, owner = self._pending.popleft()
            if (error := copied.exception()) is None:
                continue
            self._drop(owner)
            self.users.counts["rejected"] += 1
            if (kind := type(error).__name__) not in self._said:
                self._said.add(kind)
                _LOG.error("a user's rows did not reach host memory, and are computed anew (said once for %s)", kind, exc_info=error)

    def _submit(self, size: int, owner: Owner, work: Callable[..., None], *arguments: Any) -> None:
        self._pending.append((self._thread.submit(work, *arguments), size, owner))

    def _drain(self) -> None:
        """As `flush`, but a copy that failed costs its own user alone."""
        while pending := [copied for copied, *_ in tuple(self._pending)]:
            wait(pending)
            with self._lock:
                self._reap()

    def flush(self) -> None:
        """Wait until the host's store has all rows that were committed and released so far. Raises the error of a copy that failed."""
        while True:
            with self._lock:
                if not self._pending:
                    return
                oldest, *_ = self._pending.popleft()
            oldest.result()

    def close(self) -> None:
        """`flush`, and give the device's memory back; the host's store stays."""
        try:
            self.flush()
        finally:
            self._thread.shutdown()
            self.users.clear()

    def _forget(self, owners: Callable[[], Collection[Owner]]) -> int:
        with self._lock:
            dropped = sum(map(self._drop, owners()))
            self._reap()
        self.store.pool.wipe()  # others may have the lock meanwhile
        return dropped

    def _drop(self, owner: Owner) -> int:
        return max(self.store.drop(owner), self.users.drop(owner))

    def owners(self) -> set[Owner]:
        return self.store.owners().union(self.users.owners())

    def kept_rows(self, owner: Owner) -> int:
        user = self.users.get(owner)  # without the lock, which a match has while a user's rows go to the device
        return self.store.kept_rows(owner) if user is None else len(user.identities)

    def hottest(self) -> list[Owner]:
        """The owners in the host's store, which knows all users, the most recently used first."""
        self._drain()
        return self.store.hottest()

    def copy(self, owner: Owner) -> tuple[Int64Array, Rows]:
        """The row identities and rows of the owner's latest history in the host's store, once it has those of the device."""
        with self._lock:
            if (user := self.users.get(owner)) is not None:
                host = self.store.match(owner, user.identities)
                self._write_back(user, host, user.identities)
                self._submit(0, owner, self._release_host, None, host)
        self._drain()
        return self.store.copy(owner)

    def adopt(self, owner: Owner, rows: Int64Array, new: Rows) -> int:
        """Keep another store's history in the host's store; the device gets the rows with the user's next request. Returns its bytes."""
        return self.store.adopt(owner, rows, new)

    def statistics(self) -> StateStatistics:
        """Users and rows of the device and the host, each counted once, and what became of both: `evictions` and `rejected` count the
        users that made or found no room on the device; `rejected` also rows that were too many to go to the host at once, or failed to.
        Pages and bytes, but for `device_bytes`, are those of the host's store.
        """
        with self._lock:
            host, counts = self.store.statistics(self.users.rows()), self.users.counts
            return replace(
                host,
                held=self._held,
                evictions=host.evictions + counts["evictions"],
                rejected=host.rejected + counts["rejected"],
                device_bytes=self.users.used_bytes,
                **{name: counts[name] for name in ("hits", "misses", "hit_rows", "asked_rows")},
            )

    def _mine(self, held: Held) -> DeviceHeld:
        if not isinstance(held, DeviceHeld) or held.released or held.tier is not self:
            raise ValueError(f"{held} is not held here; it was released, or is another store's")
        return held
