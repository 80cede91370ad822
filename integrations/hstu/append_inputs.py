"""The inputs of the append computation: users in groups of like length, and their kept rows side by side in memory that is used again.

Shapes as in model.HSTU.append: B users, S new rows, P kept rows.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cluster.engines.buffers import BufferPool
from cluster.values import Int64Array
from integrations.hstu.config import HSTUConfig
from integrations.hstu.state.store import Held
from integrations.hstu.user_behavior_schema import BehaviourBatch

Arrays: TypeAlias = dict[str, Any]
NEW_ROWS = ("items", "times", "next_times")
PAST_ROWS = {"past_times": 1, "past_kt": 4, "past_v": 3}
"""The inputs with kept rows, and the axis of the rows."""
GROUP_BYTES = 128 << 20
"""The most bytes that the kept rows of one group take, padding included, unless a single user's take more."""
GROUP_BYTES_ON_GPU = 2 << 30
"""The same on a GPU, where a group need not fit into a cache, and a batch takes the time of one user."""
_FEW_NEW, _FEW_KEPT = 8, 64
Size: TypeAlias = Callable[[int], int]


def _as_it_is(size: int) -> int:
    return size


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that an engine takes: what B, S and P are padded to, and how many users and new rows it takes at once.

    New rows beyond `most_new` are appended in steps, and a group with more than `most_padded` is not padded. `most_bytes`: of the kept rows
    of a group; `most_pairs`: of a new row and a row that it looks at, of several users together. The default is an engine that takes any
    shape.
    """

    users: Size = _as_it_is
    new: Size = _as_it_is
    past: Size = _as_it_is
    most_users: int = sys.maxsize
    most_new: int = sys.maxsize
    most_padded: int = sys.maxsize
    most_bytes: int = GROUP_BYTES
    most_pairs: int = sys.maxsize


@dataclass(frozen=True, eq=False)
class AppendRequest:
    """One user of a batch: `index` among its requests, what is held of the history's final `rows`, and how many events the history has."""

    index: int
    held: Held
    rows: Int64Array
    length: int

    @property
    def kept(self) -> int:
        return self.held.rows

    @property
    def new(self) -> int:
        """Rows to encode, at least one: the last row of a history is never final."""
        return self.length - self.kept


def groups(users: Iterable[AppendRequest], row_bytes: int, shapes: Shapes | None = None) -> Iterator[list[AppendRequest]]:
    """The users in groups. Within a group the numbers of new rows, and of kept rows, differ by less than a factor of two, or are small."""
    shapes = shapes or Shapes()
    alike: dict[tuple[int, int], list[AppendRequest]] = {}
    for user in users:
        alike.setdefault((max(user.new, _FEW_NEW).bit_length(), max(user.kept, _FEW_KEPT).bit_length()), []).append(user)
    for group in alike.values():
        at_once = _at_once(group, row_bytes, shapes)
        yield from (group[start : start + at_once] for start in range(0, len(group), at_once))


def _at_once(group: Sequence[AppendRequest], row_bytes: int, shapes: Shapes) -> int:
    """How many of the users are computed together."""
    kept, new = _most_rows(group, shapes), min(max(user.new for user in group), shapes.most_new)
    most = min(len(group), shapes.most_users, max(1, shapes.most_bytes // (row_bytes * max(1, kept))))
    padded = shapes if new <= shapes.most_padded else Shapes()
    pairs = padded.new(new) * (padded.new(new) + padded.past(kept))
    return next((users for users in range(most, 1, -1) if padded.users(users) * pairs <= shapes.most_pairs), 1)


def _most_rows(group: Sequence[AppendRequest], shapes: Shapes) -> int:
    """How many kept rows of a user there must be room for. In an append in steps, the rows of one step are kept rows to the next."""
    steps = max(user.new for user in group) > shapes.most_new
    return max(user.length if steps else user.kept for user in group)


class AppendInputs:
    """Assembles the inputs of a group, for one thread: the kept rows lie in memory that the next call uses again."""

    def __init__(self, config: HSTUConfig, pool: BufferPool | None = None, shapes: Shapes | None = None) -> None:
        self._config, self._pool, self.shapes = config, pool or BufferPool(), shapes or Shapes()

    def clear(self) -> None:
        """Free the memory of the last inputs."""
        self._pool.clear()

    def statistics(self) -> dict[str, float]:
        """How often the memory was there, and its bytes: see BufferPool."""
        return self._pool.statistics()

    def of(self, group: Sequence[AppendRequest], batch: BehaviourBatch) -> Arrays:
        """All eight inputs by name, right-padded; past_kt and past_v are valid until the next call. A user that pads has one new row."""
        most = max(user.new for user in group)
        shapes = self.shapes if most <= self.shapes.most_padded else Shapes()
        shape, past = (shapes.users(len(group)), shapes.new(most)), shapes.past(_most_rows(group, shapes))
        kept, lengths = np.zeros(shape[0], np.int64), np.ones(shape[0], np.int64)
        kept[: len(group)], lengths[: len(group)] = [user.kept for user in group], [user.new for user in group]
        new = {name: _new_rows(getattr(batch, name), group, shape) for name in NEW_ROWS}
        past_times = np.zeros((shape[0], past), batch.times.dtype)
        known = batch.times[[user.index for user in group], :past]
        past_times[: len(group), : known.shape[1]] = known
        return {**new, "lengths": lengths, "past_times": past_times, "past_lengths": kept, **self._past(group, shape[0], past)}

    def _past(self, group: Sequence[AppendRequest], users: int, past: int) -> Arrays:
        kt, v = kept_side_by_side(self._pool, self._config, users, past)
        kt[:, len(group) :] = 0  # what was left there may be anything: a mask of -1e4 does not silence a NaN
        v[:, len(group) :] = 0
        for column, user in enumerate(group):
            kt[:, column, :, :, user.kept :] = 0
            v[:, column, :, user.kept :] = 0
            user.held.read({"kt": kt[:, column], "v": v[:, column]})
        return {"past_kt": kt, "past_v": v}


def most_users_at_once(batches: Sequence[int], user_bytes: int) -> int:
    """The largest of the ascending batch sizes for which the kept rows of the longest histories fit on a GPU, or the first."""
    return max((batch for batch in batches if batch * user_bytes <= GROUP_BYTES_ON_GPU), default=batches[0])


def kept_side_by_side(pool: BufferPool, config: HSTUConfig, users: int, past: int) -> tuple[Any, Any]:
    """Arrays in the pool's memory for K^T and V of `past` kept rows of each user."""
    kt = pool.array("past_kt", (config.layers, users, config.heads, config.attention_dim, past))
    return kt, pool.array("past_v", (config.layers, users, config.heads, past, config.linear_dim))


def in_steps(run: Callable[[Arrays], Arrays], inputs: Arrays, shapes: Shapes) -> Arrays:
    """The outputs of `run`, called with at most `most_new` new rows at a time, and with the kept rows that there are by then. Each step's
    rows are written into the inputs' kept rows.
    """
    count, lengths, kept, most_new = inputs["items"].shape[1], inputs["lengths"], inputs["past_lengths"], shapes.most_new
    if count <= most_new:
        return run(inputs)
    parts = []
    for start in range(0, count, most_new):
        new = {name: inputs[name][:, start : start + most_new].copy() for name in NEW_ROWS}  # what is compiled depends on strides
        firsts, left = kept + np.minimum(lengths, start), np.clip(lengths - start, 0, most_new)
        past = {name: _first_rows(inputs[name], axis, shapes.past(int(firsts.max()))) for name, axis in PAST_ROWS.items()}
        made = run({**inputs, **new, **past, "lengths": np.maximum(left, 1), "past_lengths": firsts})
        for user, (first, rows) in enumerate(zip(firsts.tolist(), left.tolist(), strict=True)):
            inputs["past_kt"][:, user, :, :, first : first + rows] = made["kt"][:, user, :, :, :rows]
            inputs["past_v"][:, user, :, first : first + rows] = made["v"][:, user, :, :rows]
        parts.append(made)
    return {name: _joined([part[name] for part in parts], axis) for name, axis in {"states": 1, "kt": 4, "v": 3}.items()}


def _first_rows(rows: Any, axis: int, count: int) -> Any:
    """The first rows along the axis, of an array or a tensor, in one piece and with the strides of that."""
    if rows.shape[axis] <= count:
        return rows
    first = rows[(slice(None),) * axis + (slice(count),)]
    if isinstance(first, np.ndarray):
        return first.copy()
    import torch  # noqa: PLC0415 - as below

    return first.clone(memory_format=torch.contiguous_format)


def _joined(parts: Sequence[Any], axis: int) -> Any:
    """The arrays concatenated; or tensors, where the engine's memory is not the host's."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis)
    import torch  # noqa: PLC0415 - loaded where there are tensors

    return torch.cat(tuple(parts), axis)


def _new_rows(column: Any, group: Sequence[AppendRequest], shape: tuple[int, int]) -> Any:
    """Rows kept..length-1 of each user, (B, S), zeros where there are fewer."""
    out = np.zeros(shape, column.dtype)
    for row, user in enumerate(group):
        out[row, : user.new] = column[user.index, user.kept : user.length]
    return out
