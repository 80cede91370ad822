"""What the append computation is given: users in groups that pad each other little, and their kept rows side by side in reused memory.

Shapes as in model.HSTU.append: B users, S new rows, P kept rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from cluster.engines.buffers import BufferPool
from cluster.values import Int64Array
from integrations.hstu.config import HSTUConfig
from integrations.hstu.state.store import Held
from integrations.hstu.user_behavior_schema import BehaviourBatch

Arrays: TypeAlias = dict[str, Any]
GROUP_BYTES = 128 << 20
"""The most that the kept rows of one group take, padding included, unless a single user's take more."""
_FEW_NEW, _FEW_KEPT = 8, 64


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


def groups(users: Iterable[AppendRequest], row_bytes: int) -> Iterator[list[AppendRequest]]:
    """The users in groups within which new rows, and kept rows, differ by less than a factor of two (or are few anyway)."""
    alike: dict[tuple[int, int], list[AppendRequest]] = {}
    for user in users:
        alike.setdefault((max(user.new, _FEW_NEW).bit_length(), max(user.kept, _FEW_KEPT).bit_length()), []).append(user)
    for group in alike.values():
        at_once = max(1, GROUP_BYTES // (row_bytes * max(1, *(user.kept for user in group), 1)))
        yield from (group[start : start + at_once] for start in range(0, len(group), at_once))


class AppendInputs:
    """Assembles the inputs of a group. The kept rows lie in memory that the next call uses again: not for two threads."""

    def __init__(self, config: HSTUConfig, pool: BufferPool | None = None) -> None:
        self._config, self._pool = config, pool or BufferPool()

    def clear(self) -> None:
        """Let go of the rows that were last put side by side."""
        self._pool.clear()

    def of(self, group: Sequence[AppendRequest], batch: BehaviourBatch) -> Arrays:
        """All eight inputs by name, right-padded; past_kt and past_v are valid until the next call."""
        kept = np.array([user.kept for user in group], np.int64)
        lengths = np.array([user.new for user in group], np.int64)
        new = {name: _padded(getattr(batch, name), group, lengths) for name in ("items", "times", "next_times")}
        past_times = batch.times[[user.index for user in group], : int(kept.max())]
        return {**new, "lengths": lengths, "past_times": past_times, "past_lengths": kept, **self._past(group, int(kept.max()))}

    def _past(self, group: Sequence[AppendRequest], past: int) -> Arrays:
        config = self._config
        kt = self._pool.array("past_kt", (config.layers, len(group), config.heads, config.attention_dim, past))
        v = self._pool.array("past_v", (config.layers, len(group), config.heads, past, config.linear_dim))
        for column, user in enumerate(group):
            kt[:, column, :, :, user.kept :] = 0  # what was left there may be anything: a mask of -1e4 does not silence a NaN
            v[:, column, :, user.kept :] = 0
            user.held.read({"kt": kt[:, column], "v": v[:, column]})
        return {"past_kt": kt, "past_v": v}


def _padded(column: Any, group: Sequence[AppendRequest], lengths: Int64Array) -> Any:
    """Rows kept..length-1 of each user, (B, S), zeros where there are fewer."""
    out = np.zeros((len(group), int(lengths.max())), column.dtype)
    for row, user in enumerate(group):
        out[row, : user.new] = column[user.index, user.kept : user.length]
    return out
