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

LEAST_REACHED = 0.25
"""Where one window a user would reach a smaller share of the events to learn from, an epoch has more: else long histories that have most of
the events, be they of few users or of many, would be trained by few steps, on few of their events.
"""

TOLD_SHARE = 0.02
"""The share of the events in an epoch's windows from which on a single user's is told: it may be no customer but a crawler."""

USUAL_TIMES = 10
"""How many times the events of the average user one may have and count as a customer, whatever share of all events these are."""

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
    """An epoch's windows out of all but the last `held_out_events` events: one a user, or where these would reach too little of the events,
    as many as `_windows_a_user` says, those that are more coming last.

    A user with more than `max_history` events before the last trained one gives the latest window, or with `window="random"` every other
    time, by chance, one that starts anywhere: later windows matter most, but the older events are data too. A user's further windows all
    start anywhere.
    """
    users, inputs = _inputs(interactions, held_out_events)
    latest = np.maximum(0, inputs - max_history)
    starts = latest.copy()
    if window == "random":
        for row in np.flatnonzero(starts).tolist():
            if rng.random() < 0.5:
                starts[row] = rng.integers(0, int(starts[row]) + 1)
    counts = _windows_a_user(inputs, _reached(interactions, max_history), max_history, window)
    if more := counts.sum() - len(users):
        rows = np.repeat(np.arange(len(users)), counts - 1)
        users, inputs = np.r_[users, users[rows]], np.r_[inputs, inputs[rows]]
        starts = np.r_[starts, rng.integers(0, latest[rows] + 1, more)]
    firsts = interactions.offsets[users]
    return Windows(interactions, firsts + starts, firsts + np.minimum(inputs, starts + max_history))


def told_windows(interactions: Interactions, *, held_out_events: int, max_history: int, window: Window) -> str:
    """Where users give `training_examples` more than one window an epoch, a line that says how many, and why; else "". Where the user with
    most gives `TOLD_SHARE` of the events in them or more, the line says which share.
    """
    _, inputs = _inputs(interactions, held_out_events)
    share = _reached(interactions, max_history)
    counts = _windows_a_user(inputs, share, max_history, window)
    if (counts == 1).all():
        return ""
    events = counts * np.minimum(inputs, max_history)
    largest = events.max() / events.sum()  # no smaller than the user's share of the windows, as none are longer
    of_all = f" ({largest:.1%} of their events)" if largest >= TOLD_SHARE else ""
    return (
        f"{len(counts):,} users give an epoch {counts.sum():,} windows, up to {counts.max():,} each{of_all}: "
        f"one of {max_history:,} events a user would reach {share:.1%} of the events to learn from"
    )


def without_excess(windows: Windows) -> Windows:
    """The windows without as many of a user's as it takes for the user to have, of the events in those that are left, at most `TOLD_SHARE`
    or, where that is more, `USUAL_TIMES` the average user's share. Every user keeps its first window. `windows`: of one length a user, as
    `training_examples` gives them; they are given back as they are where no user has more.
    """
    users = np.searchsorted(windows.interactions.offsets, windows.starts, side="right") - 1
    events, limit = np.bincount(users, windows.lengths), np.inf
    share = max(TOLD_SHARE, USUAL_TIMES / np.count_nonzero(events))
    for _ in range(100):  # the limits fall to the one that is `share` of what is left by it
        limit = share * np.minimum(events, limit).sum()
    kept = np.ones(len(windows), bool)
    for user in np.flatnonzero(events > limit):
        rows = np.flatnonzero(users == user)
        kept[rows[max(1, int(limit / windows.lengths[rows[0]])) :]] = False
    return windows if kept.all() else windows[np.flatnonzero(kept)]


def _inputs(interactions: Interactions, held_out_events: int) -> tuple[Int64Array, Int64Array]:
    """The users that have an event to learn, and how many events each has before the last of these, both (users that learn,)."""
    inputs = interactions.lengths - held_out_events - 1
    users = np.flatnonzero(inputs >= 1)
    return users, inputs[users]


def _reached(interactions: Interactions, max_history: int) -> float:
    """The share of the events to learn from that one window a user has, as history or as target; 1 where there are none. It goes by the
    events before the validation event, in a refit too: that trains by the same rule as the run that chose its epochs.
    """
    learnt = interactions.lengths - VALIDATION
    learnt = learnt[learnt >= 2]
    return float(np.minimum(learnt, max_history + 1).sum() / learnt.sum()) if len(learnt) else 1.0


def _windows_a_user(inputs: Int64Array, reached: float, max_history: int, window: Window) -> Int64Array:
    """How many windows each user gives an epoch, (users,): one, or where random ones would have `reached` less than `LEAST_REACHED` of the
    events, as many as hold all of the user's.
    """
    return np.ones_like(inputs) if window == "latest" or reached >= LEAST_REACHED else -(-inputs // max_history)


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
