"""Leave-last-out splits: which of a user's events are for training, for validation and for the test.

Of a user's n events the last one is for the test, the one before it for validation, and the n - 2 before those are for training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cluster.dataset import Interactions
from cluster.values import Int64Array, UserSequence

TEST, VALIDATION = 1, 2
"""How far from the end of a history the held-out event of each split stands; the last event is 1."""

Window = Literal["latest", "random"]


@dataclass(frozen=True, eq=False)
class Example:
    """A history and the item that followed it; the history's request time is when that happened."""

    history: UserSequence
    target: int

    @property
    def targets(self) -> Int64Array:
        """What follows each event of the history."""
        return np.append(self.history.items[1:], self.target).astype(np.int64)


def held_out(interactions: Interactions, from_end: int, *, most_users: int | None = None) -> Iterator[Example]:
    """For each user, everything before the event that stands `from_end` from the end, and that event's item. Where more than `most_users`
    users have an event before it, that many are drawn, the same ones every time.
    """
    users = np.flatnonzero(interactions.lengths > from_end)
    if most_users is not None and most_users < len(users):
        users = np.sort(np.random.default_rng(0).choice(users, most_users, replace=False))
    for user in users.tolist():
        end = int(interactions.offsets[user + 1])
        yield Example(interactions.sequence(user, drop_last=from_end), int(interactions.items[end - from_end]))


def measured_users(interactions: Interactions, from_end: int) -> int:
    """How many users `held_out` gives: those with an event before the one that is held out."""
    return int(np.count_nonzero(interactions.lengths > from_end))


def training_examples(
    interactions: Interactions, *, held_out_events: int, max_history: int, window: Window, rng: np.random.Generator
) -> list[Example]:
    """One window a user out of all but the last `held_out_events` events.

    A user with more than `max_history` events before the last trained one gives the latest window, or with `window="random"` every other
    time, by chance, one that starts anywhere: later windows matter most, but the older events are data too.
    """
    examples = []
    for user, length in enumerate(interactions.lengths.tolist()):
        inputs = length - held_out_events - 1
        if inputs < 1:
            continue
        start = max(0, inputs - max_history)
        if window == "random" and start and rng.random() < 0.5:
            start = int(rng.integers(0, start + 1))
        examples.append(_window(interactions, user, start, min(inputs, start + max_history)))
    return examples


def learnt_events(interactions: Interactions, held_out_events: int) -> Interactions:
    """All but each user's last `held_out_events` events, which nothing that is learnt may know of."""
    kept = np.arange(len(interactions)) < np.repeat(interactions.offsets[1:] - held_out_events, interactions.lengths)
    lengths = np.maximum(interactions.lengths - held_out_events, 0)
    columns = interactions.items[kept], interactions.timestamps[kept], interactions.actions[kept], interactions.values[kept]
    return Interactions(interactions.user_ids, np.concatenate([[0], np.cumsum(lengths)]), *columns)


def _window(interactions: Interactions, user: int, start: int, stop: int) -> Example:
    first = int(interactions.offsets[user])
    rows = slice(first + start, first + stop)
    columns = interactions.items[rows], interactions.timestamps[rows], interactions.actions[rows], interactions.values[rows]
    return Example(UserSequence(*columns, request_time=int(interactions.timestamps[first + stop])), int(interactions.items[first + stop]))
