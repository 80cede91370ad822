"""The soft prompt: a user's states and events as rows that take the place of embedded tokens in a decoder's input.

    row = W_s state + W_i item vector + rating + pause until the next event

Shapes: B users, T rows, D width of states and item vectors, H width of the decoder.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cluster.errors import BackendFailed
from cluster.values import FloatArray, Int64Array, UserSequence, UserState

RATINGS = 12
PAUSES = 32
_PAUSE_RATIO = 0.6
_SCALE = 0.2


class SoftPrompt(nn.Module):
    """Projects states and events. The item vectors are the encoder's, of unit length; they are not trained here and not saved."""

    item_vectors: Tensor

    def __init__(self, item_vectors: FloatArray, hidden: int, dropout: float = 0.0) -> None:
        super().__init__()
        dim = item_vectors.shape[1]
        self.dropout, self._unit_to_normal = dropout, dim**0.5  # components of a unit vector are about 1 / sqrt(D)
        self.register_buffer("item_vectors", torch.from_numpy(np.array(item_vectors, np.float32)), persistent=False)
        self.states = nn.Linear(dim, hidden)
        self.items = nn.Linear(dim, hidden, bias=False)
        self.ratings = nn.Embedding(RATINGS, hidden)
        self.pauses = nn.Embedding(PAUSES, hidden)
        for table in (self.ratings, self.pauses):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, states_BTD: Tensor, items_BT: Tensor, ratings_BT: Tensor, pauses_BT: Tensor) -> Tensor:
        """Rows (B, T, H). `ratings_BT` and `pauses_BT`: as made by `rating_codes` and `pause_codes`."""
        states = F.dropout(states_BTD * self._unit_to_normal, self.dropout, self.training)
        vectors = F.dropout(self.item_vectors[items_BT] * self._unit_to_normal, self.dropout, self.training)
        rows: Tensor = self.states(states) + self.items(vectors) + self.ratings(ratings_BT) + self.pauses(pauses_BT)
        return rows * _SCALE

    @torch.inference_mode()
    def of(self, users: Sequence[UserState]) -> list[Tensor]:
        """Each user's rows (T, H), float32. Raises BackendFailed at a state of another width, at NaN, and at an unknown item."""
        if not users:
            return []
        columns = zip(*(self._checked(user) for user in users), strict=True)
        device = self.item_vectors.device
        rows: Tensor = self(*(torch.from_numpy(np.concatenate(column)).to(device).unsqueeze(0) for column in columns))
        return list(torch.split(rows.squeeze(0), [len(user) for user in users]))

    def _checked(self, user: UserState) -> tuple[FloatArray, Int64Array, Int64Array, Int64Array]:
        """A user's columns of T rows."""
        states, items = user.states, user.sequence.items
        dim, count = self.item_vectors.shape[1], len(self.item_vectors) - 1
        if states.ndim != 2 or states.shape != (len(items), dim) or not len(items):
            raise BackendFailed(f"a prompt of {len(items)} events has states of shape {states.shape}; ({len(items)}, {dim}) is needed")
        if not np.isfinite(states).all():
            raise BackendFailed("a prompt has a state that is NaN or infinite")
        if (outside := items[(items < 1) | (items > count)]).size:
            raise BackendFailed(f"item index {outside[0]} of a prompt is outside of 1..{count}, the items of this model")
        return states.astype(np.float32), items.astype(np.int64), rating_codes(user.sequence), pause_codes(user.sequence)


def rating_codes(sequence: UserSequence) -> Int64Array:
    """A rating of 1 to 11 as it is, rounded; 0 where there is none."""
    codes: Int64Array = np.clip(np.rint(np.nan_to_num(sequence.values, nan=0.0)), 0, RATINGS - 1).astype(np.int64)
    return codes


def pause_codes(sequence: UserSequence) -> Int64Array:
    """How long after each event the next one, or the request, came: the bucket of the logarithm of the seconds."""
    seconds = np.diff(np.append(sequence.timestamps, sequence.request_time)).clip(min=0)
    codes: Int64Array = (np.log1p(seconds) / _PAUSE_RATIO).astype(np.int64).clip(max=PAUSES - 1)
    return codes
