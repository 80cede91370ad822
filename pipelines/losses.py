"""Softmax losses over cosines: which item of the catalogue came next?

Shapes: R rows (events), D width, V items. States and item vectors are L2-normalised; `vectors_VD` has the padding row 0.
"""

from dataclasses import dataclass
from typing import Any, Literal, Self, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional as F

from pipelines.sequence_models import ItemModel

Loss: TypeAlias = Literal["auto", "full", "sampled"]
SMALL_CATALOGUE = 20_000
"""Up to this many items the softmax over all of them is cheap; it teaches more than sampling."""
_ROWS_AT_ONCE = 512
_COLLISION = -5e4


@dataclass(frozen=True, eq=False)
class Seen:
    """Which items a row's user had seen by then, the row's item included: where seen items are never recommended, they are no wrong
    answers.
    """

    first_BV: Tensor  # (B, V + 1): where in the window an item first stands, past its end where it never does
    user_R: Tensor
    place_R: Tensor

    @classmethod
    def of(cls, items_BL: Tensor, items: int) -> Self:
        """The seen items of the real rows of a batch, in its order, from a catalogue of `items`."""
        users, length = items_BL.shape
        place_BL = torch.arange(length, dtype=torch.int16, device=items_BL.device).expand(users, length)
        first_BV = place_BL.new_full((users, items + 1), length).scatter_reduce_(1, items_BL, place_BL, "amin")
        user_R, place_R = (items_BL != 0).nonzero(as_tuple=True)
        return cls(first_BV, user_R, place_R.to(torch.int16))

    def among_all(self, rows: slice, targets: Tensor) -> Tensor:
        """Whether items 1..V were seen, (rows, V); a row's target, to which the user may come back, never counts as seen."""
        seen = self.first_BV[self.user_R[rows], 1:] <= self.place_R[rows].unsqueeze(1)
        return seen.scatter_(1, targets.unsqueeze(1) - 1, value=False)

    def among(self, items_RN: Tensor) -> Tensor:
        """Whether these items were seen, (R, N)."""
        return self.first_BV[self.user_R.unsqueeze(1), items_RN] <= self.place_R.unsqueeze(1)


class _FullSoftmax(torch.autograd.Function):
    """Mean cross entropy over the whole catalogue, with its gradients made in the same pass.

    Rows are taken in blocks that stay in the cache, so the (R, V) logits are never held at once.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, states_RD: Tensor, vectors_VD: Tensor, targets_R: Tensor, temperature: float, seen: Seen | None
    ) -> Tensor:
        ctx.state_grads, ctx.vector_grads = torch.empty_like(states_RD), torch.zeros_like(vectors_VD)
        loss = states_RD.new_zeros(())
        scale = 1 / (temperature * len(states_RD))
        for start in range(0, len(states_RD), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            states, targets = states_RD[rows], targets_R[rows]
            exponents = (states / temperature) @ vectors_VD[1:].T
            if seen:
                exponents.masked_fill_(seen.among_all(rows, targets), -torch.inf)
            largest = exponents.amax(dim=1, keepdim=True)  # of what counts: the target always does, so it is finite
            sums = exponents.sub_(largest).exp_().sum(dim=1, keepdim=True)
            wanted = vectors_VD[targets]
            loss += ((sums.log() + largest).squeeze(1) - (states * wanted).sum(dim=1) / temperature).sum()
            ctx.state_grads[rows] = ((exponents @ vectors_VD[1:]) / sums - wanted) * scale
            ctx.vector_grads[1:].addmm_(exponents.T, states / sums, alpha=scale)
            ctx.vector_grads.index_add_(0, targets, states, alpha=-scale)
        return loss / len(states_RD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        return ctx.state_grads * grads[0], ctx.vector_grads * grads[0], None, None, None


def next_item_loss(
    states_RD: Tensor,
    model: ItemModel,
    targets_R: Tensor,
    temperature: float,
    seen: Seen | None = None,
    *,
    loss: Loss = "auto",
    negatives: int = 128,
) -> Tensor:
    """`full_softmax`, or `sampled_softmax` where that is asked for; auto: where the model's catalogue is not small."""
    if loss == "full" or (loss == "auto" and model.config.items <= SMALL_CATALOGUE):
        return full_softmax(states_RD, model.item_vectors(), targets_R, temperature, seen)
    return sampled_softmax(states_RD, model, targets_R, temperature, seen, negatives=negatives)


def full_softmax(states_RD: Tensor, vectors_VD: Tensor, targets_R: Tensor, temperature: float, seen: Seen | None = None) -> Tensor:
    """Mean negative log-likelihood of the targets among all V items or, with `seen`, those that the row's user has not seen."""
    loss: Tensor = _FullSoftmax.apply(states_RD, vectors_VD, targets_R, temperature, seen)  # type: ignore[no-untyped-call]
    return loss


def sampled_softmax(
    states_RD: Tensor, model: ItemModel, targets_R: Tensor, temperature: float, seen: Seen | None = None, *, negatives: int
) -> Tensor:
    """As `full_softmax`, among each row's target and its own `negatives` items, drawn uniformly from the catalogue.

    A negative that happens to be the target, or was seen, is masked. Where targets and drawn items are fewer than the catalogue's, only
    their vectors are made; else they are likely to be most of its items.
    """
    drawn = torch.randint(1, model.config.items + 1, (len(targets_R), negatives), device=targets_R.device)
    places, distinct = torch.cat([targets_R.unsqueeze(1), drawn], dim=1), None
    if places.numel() < model.config.items:
        distinct, places = torch.unique(places, return_inverse=True)
    logits = torch.einsum("rd,rnd->rn", states_RD, F.embedding(places, model.item_vectors(distinct))) / temperature
    masked = drawn == targets_R.unsqueeze(1)
    if seen:
        masked |= seen.among(drawn)
    return F.cross_entropy(logits.masked_fill(F.pad(masked, (1, 0)), _COLLISION), torch.zeros_like(targets_R))
