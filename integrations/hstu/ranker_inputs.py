"""A ranker's input from a history: columns of numbers, with ratings in units of their deviation."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.ranking import RatingScale
from cluster.values import Action, FloatArray, Int8Array, UserSequence
from integrations.hstu.config import RankerConfig
from integrations.hstu.user_behavior_schema import BehaviourBatch, collate

FURTHEST = 4.0
"""Ratings are clipped to so many deviations from the mean."""


def event_columns(sequence: UserSequence, config: RankerConfig) -> dict[str, npt.NDArray[Any]]:
    """One user's latest events, (L,): items, actions, ratings and times as the ranker takes them.

    They are the events in the model's window, see window.py; there may be none.
    """
    batch = collate([sequence], config.max_history, step=config.window.step)
    return {name: column[0, : batch.lengths[0]] for name, column in _columns(batch, config).items()}


def standard_ratings(actions: Int8Array, values: FloatArray, scale: RatingScale) -> FloatArray:
    """(rating - mean) / deviation, 0 where the event is no rating; in the shape of the inputs."""
    rated = (actions == Action.RATING.code) & np.isfinite(values)
    ratings = np.where(rated, (values - scale.mean) / scale.deviation, 0.0)
    return np.clip(ratings, -FURTHEST, FURTHEST).astype(np.float32)


def training_batch(sequences: Sequence[UserSequence], config: RankerConfig) -> dict[str, npt.NDArray[Any]]:
    """Right-padded (B, L): items, actions, ratings and times as the ranker takes them, and the unscaled values. Where L is `max_history` +
    1, the last event is predicted after a full window.
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
