"""The labels by which a ranker learns from users' events: the tasks, and each event's label for each of them.

    click      turned to the item at all: 1 for every event but a dislike, 0 for items drawn at random
    like       1 for a like, a share, a cart, a purchase or a rating from four fifths of the highest on (where there are negative ones,
               from four fifths of the way from the lowest to the highest), 0 for a dislike or a lower rating
    rating     the rating itself
    share, cart, purchase    1 for that action, 0 for any other event

A label is NaN where the event says nothing of the task.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.dataset import Interactions
from cluster.ranking import RatingScale, Task
from cluster.values import Action, BoolArray, FloatArray, Int8Array

LIKED_FROM = 0.8
"""The share of the scale from which a rating is a like: four of five stars, 3 where ratings are -5 to 5, -1.8 where they are -5 to -1."""
FEWEST_LABELS = 50
"""The fewest labels of each kind with which a task is learnt."""
_LIKES = (Action.LIKE, Action.SHARE, Action.CART, Action.PURCHASE)
_OWN_ACTION = {Task.SHARE: Action.SHARE, Task.CART: Action.CART, Task.PURCHASE: Action.PURCHASE}


def ratings(actions: Int8Array, values: npt.NDArray[np.floating]) -> FloatArray:
    """The values that are ratings, NaN elsewhere."""
    return np.where(actions == Action.RATING.code, values, np.nan).astype(np.float32)


def labels(actions: Int8Array, values: npt.NDArray[np.floating], scale: RatingScale, tasks: Sequence[Task] = tuple(Task)) -> FloatArray:
    """(events, tasks): the labels of events with these actions and values, of ratings on this scale."""
    rated = ratings(actions, values)
    return np.stack([_label(task, actions, rated, scale) for task in tasks], axis=-1)


def tasks_of(interactions: Interactions) -> tuple[Task, ...]:
    """The tasks that these events can teach: those with enough labels of both kinds."""
    rated = ratings(interactions.actions, interactions.values)
    scale = RatingScale(low=float(np.nanmin(rated)), high=float(np.nanmax(rated))) if np.isfinite(rated).any() else RatingScale()
    return tuple(task for task in Task if task is Task.CLICK or _teaches(task, _label(task, interactions.actions, rated, scale)))


def _label(task: Task, actions: Int8Array, rated: FloatArray, scale: RatingScale) -> FloatArray:
    """(events,): the labels of one task, so that those of all tasks need not be in memory at once."""
    if task is Task.LIKE:
        return _likes(actions, rated, scale)
    if task is Task.RATING:
        return rated
    said: BoolArray = actions != Action.DISLIKE.code if task is Task.CLICK else actions == _OWN_ACTION[task].code
    return said.astype(np.float32)


def _likes(actions: Int8Array, rated: FloatArray, scale: RatingScale) -> FloatArray:
    lowest = min(0.0, scale.low)  # of ratings above 0, the scale begins at 0: of 1 to 5, 4 is a like
    liked_from = lowest + LIKED_FROM * (scale.high - lowest)
    liked = np.isin(actions, [action.code for action in _LIKES]) | (rated >= liked_from)
    said = liked | np.isfinite(rated) | (actions == Action.DISLIKE.code)
    return np.where(said, liked.astype(np.float32), np.float32(np.nan))


def _teaches(task: Task, column: FloatArray) -> bool:
    said = column[np.isfinite(column)]
    if task is Task.RATING:
        return len(said) >= 2 * FEWEST_LABELS and float(np.ptp(said)) > 0
    return min(int((said == 1).sum()), int((said == 0).sum())) >= FEWEST_LABELS
