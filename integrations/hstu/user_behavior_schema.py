"""Typed user behaviour as arrays: sequences of events -> a padded batch -> tensors.

Shapes: B users, L events of the longest history in the batch. Rows are right-padded: a causal model never looks at what follows.
Times are int32 seconds before the request (<= 0), so that an engine needs no 64-bit arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from cluster.engines.buffers import BufferPool
from cluster.values import FloatArray, Int8Array, Int32Array, Int64Array, UserSequence
from cluster.window import Window

if TYPE_CHECKING:
    import torch

_OLDEST = np.iinfo(np.int32).min + 1


@dataclass(frozen=True, eq=False)
class BehaviourBatch:
    """A batch of histories, oldest event first.

    `items` (B, L): catalogue indices, 0 where padded. `times` (B, L). `next_times` (B, L): when the following event happened, which for
    a user's last row is the request itself, hence 0. `actions` (B, L): `Action.code`. `values` (B, L): NaN where there is none.
    `lengths` (B,).
    """

    items: Int64Array
    times: Int32Array
    next_times: Int32Array
    lengths: Int64Array
    actions: Int8Array
    values: FloatArray

    def __len__(self) -> int:
        return len(self.lengths)

    def take(self, rows: Sequence[int], shortest: int = 1) -> "BehaviourBatch":
        """The batch of these users in this order, cut to the length of the longest of them, but to no less than `shortest`."""
        lengths = self.lengths[rows]
        longest = max(shortest, int(lengths.max(initial=0)))
        columns = {name: getattr(self, name)[rows, :longest] for name in ("items", "times", "next_times", "actions", "values")}
        return BehaviourBatch(**columns, lengths=lengths)

    def tensors(self) -> "dict[str, torch.Tensor]":
        """The arrays by name as tensors that share their memory."""
        import torch  # noqa: PLC0415 - the schema also serves engines that run without torch

        return {field.name: torch.from_numpy(getattr(self, field.name)) for field in fields(self)}


def collate(
    sequences: Sequence[UserSequence],
    max_history: int,
    *,
    step: int = 1,
    shortest: int = 1,
    pad_to: int | None = None,
    pool: BufferPool | None = None,
) -> BehaviourBatch:
    """Each user's latest events as a batch, as long as the longest of them and at least `shortest`, or `pad_to`. A batch in memory of
    `pool` is valid until the next one.

    The events are the latest `max_history`, or those in a window that moves by `step` events.
    """
    window = Window(max_history, step)
    lengths = np.array([len(sequence) - window.start(len(sequence)) for sequence in sequences], dtype=np.int64)
    shape = len(sequences), pad_to or max(shortest, int(lengths.max(initial=0)))
    memory = pool or BufferPool()
    batch = BehaviourBatch(
        items=memory.zeros("items", shape, np.int64),
        times=memory.zeros("times", shape, np.int32),
        next_times=memory.zeros("next_times", shape, np.int32),
        lengths=lengths,
        actions=memory.zeros("actions", shape, np.int8),
        values=memory.array("values", shape),
    )
    batch.values[...] = np.nan
    for row, (sequence, length) in enumerate(zip(sequences, lengths.tolist(), strict=True)):
        _fill(batch, row, sequence, length)
    return batch


def _fill(batch: BehaviourBatch, row: int, sequence: UserSequence, length: int) -> None:
    latest = slice(len(sequence) - length, len(sequence))
    batch.items[row, :length] = sequence.items[latest]
    batch.times[row, :length] = seconds_before(sequence.timestamps[latest], sequence.request_time)
    batch.next_times[row, : max(0, length - 1)] = batch.times[row, 1:length]
    batch.actions[row, :length] = sequence.actions[latest]
    batch.values[row, :length] = sequence.values[latest]


def seconds_before(timestamps: Int64Array, request_time: int) -> Int32Array:
    """Timestamps relative to the request, clipped to what int32 holds; an event after the request counts as simultaneous."""
    seconds: Int32Array = np.minimum(np.maximum(timestamps - request_time, _OLDEST), 0).astype(np.int32)  # np.clip takes thrice the time
    return seconds
