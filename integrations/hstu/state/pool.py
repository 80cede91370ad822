"""Memory for rows, in pages.

A page has room for `page_rows` rows of every plane. A plane's pages lie one after the other, each in one piece with the rows along the
plane's own axis, so that a page is read in few long runs and touches few pages of virtual memory.

K and V read into contiguous float32 arrays by one thread, GB/s (`python -m benchmarks.state_reads`):

    rows a page                                       16      64     128
    2 layers, 1 head, dim 50, 200 rows, float32      2.5     6.7    10.9
                                        float16      0.9     2.7     3.7
    8 layers, 8 heads, dim 64, 2048 rows, float32    3.7     9.2    10.9
                                          float16    2.6     5.1     4.9

64 is the default: twice that reads a long history 1.2 times as fast, and half a page is lost for every user.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition, Lock
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from integrations.hstu.state.half import widen

Array: TypeAlias = npt.NDArray[Any]
Allocate: TypeAlias = Callable[[tuple[int, ...], npt.DTypeLike], Array]
PAGE_ROWS = 64
HALF_MAX = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Plane:
    """One kind of row: `shape` is a single row's, rows are stacked along a new `axis`, and are stored as `dtype` (float32 or float16).

    K transposed is Plane((layers, heads, dim), axis=3): arrays (layers, heads, dim, rows).
    """

    shape: tuple[int, ...]
    axis: int
    dtype: npt.DTypeLike = np.float32

    def __post_init__(self) -> None:
        if not 0 <= self.axis <= len(self.shape):
            raise ValueError(f"axis must be within 0..{len(self.shape)} for rows of shape {self.shape}, not {self.axis}")

    def stacked(self, rows: int) -> tuple[int, ...]:
        """The shape of an array with so many rows."""
        return (*self.shape[: self.axis], rows, *self.shape[self.axis :])

    def at(self, start: int, stop: int) -> tuple[slice, ...]:
        """The index of rows start..stop-1 of an array."""
        return (*(slice(None),) * self.axis, slice(start, stop))

    def rows_in(self, shape: tuple[int, ...]) -> int:
        """How many rows an array of this shape has. Raises ValueError where it is not of this plane."""
        if len(shape) != len(self.shape) + 1 or shape != self.stacked(shape[self.axis]):
            raise ValueError(f"rows of shape {self.shape} along axis {self.axis} make {self.stacked(-1)}, -1 their count, not {shape}")
        return shape[self.axis]

    @property
    def row_bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class PagePool:
    """Pages within `budget_bytes`, handed out and taken back by number. A page is free once it was released as often as retained. What it
    holds stays in memory until other rows take the place, or `wipe` is called.

    `allocate(shape, dtype)` makes the memory, once and for the whole budget; with `numpy.empty` it takes real memory only as it is written.
    Taking, giving back and overwriting are safe from any thread; rows that are being written must not be used by another thread.
    """

    def __init__(
        self, planes: Mapping[str, Plane], *, budget_bytes: int, page_rows: int = PAGE_ROWS, allocate: Allocate = np.empty
    ) -> None:
        if page_rows < 1:
            raise ValueError(f"page_rows must be at least 1, not {page_rows}")
        self.planes, self.page_rows, self.budget_bytes = dict(planes), page_rows, budget_bytes
        self.page_bytes = page_rows * sum(plane.row_bytes for plane in planes.values())
        if not 0 < self.page_bytes <= budget_bytes:
            raise ValueError(f"{budget_bytes} bytes hold no page of {page_rows} rows ({self.page_bytes} bytes); raise budget_bytes")
        self.pages = budget_bytes // self.page_bytes
        self._arenas = {name: allocate((self.pages, *plane.stacked(page_rows)), plane.dtype) for name, plane in self.planes.items()}
        self._free = list(range(self.pages - 1, -1, -1))  # the last is the next: low numbers first, and memory that is warm
        self._references: Counter[int] = Counter()
        self._filled = [0] * self.pages  # rows of each page that were written since it was taken; behind them are earlier owners' rows
        self._stale = set[int]()  # pages that were given back with rows since they were wiped, free or taken again
        self._wiping = set[int]()  # pages that are being overwritten now
        self._lock = Lock()
        self._wiped = Condition(self._lock)

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    @property
    def used_bytes(self) -> int:
        return (self.pages - len(self._free)) * self.page_bytes

    def pages_for(self, rows: int) -> int:
        return -(-rows // self.page_rows)

    def references(self, page: int) -> int:
        return self._references[page]

    def alloc(self, count: int) -> list[int] | None:
        """Take so many pages, each with one reference; None, and none are taken, where fewer are free."""
        with self._lock:
            if count > len(self._free):
                return None
            pages = [self._free.pop() for _ in range(count)]
            self._references.update(pages)
            return pages

    def retain(self, pages: Sequence[int]) -> None:
        """Count one more reference to each page. Raises ValueError, and retains none, where a page is free."""
        with self._lock:
            self._require_references(dict.fromkeys(pages, 1), "retained")
            for page in pages:
                self._references[page] += 1

    def release(self, pages: Sequence[int]) -> int:
        """Count one reference less to each page; returns how many became free. Raises ValueError, and releases none, where one has none."""
        with self._lock:
            given = Counter(pages)
            self._require_references(given, "released")
            self._references.subtract(given)
            freed = [page for page in given if not self._references[page]]
            self._free.extend(freed)
            self._stale.update(page for page in freed if self._filled[page])
            for page in freed:
                del self._references[page]
                self._filled[page] = 0
            return len(freed)

    def wipe(self, pages: Collection[int] | None = None) -> None:
        """Overwrite the rows that earlier owners have left in these pages (default: all) with zeros, one page after the other. No lock is
        held meanwhile; rows that are new in the page that is being overwritten wait for that page alone.
        """
        with self._lock:
            left = self._stale | self._wiping if pages is None else set(pages)
        for page in left:
            with self._lock:
                self._wait_for({page})
                if page not in self._stale:  # another thread has overwritten it
                    continue
                self._stale.remove(page)
                self._wiping.add(page)
                filled = self._filled[page]
            try:
                for name, plane in self.planes.items():
                    self._arenas[name][page][plane.at(filled, self.page_rows)] = 0
            finally:
                with self._lock:
                    self._wiping.remove(page)
                    self._wiped.notify_all()

    def _wait_for(self, pages: Collection[int]) -> None:
        """Until none of the pages that are being overwritten now is so any more; the caller has the lock."""
        now = self._wiping.intersection(pages)
        self._wiped.wait_for(lambda: now.isdisjoint(self._wiping))

    def _fill(self, stops: Mapping[int, int]) -> None:
        """Page -> up to where its rows are about to be written: from now on those are not overwritten."""
        with self._lock:
            more = {page: stop for page, stop in stops.items() if stop > self._filled[page]}
            for page, stop in more.items():
                self._filled[page] = stop
            self._wait_for(more)

    def _require_references(self, wanted: Mapping[int, int], done: str) -> None:
        for page, count in wanted.items():
            if self._references[page] < count:
                raise ValueError(f"page {page} was {done} {count} times and has {self._references[page]} references")

    def rows_in(self, shapes: Mapping[str, tuple[int, ...]]) -> int:
        """How many rows arrays of these shapes have. Raises ValueError unless they are the pool's planes, all with equally many."""
        if shapes.keys() != self.planes.keys():
            raise ValueError(f"rows of the planes {sorted(self.planes)} are kept, and these are of {sorted(shapes)}")
        counts = {name: self.planes[name].rows_in(shape) for name, shape in shapes.items()}
        if len(set(counts.values())) != 1:
            raise ValueError(f"planes with different numbers of rows: {counts}")
        return next(iter(counts.values()))

    def rows_of(self, new: Mapping[str, Array]) -> int:
        """As `rows_in`, for arrays. Raises ValueError also at numbers that float16 does not hold, where rows are stored in float16."""
        for name, array in new.items():
            if name in self._arenas and self._arenas[name].dtype == np.float16 and array.size and not np.abs(array).max() <= HALF_MAX:
                raise ValueError(f"{name} has numbers beyond {HALF_MAX} or NaN, which float16 does not hold; store it as float32")
        return self.rows_in({name: array.shape for name, array in new.items()})

    def write(self, page: int, start: int, rows: Mapping[str, Array]) -> None:
        """Put rows of every plane into the page, from its row `start` on."""
        count = self.rows_of(rows)
        if not 0 <= start <= start + count <= self.page_rows:
            raise ValueError(f"rows {start}..{start + count - 1} of a page of {self.page_rows}")
        self.scatter([page], start, rows)

    def scatter(self, pages: Sequence[int], start: int, rows: Mapping[str, Array], offset: int = 0) -> None:
        """Put the rows from `offset` on, as many as there are or fit, after the first `start` rows of these pages together."""
        for name, array in rows.items():
            plane, arena = self.planes[name], self._arenas[name]
            count = min(plane.rows_in(array.shape) - offset, len(pages) * self.page_rows - start)
            runs = list(self._runs(pages, start, start + count))
            self._fill({page: inside[1] for page, inside, _ in runs})
            for page, inside, outside in runs:
                arena[page][plane.at(*inside)] = array[plane.at(outside[0] + offset, outside[1] + offset)]

    def gather(self, pages: Sequence[int], rows: int, out: Mapping[str, Array], start: int = 0) -> None:
        """Copy rows start..rows-1 of these pages together into the first rows of the arrays in `out`, in the arrays' own precision.

        Raises KeyError at a plane that is not the pool's, ValueError where the pages have fewer rows or an array has not the room.
        """
        if not 0 <= start <= rows <= len(pages) * self.page_rows:
            raise ValueError(f"rows {start}..{rows - 1} of {len(pages)} pages of {self.page_rows}")
        for name, array in out.items():
            plane, arena = self.planes[name], self._arenas[name]
            if plane.rows_in(array.shape) < rows - start:
                raise ValueError(f"{rows - start} rows into an array for {plane.rows_in(array.shape)} ({name} {array.shape})")
            wide = np.empty(arena.shape[1:], np.float32) if arena.dtype == np.float16 and array.dtype == np.float32 else None
            for page, inside, outside in self._runs(pages, start, rows):
                source = arena[page]
                if wide is not None and 2 * (inside[1] - inside[0]) >= self.page_rows:  # of few rows, not the whole page
                    widen(source, wide)
                    source = wide
                array[plane.at(*outside)] = source[plane.at(*inside)]

    def view(self, name: str, page: int) -> Array:
        """The memory of a page of a plane, all `page_rows` rows, in one piece."""
        page_of_plane: Array = self._arenas[name][page]
        return page_of_plane

    def copy(self, source: int, target: int, rows: int) -> None:
        """Copy the first rows of one page to another."""
        self._fill({target: rows})
        for name, plane in self.planes.items():
            self._arenas[name][target][plane.at(0, rows)] = self._arenas[name][source][plane.at(0, rows)]

    def _runs(self, pages: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
        """For each page that has some of the rows start..stop-1: the page, where they are in it, and where they are from `start` on."""
        for at in range(start // self.page_rows, self.pages_for(stop)):
            first = at * self.page_rows
            low, high = max(start, first), min(stop, first + self.page_rows)
            if low < high:
                yield pages[at], (low - first, high - first), (low - start, high - start)
