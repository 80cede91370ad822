"""Nearest items by a scan in bf16, which reads half the bytes of one in fp32, and an fp32 search among the items that it leaves in doubt.

The scan's scores are off by rounding, within a bound (rounding.py). In one pass the best score of each block of items gives a score that as
many items reach as are asked for; items below it by more than the bound are out. So the answer is exact for any vectors; the more alike
these are, the more items are left for the search in fp32.

Shapes: B users, V items, D width, N blocks of S items.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from cluster.nearest import NearestItems
from cluster.values import Availability, Encoded, FloatArray, Int32Array
from integrations.index.rounding import Rounding, slices

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_SIZES = range(8, 65)
"""Items in a block: with more, too few blocks are left where many items are asked for; with fewer, a scan of the items is as cheap."""
_WORTH_IT = 8
"""From so many blocks for each item asked for, and items for each one searched in fp32, this is faster than a scan in fp32."""
_UNIT_ROUNDOFF = 2.0**-8


class Bf16Items(NearestItems):
    """Computed by torch on the CPU. Takes half as much memory again as the vectors."""

    def __init__(self, vectors: FloatArray) -> None:
        super().__init__(vectors)
        import torch  # noqa: PLC0415 - a process whose index is another need not pay for importing torch

        self._rough_VD = torch.cat([torch.tensor(part).bfloat16() for part in slices(vectors[1:])])
        self._rounding = Rounding(vectors[1:], _rounded)

    @classmethod
    def get_availability(cls) -> Availability:
        return needs_torch("bf16", "cpu")

    @classmethod
    def is_fast(cls) -> bool:
        """Whether the processor has instructions for bf16, and torch one thread: without, bf16 takes several times as long as fp32."""
        import torch  # noqa: PLC0415

        return torch.get_num_threads() == 1 and any(has for name, has in torch.cpu.get_capabilities().items() if "bf16" in name)

    def search(self, states_BD: FloatArray, counts: Sequence[int]) -> list[Encoded]:
        size = min(_BLOCK_SIZES[-1], len(self) // (_WORTH_IT * max(counts)))
        if size not in _BLOCK_SIZES:
            return super().search(states_BD, counts)
        found = self._in_doubt(states_BD, max(counts), size)
        return [self._best_of(items, state, count) for items, state, count in zip(found, states_BD, counts, strict=True)]

    def _best_of(self, items: Int32Array, state: FloatArray, count: int) -> Encoded:
        if len(items) * _WORTH_IT > len(self):
            return super().search(state[None], [count])[0]
        return self.among(items, state, count)

    def _in_doubt(self, states_BD: FloatArray, count: int, size: int) -> list[Int32Array]:
        """For each state the items that may be among its `count` nearest: all those that are, and perhaps others."""
        import torch  # noqa: PLC0415

        full = len(self) // size * size
        rest = np.arange(full + 1, len(self) + 1, dtype=np.int32)  # what does not fill a block
        with torch.inference_mode():
            scores_BV = torch.tensor(states_BD).bfloat16() @ self._rough_VD.T
            scores_BNS = scores_BV[:, :full].view(len(states_BD), -1, size)
            best_BN = scores_BNS.amax(2)
            reached_B = best_BN.topk(count).values[:, -1].float()  # by an item of each of `count` blocks, at least
            floor_B = (reached_B - _UNIT_ROUNDOFF * reached_B.abs() - 2 * torch.tensor(self._rounding.bound(states_BD))).bfloat16()
            return [np.append(_reaching(*row), rest) for row in zip(scores_BNS, best_BN, floor_B, strict=True)]


def needs_torch(index: str, extra: str) -> Availability:
    if find_spec("torch") is None:
        return Availability.no(f"the index {index!r} needs torch, which is not installed; install genrec with its extra {extra}")
    return Availability.yes()


def _reaching(scores_NS: "Tensor", best_N: "Tensor", floor: "Tensor") -> Int32Array:
    """The items with a score of at least `floor`, from each item's score and the best score of each block."""
    blocks = (best_N >= floor).nonzero().squeeze(1)
    places = (scores_NS[blocks] >= floor).nonzero()
    items: Int32Array = (blocks[places[:, 0]] * scores_NS.shape[1] + places[:, 1] + 1).int().numpy()
    return items


def _rounded(vectors: FloatArray) -> FloatArray:
    import torch  # noqa: PLC0415

    rounded: FloatArray = torch.tensor(vectors).bfloat16().float().numpy()
    return rounded
