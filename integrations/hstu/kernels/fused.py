"""HSTU with kernels for attention, gated normalisation and append; projections are torch's, or by a given function.

It takes the weights of HSTU and gives the same answers, but for the order in which sums are added up.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from integrations.hstu.config import HSTUConfig
from integrations.hstu.kernels.append import append
from integrations.hstu.kernels.attention import attention
from integrations.hstu.kernels.norm_mul_dropout import norm_mul_dropout
from integrations.hstu.kernels.projection import Project, by_torch
from integrations.hstu.kernels.reference import EPSILON
from integrations.hstu.kernels.rows import Rows
from integrations.hstu.latest_states import rows as rows_at
from integrations.hstu.model import HSTU, HSTULayer
from integrations.hstu.sequence_model import unit

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q and k (B, L, H, K) and v (B, L, H, W) -> what each row attends to, (B, L, H, W)."""


class FusedHSTU(HSTU):
    """HSTU on a GPU, or in Triton's interpreter. It trains, too: the kernels have gradients, and so must `project`."""

    def __init__(self, config: HSTUConfig, project: Project = by_torch) -> None:
        super().__init__(config)
        self._project = project

    def transform(self, x_BLD: Tensor, times_BL: Tensor, next_times_BL: Tensor) -> Tensor:
        users, length = times_BL.shape
        return self._encode(x_BLD, times_BL, next_times_BL, torch.full((users,), length, device=times_BL.device))

    def latest(self, items_BL: Tensor, times_BL: Tensor, next_times_BL: Tensor, lengths_B: Tensor, count: int) -> Tensor:
        """L2-normalised states (B, count, D) after each user's last events, oldest first; of fewer, the first one is repeated.

        No work is spent on a user's padding. All layers know every row.
        """
        x = self.embed(items_BL, torch.arange(items_BL.shape[1], device=items_BL.device))
        index_BC = (lengths_B.unsqueeze(1) - count + torch.arange(count, device=lengths_B.device)).clamp(min=0)
        return unit(rows_at(self._encode(x, times_BL, next_times_BL, lengths_B), index_BC, self.config.dim))

    def append(  # noqa: PLR0917 - as HSTU's
        self,
        items_BS: Tensor,
        times_BS: Tensor,
        next_times_BS: Tensor,
        past_times_BP: Tensor,
        past_lengths_B: Tensor,
        past_kt: Tensor | Sequence[Tensor],
        past_v: Tensor | Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        positions_BS = past_lengths_B.unsqueeze(1) + torch.arange(items_BS.shape[1], device=items_BS.device)
        x = self.embed(items_BS, positions_BS.clamp(max=self.config.max_length - 1))
        kts, vs = [], []
        for layer, kt_BHKP, v_BHPW in zip(self._layers(), past_kt, past_v, strict=True):
            past = kt_BHKP, v_BHPW, past_lengths_B, next_times_BS, times_BS, past_times_BP
            x, kt, v = self._layer(layer, x, _after_kept_rows(layer, past))
            kts.append(kt)
            vs.append(v)
        return unit(x), torch.stack(kts), torch.stack(vs)

    def _encode(self, x_BLD: Tensor, times_BL: Tensor, next_times_BL: Tensor, lengths_B: Tensor) -> Tensor:
        events = next_times_BL.flatten(), times_BL.flatten(), Rows.padded(lengths_B, times_BL.shape[1])
        for layer in self._layers():
            x_BLD, _, _ = self._layer(layer, x_BLD, _among_each_other(layer, events))
        return x_BLD

    def _layer(self, layer: HSTULayer, x_BLD: Tensor, attend: Attend) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output (B, L, D), its K^T (B, H, K, L) and V (B, H, L, W)."""
        u, v, q, k = self._uvqk(layer, x_BLD)
        mixed = attend(q, k, v).flatten(2)
        dropout = self.config.dropout if self.training else 0.0
        seed = int(torch.randint(2**31 - 1, ())) if dropout else 0
        out: Tensor = layer.output(norm_mul_dropout(mixed, u, dropout=dropout, seed=seed))
        return out + x_BLD, k.permute(0, 2, 3, 1), v.transpose(1, 2)

    def _uvqk(self, layer: HSTULayer, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """HSTULayer.project, rows before heads: U (B, L, H*W), V (B, L, H, W), Q and K (B, L, H, K)."""
        normed = F.layer_norm(x_BLD, (self.config.dim,), eps=EPSILON)
        uvqk = torch.unflatten(self._project(normed.flatten(0, 1), layer.uvqk), 0, x_BLD.shape[:2])
        u, *vqk = torch.split(uvqk, layer.widths, dim=-1)
        v, q, k = (torch.unflatten(tensor, -1, (self.config.heads, -1)) for tensor in vqk)
        return u, v, q, k

    def _layers(self) -> list[HSTULayer]:
        return cast("list[HSTULayer]", list(self.layers))


def _among_each_other(layer: HSTULayer, events: tuple[Tensor, Tensor, Rows]) -> Attend:
    def attend(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHW: Tensor) -> Tensor:
        q, k, v = (tensor.flatten(0, 1) for tensor in (q_BLHK, k_BLHK, v_BLHW))
        return torch.unflatten(attention(q, k, v, *events, layer.position_weights, layer.time_weights), 0, q_BLHK.shape[:2])

    return attend


def _after_kept_rows(layer: HSTULayer, past: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]) -> Attend:
    def attend(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHW: Tensor) -> Tensor:
        return append(q_BSHK, k_BSHK, v_BSHW, *past, layer.position_weights, layer.time_weights)

    return attend
