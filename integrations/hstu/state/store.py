"""The interface of a store of users' rows, and its statistics."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from cluster.values import Int64Array

if TYPE_CHECKING:
    from integrations.hstu.state.pool import Plane

Rows: TypeAlias = Mapping[str, npt.NDArray[np.floating[Any]]]
"""Plane's name -> an array of its rows, stacked along the plane's axis."""


class Owner(NamedTuple):
    """The owner of rows. `namespace`: of one model and tenant, "{model hash}/{tenant}"; rows are never read across namespaces."""

    namespace: str
    user: str


@dataclass(frozen=True, slots=True)
class StateStatistics:
    """What a store holds now (`users`, `rows`, `pages`, bytes, `held`) and has done since it was made.

    `hits`, `misses`: matches with and without a kept row; `hit_rows` of `asked_rows` were kept. `evictions`: users (tree: leaves) given up
    for others; `rejected`: commits that did not wholly find room, or that go on from rows no longer kept; `forgotten`: users forgotten;
    `adopted`: histories taken over from another store. `used_bytes` counts forgotten pages too while they are still read. `device_bytes`:
    the memory of an accelerator that rows take, which is not among `used_bytes`, as nothing is adopted there.
    """

    users: int
    rows: int
    held: int
    pages: int
    used_bytes: int
    budget_bytes: int
    hits: int = 0
    misses: int = 0
    hit_rows: int = 0
    asked_rows: int = 0
    commits: int = 0
    evictions: int = 0
    rejected: int = 0
    forgotten: int = 0
    adopted: int = 0
    device_bytes: int = 0


class Held(Protocol):
    """The kept beginning of one history, safe from eviction until it is released."""

    @property
    def owner(self) -> Owner: ...

    @property
    def rows(self) -> int:
        """How many rows of the history are kept: rows 0..rows-1 can be read."""
        ...

    def read(self, out: Rows, start: int = 0, stop: int | None = None) -> None:
        """Copy rows start..stop-1 (default: all) of the planes named in `out` into the first rows of its arrays, which may be longer.

        Raises KeyError at an unknown plane, ValueError where the rows are not held, do not fit, or were released.
        """
        ...


class StateStore(Protocol):
    """Keeps rows by owner. Every method may be called from any thread."""

    @property
    def planes(self) -> Mapping[str, "Plane"]:
        """The planes of a row, as they are stored."""
        ...

    def match(self, owner: Owner, rows: Int64Array) -> Held:
        """The longest kept beginning of a history with these row identities (n - 1, 3), to be released even where nothing was kept."""
        ...

    def commit(self, held: Held, rows: Int64Array, start: int, new: Rows) -> None:
        """Keep the history `rows`; `new` has rows start..len(rows)-1 of every plane, and start is at most held.rows.

        Rows that do not fit, once all that no request holds is evicted, are left out from the end; so are all rows where the owner was
        forgotten since the match. Neither is an error. Raises ValueError at arrays that do not have these rows, or a released `held`.
        """
        ...

    def release(self, held: Held) -> None:
        """Let the rows be evicted again. Raises ValueError where they were released before."""
        ...

    @contextmanager
    def matched(self, owner: Owner, rows: Int64Array) -> Iterator[Held]:
        """`match` that releases at the end of the block."""
        held = self.match(owner, rows)
        try:
            yield held
        finally:
            self.release(held)

    def forget(self, owner: Owner) -> int:
        """Drop all rows of the owner; returns how many were kept. Rows in host memory, also of owners evicted earlier, are overwritten;
        held ones are freed and overwritten once their last holder releases them.
        """
        return self._forget(lambda: [owner])

    def forget_namespace(self, namespace: str) -> int:
        """As `forget`, for all owners of the namespace."""
        return self._forget(lambda: [owner for owner in self.owners() if owner.namespace == namespace])

    def clear(self) -> int:
        """As `forget`, for all owners."""
        return self._forget(self.owners)

    def owners(self) -> Collection[Owner]:
        """The owners with rows, or about to have some: a new user that is being encoded has none yet."""
        ...

    def _forget(self, owners: Callable[[], Collection[Owner]]) -> int:
        """`forget` the owners that the function gives, which is called under the store's lock."""
        ...

    def kept_rows(self, owner: Owner) -> int:
        """How many rows are kept of the owner's latest history, about: it waits for no other thread, and where one is at work in the store
        it may be 0.
        """
        ...

    def hottest(self) -> list[Owner]:
        """The owners with a history that can be copied, the most recently used first."""
        ...

    def copy(self, owner: Owner) -> tuple[Int64Array, Rows]:
        """The row identities of the owner's latest history, and a copy of its rows as they are stored; none where nothing is kept."""
        ...

    def adopt(self, owner: Owner, rows: Int64Array, new: Rows) -> int:
        """Keep a history that another store has kept of the owner, where it goes on from the rows kept here; returns the bytes that it
        takes. `new`: all rows of the history. No look-up is counted. Raises ValueError at arrays that do not have these rows.
        """
        ...

    def statistics(self) -> StateStatistics: ...
