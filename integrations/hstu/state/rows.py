"""The identities of the rows of a user's state, and the digests of pages of rows.

Row i of a history depends on the events 0..i and on the time of event i + 1 (HSTU's relative time runs from there), so it is final once
that event is known: n events have n - 1 final rows. Times are absolute: a model's differences of them do not depend on their origin.
"""

from collections.abc import Iterator
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from cluster.values import FloatArray, Int64Array

DIGEST_BYTES = 16
NO_ROWS: Int64Array = np.empty((0, 3), dtype=np.int64)


def identities(items: npt.ArrayLike, times: npt.ArrayLike) -> Int64Array:
    """(item, time, time of the next event) of each final row: (n - 1, 3) for n events, times in seconds; empty without events."""
    item, time = np.asarray(items, dtype=np.int64), np.asarray(times, dtype=np.int64)
    if item.shape != time.shape or item.ndim != 1:
        raise ValueError(f"one item and one time an event, both of shape (n,), not {item.shape} and {time.shape}")
    rows = np.empty((max(0, len(item) - 1), 3), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = item[:-1], time[:-1], time[1:]
    return rows


def event_identities(items: npt.ArrayLike, times: npt.ArrayLike, actions: npt.ArrayLike, ratings: FloatArray) -> Int64Array:
    """(item, time, action and rating) of each event, (n, 3): the identities of a ranker's rows, which are final at once (see ranker.py)."""
    did = np.asarray(actions, dtype=np.int64) << 32 | ratings.astype(np.float32).view(np.uint32).astype(np.int64)
    return np.stack([np.asarray(items, dtype=np.int64), np.asarray(times, dtype=np.int64), did], axis=1)


def common_rows(a: Int64Array, b: Int64Array) -> int:
    """With how many equal rows the two begin."""
    shared = min(len(a), len(b))
    alike = a[:shared] == b[:shared]
    if alike.all():  # the usual case: one goes on where the other ends
        return shared
    return int(alike.all(axis=1).argmin())


def page_digests(rows: Int64Array, page_rows: int) -> Iterator[bytes]:
    """One digest for each whole page of rows, computed as it is asked for.

    Each takes in the one before, h_k = blake2b(h_{k-1} || rows of page k), so that equal digests mean equal rows from the first on.
    """
    digest = b""
    contiguous = np.ascontiguousarray(rows, dtype=np.int64)
    for start in range(0, len(rows) - page_rows + 1, page_rows):
        digest = blake2b(digest + contiguous[start : start + page_rows].tobytes(), digest_size=DIGEST_BYTES).digest()
        yield digest
