"""What a ranker is given of a history: columns of numbers, the ratings among them in units of their deviation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.ranking import RatingScale
from cluster.values import Action, FloatArray, Int8Array, UserSequence
from integrations.hstu.config import RankerConfig
from integrations.hstu.user_behavior_schema import BehaviourBatch, collate

FURTHEST = 4.0
"""Deviations from the mean beyond which a rating counts as no further."""


def event_columns(sequence: UserSequence, config: RankerConfig) -> dict[str, npt.NDArray[Any]]:
    """One user's latest events, (L,): items, actions, ratings and times as the ranker takes them.

    They are those that the model's window leaves: see window.py. It may hold none.
    """
    batch = collate([sequence], config.max_history, step=config.window.step)
    return {name: column[0, : batch.lengths[0]] for name, column in _columns(batch, config).items()}


def standard_ratings(actions: Int8Array, values: FloatArray, scale: RatingScale) -> FloatArray:
    """(rating - mean) / deviation, 0 where the event is no rating; of the shape given."""
    rated = (actions == Action.RATING.code) & np.isfinite(values)
    ratings = np.where(rated, (values - scale.mean) / scale.deviation, 0.0)
    return np.clip(ratings, -FURTHEST, FURTHEST).astype(np.float32)


def training_batch(sequences: Sequence[UserSequence], config: RankerConfig) -> dict[str, npt.NDArray[Any]]:
    """Right-padded (B, L): items, actions, ratings and times as the ranker takes them, and the values as they are. The last of an L of
    `max_history` + 1 is asked about behind a full window.
    """
    batch = collate(sequences, config.max_history + 1)
    return {**_columns(batch, config), "values": batch.values}


def _columns(batch: BehaviourBatch, config: RankerConfig) -> dict[str, npt.NDArray[Any]]:
    return {
        "items": batch.items,
        "actions": batch.actions.astype(np.int64),
        "ratings": standard_ratings(batch.actions, batch.values, config.rating),
        "times": batch.times,
    }
