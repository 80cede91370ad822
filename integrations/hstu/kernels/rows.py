"""Which rows of a batch belong to which user."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Where each of B users' rows stand among all T rows, whether they are ragged or padded."""

    starts: Tensor
    """(B,) int64: each user's first row."""
    lengths: Tensor
    """(B,): how many rows each user has."""
    longest: int
    """The most rows that a user has; a number on the host, so that no launch waits for the GPU."""

    @classmethod
    def padded(cls, lengths: Tensor, width: int) -> Self:
        """User b has the first `lengths[b]` of the `width` rows from `b * width` on, as in a (B, width, ...) tensor flattened to rows."""
        return cls(torch.arange(len(lengths), device=lengths.device) * width, lengths.long(), width)
