"""Nearest items by one scan in fp32 on an NVIDIA GPU."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cluster.nearest import NearestItems
from cluster.values import Availability, Encoded, FloatArray, Int64Array
from integrations.index.bf16 import needs_torch

if TYPE_CHECKING:
    from torch import Tensor


class CudaItems(NearestItems):
    """Holds the vectors on the GPU, and needs 4 bytes there for each pair of an item and a user of a batch. Only states and answers are
    copied.
    """

    device = "cuda"

    def __init__(self, vectors: FloatArray) -> None:
        super().__init__(vectors)
        import torch  # noqa: PLC0415 - a process whose index is another need not pay for importing torch

        self._items_VD = torch.tensor(vectors[1:], device=self.device)

    @classmethod
    def get_availability(cls) -> Availability:
        if not (installed := needs_torch("cuda", "gpu")).ok:
            return installed
        from integrations.hstu.kernels.gpu import usable_gpu  # noqa: PLC0415 - imports torch

        return usable_gpu("the index 'cuda'")

    def search(self, states_BD: FloatArray, counts: Sequence[int]) -> list[Encoded]:
        import torch  # noqa: PLC0415

        with torch.inference_mode():
            scores_BV = torch.tensor(states_BD, device=self.device) @ self._items_VD.T
            best = scores_BV.topk(min(max(counts), len(self)))
            tied_B = (scores_BV >= best.values[:, -1:]).sum(1) > best.values.shape[1]  # not all that are as near as the last one were found
            found_B = zip(*(one.cpu().numpy() for one in (best.values, best.indices)), strict=True)
            nearest_B: list[tuple[FloatArray, Int64Array]] = [
                _reaching(scores_V, scores[-1]) if tied else (scores, places)
                for scores_V, tied, (scores, places) in zip(scores_BV, tied_B.tolist(), found_B, strict=True)
            ]
        return [_ordered(state, *nearest, count) for state, nearest, count in zip(states_BD, nearest_B, counts, strict=True)]


def _reaching(scores_V: "Tensor", least: float) -> tuple[FloatArray, Int64Array]:
    """The scores that are at least `least`, and their places."""
    places = (scores_V >= least).nonzero().squeeze(1)
    return scores_V[places].cpu().numpy(), places.cpu().numpy()


def _ordered(state: FloatArray, scores: FloatArray, places: Int64Array, count: int) -> Encoded:
    """The `count` best of these items, the lower index first where scores are equal."""
    order = np.lexsort((places, -scores))[:count]
    return Encoded(state=state, items=(places[order] + 1).astype(np.int32), scores=scores[order])
