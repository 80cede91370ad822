"""Requests as the batch an engine takes, checked first: on a GPU, one lookup outside a table breaks every later call of the process."""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from cluster.engines.buffers import BufferPool
from cluster.errors import BackendFailed
from cluster.values import Encoded, EncodeRequest, FloatArray
from cluster.window import Window
from integrations.hstu.limits import row_blocks
from integrations.hstu.user_behavior_schema import BehaviourBatch, collate


def engine_batch(requests: Sequence[EncodeRequest], window: Window, items: int, pool: BufferPool | None = None) -> BehaviourBatch:
    """The batch of each user's latest events within the model's window, the same for every engine: see window.py. `pool` as in `collate`.

    Raises BackendFailed at an empty history and at an item outside 1..`items`.
    """
    sequences, shortest = [request.sequence for request in requests], row_blocks(window.longest)
    batch = collate(sequences, window.longest, step=window.step, shortest=shortest, pool=pool)
    if not batch.lengths.all():
        raise BackendFailed(f"request {int(batch.lengths.argmin())} of the batch has a history of 0 events; a state needs at least 1")
    given = batch.items[np.arange(batch.items.shape[1]) < batch.lengths[:, None]]
    if (outside := given[(given < 1) | (given > items)]).size:
        raise BackendFailed(f"item index {outside[0]} is outside of 1..{items}, the items of this model")
    return batch


def with_states(
    requests: Sequence[EncodeRequest], answers: Sequence[Encoded], states_BCD: FloatArray, batch: BehaviourBatch
) -> list[Encoded]:
    """The answers, with each user's latest states where they are asked for; where a history has fewer than C, the engine has repeated the
    first one.
    """
    rows = zip(requests, answers, states_BCD, batch.lengths.tolist(), strict=True)
    return [
        replace(answer, states=states_CD[-min(length, len(states_CD)) :]) if request.states else answer
        for request, answer, states_CD, length in rows
    ]
