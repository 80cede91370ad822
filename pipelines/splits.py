"""Leave-last-out splits: which of a user's events are for training, for validation and for the test.

Of a user's n events the last one is for the test, the one before it for validation, and the n - 2 before those are for training.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cluster.dataset import Interactions
from cluster.values import BoolArray, Int64Array, UserSequence

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


@dataclass(frozen=True, eq=False)
class Windows:
    """Examples that are made where they are iterated over: made all at once, they take more memory than the events.

    The history of window i is rows `starts[i]:stops[i]` of the interactions, all of one user, and its target stands in row `stops[i]`;
    both are (windows,).
    """

    interactions: Interactions
    starts: Int64Array
    stops: Int64Array

    def __len__(self) -> int:
        return len(self.starts)

    def __iter__(self) -> Iterator[Example]:
        of = self.interactions
        for start, stop in zip(self.starts.tolist(), self.stops.tolist(), strict=True):
            columns = of.items[start:stop], of.timestamps[start:stop], of.actions[start:stop], of.values[start:stop]
            yield Example(UserSequence(*columns, request_time=int(of.timestamps[stop])), int(of.items[stop]))

    def __getitem__(self, chosen: Int64Array) -> "Windows":
        return Windows(self.interactions, self.starts[chosen], self.stops[chosen])

    @property
    def lengths(self) -> Int64Array:
        """Events of each history, (windows,)."""
        return self.stops - self.starts


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
) -> Windows:
    """One window a user out of all but the last `held_out_events` events.

    A user with more than `max_history` events before the last trained one gives the latest window, or with `window="random"` every other
    time, by chance, one that starts anywhere: later windows matter most, but the older events are data too.
    """
    inputs = interactions.lengths - held_out_events - 1
    users = np.flatnonzero(inputs >= 1)
    firsts, inputs = interactions.offsets[users], inputs[users]
    starts = np.maximum(0, inputs - max_history)
    if window == "random":
        for row in np.flatnonzero(starts).tolist():
            if rng.random() < 0.5:
                starts[row] = rng.integers(0, int(starts[row]) + 1)
    return Windows(interactions, firsts + starts, firsts + np.minimum(inputs, starts + max_history))


def learnt_items(interactions: Interactions, items: int, *, held_out_events: int, max_history: int, window: Window) -> BoolArray:
    """Which catalogue indices an encoder's training knows by events, (items + 1,): those that `training_examples` can give. They are in all
    but the last `held_out_events` events of users that have two of these or more, as the second is the first to be learnt from what is
    before it; with `window="latest"` in the latest `max_history` + 1 of them.
    """
    stops = interactions.offsets[1:] - held_out_events
    starts = np.where(stops - interactions.offsets[:-1] >= 2, interactions.offsets[:-1], stops)
    if window == "latest":
        starts = np.maximum(starts, stops - max_history - 1)
    rows = np.arange(len(interactions))
    within = (rows >= np.repeat(starts, interactions.lengths)) & (rows < np.repeat(stops, interactions.lengths))
    learnt: BoolArray = np.bincount(interactions.items[within], minlength=items + 1) > 0
    return learnt


def learnt_events(interactions: Interactions, held_out_events: int) -> Interactions:
    """All but each user's last `held_out_events` events, which nothing that is learnt may know of."""
    return interactions.where(np.arange(len(interactions)) < np.repeat(interactions.offsets[1:] - held_out_events, interactions.lengths))
