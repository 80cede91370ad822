"""Softmax losses over cosines: which item of the catalogue came next?

Shapes: R rows (events), D width, V items. States and item vectors are L2-normalised; `vectors_VD` has the padding row 0.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_ROWS_AT_ONCE = 512
_COLLISION = -5e4


class _FullSoftmax(torch.autograd.Function):
    """Mean cross entropy over the whole catalogue, with its gradients made in the same pass.

    Rows are taken in blocks that stay in the cache, so the (R, V) logits are never held at once. A cosine is at most 1, hence
    exp((cosine - 1) / temperature) can't overflow and no row maximum is needed.
    """

    @staticmethod
    def forward(ctx: Any, states_RD: Tensor, vectors_VD: Tensor, targets_R: Tensor, temperature: float) -> Tensor:
        ctx.state_grads, ctx.vector_grads = torch.empty_like(states_RD), torch.zeros_like(vectors_VD)
        bound = states_RD.new_full((1,), -1 / temperature)
        loss = states_RD.new_zeros(())
        scale = 1 / (temperature * len(states_RD))
        for start in range(0, len(states_RD), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            states, targets = states_RD[rows], targets_R[rows]
            exponents = torch.addmm(bound, states, vectors_VD[1:].T, alpha=1 / temperature).exp_()
            sums = exponents.sum(dim=1, keepdim=True)
            wanted = vectors_VD[targets]
            loss += (sums.squeeze(1).log() + (1 - (states * wanted).sum(dim=1)) / temperature).sum()
            ctx.state_grads[rows] = ((exponents @ vectors_VD[1:]) / sums - wanted) * scale
            ctx.vector_grads[1:].addmm_(exponents.T, states / sums, alpha=scale)
            ctx.vector_grads.index_add_(0, targets, states, alpha=-scale)
        return loss / len(states_RD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        return ctx.state_grads * grads[0], ctx.vector_grads * grads[0], None, None


def full_softmax(states_RD: Tensor, vectors_VD: Tensor, targets_R: Tensor, temperature: float) -> Tensor:
    """Mean negative log-likelihood of the targets among all V items."""
    loss: Tensor = _FullSoftmax.apply(states_RD, vectors_VD, targets_R, temperature)  # type: ignore[no-untyped-call]
    return loss


def sampled_softmax(states_RD: Tensor, vectors_VD: Tensor, targets_R: Tensor, temperature: float, *, negatives: int) -> Tensor:
    """As `full_softmax`, among each row's target and its own `negatives` items, drawn uniformly from the catalogue.

    A negative that happens to be the target is masked.
    """
    shape = len(targets_R), negatives
    drawn = torch.randint(1, len(vectors_VD), shape, device=targets_R.device)
    wrong = torch.einsum("rd,rnd->rn", states_RD, F.embedding(drawn, vectors_VD)) / temperature
    right = (states_RD * vectors_VD[targets_R]).sum(dim=1, keepdim=True) / temperature
    logits = torch.cat([right, wrong.masked_fill(drawn == targets_R.unsqueeze(1), _COLLISION)], dim=1)
    return F.cross_entropy(logits, torch.zeros_like(targets_R))
