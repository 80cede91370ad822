"""The append of few new rows by CUDA graphs, one for each bucket of users, new rows and kept rows.

Launched kernel by kernel, 8 layers take 5 ms on an H200, of which the GPU works for half a millisecond. A graph reads its inputs where they
were when it was recorded, so the kept rows of a batch always lie in the same memory. A batch that fits no bucket is launched kernel by
kernel.
"""

from collections.abc import Sequence
from functools import partial
from itertools import product

import numpy as np
import torch

from cluster.engines.buffers import Allocate, BufferPool
from integrations.hstu.append_inputs import GROUP_BYTES_ON_GPU, Arrays, Shapes, kept_side_by_side, most_users_at_once
from integrations.hstu.config import HSTUConfig
from integrations.hstu.encoder import bucket
from integrations.hstu.kernels.buckets import Record, overwrite
from integrations.hstu.model_parameter_calculator import model_size
from integrations.hstu.torch_append import INPUTS, Append, append_run, arrays, padding

_NEW = (8, 64)
"""The buckets of new rows: for users that return soon, and after a longer absence."""
_KEPT_SHARES = (4, 1)
"""The buckets of kept rows, as divisors of the longest history: up to a quarter of it, or all of it."""


class LastingMemory(BufferPool):
    """Memory that stays where it is: `clear` overwrites it with zeros, and does not free it. `used`: tensors to overwrite with it."""

    def __init__(self, allocate: Allocate) -> None:
        super().__init__(allocate)
        self.used: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}

    def clear(self) -> None:
        for held in self._held.values():
            held[...] = 0
        overwrite(self.used)


class RecordedAppend:
    """A RunAppend, for one thread. `memory`: where the kept rows are to be put side by side; `shapes`: to which its inputs are padded."""

    def __init__(self, append: Append, config: HSTUConfig, batches: Sequence[int], device: torch.device, record: Record) -> None:
        """`batches`: the buckets of users, ascending; those that take too much memory are left out, but for the first."""
        users, new, kept = _buckets(config, batches)
        self.shapes = Shapes(
            users=partial(bucket, users),
            new=partial(bucket, new),
            past=partial(bucket, kept),
            most_users=users[-1],
            most_padded=new[-1],
            most_bytes=GROUP_BYTES_ON_GPU,
        )
        self.memory = LastingMemory(np.zeros if device.type == "cpu" else lambda count, _: torch.zeros(count, device=device))
        self._launched = append_run(append, device)
        self._recorded = {}
        for shape in sorted(product(users, new, kept), reverse=True):  # the largest takes the memory
            given, kept_rows = padding(*shape), kept_side_by_side(self.memory, config, shape[0], shape[2])
            columns = {name: torch.as_tensor(given[name], device=device) for name in INPUTS if name in given}
            with torch.inference_mode():
                self._recorded[shape] = columns, record(append, (*columns.values(), *map(torch.as_tensor, kept_rows)))

    def __call__(self, inputs: Arrays) -> Arrays:
        shape = *inputs["items"].shape, inputs["past_times"].shape[1]
        if shape not in self._recorded:
            return self._launched(inputs)
        columns, replay = self._recorded[shape]
        with torch.inference_mode():
            for name, column in columns.items():
                column.copy_(torch.from_numpy(inputs[name]))
            states, kt, v = replay()
            self.memory.used[shape] = *columns.values(), states, kt, v
            return arrays(states, kt.clone(), v.clone())


def _buckets(config: HSTUConfig, batches: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """The buckets of users, of new rows and of kept rows."""
    longest = config.window.longest
    most = most_users_at_once(batches, longest * model_size(config).kv_bytes_per_event)
    users = [batch for batch in batches if batch <= most]
    return users, sorted({min(rows, longest) for rows in _NEW}), sorted({-(-longest // share) for share in _KEPT_SHARES})
