"""What of a dataset's events is written more than once, or in no order of time: from that a model learns the file, and not the users."""

import numpy as np

from cluster.dataset import Interactions
from cluster.values import BoolArray, Int64Array


def in_one_second(events: Interactions) -> BoolArray:
    """Whether each event lies in the same second as its user's event before, (events,)."""
    tied = np.zeros(len(events), np.bool_)
    tied[1:] = events.timestamps[1:] == events.timestamps[:-1]
    tied[events.offsets[:-1][events.lengths > 0]] = False
    return tied


def repeated(events: Interactions) -> Int64Array:
    """The rows of events that equal another one in user, item, second, action and value, in no order; of equal ones all but one."""
    tied = in_one_second(events)
    rows = np.flatnonzero(tied | np.append(tied[1:], False))
    seconds, width = np.cumsum(~tied)[rows], int(events.items.max(initial=0)) + 1
    keys = seconds * width + events.items[rows]  # one column is sorted several times as fast as four
    order = np.argsort(keys)
    met = keys[order][1:] == keys[order][:-1]
    chosen = order[np.append(met, False) | np.append(False, met)] if len(order) else order
    keys, rows = keys[chosen], rows[chosen]
    actions, values = events.actions[rows], np.nan_to_num(events.values[rows], nan=np.inf)
    order = np.lexsort((values, actions, keys))
    same = np.logical_and.reduce([column[order][1:] == column[order][:-1] for column in (keys, actions, values)])
    repeats: Int64Array = rows[order[1:][same]]
    return repeats


def last_item_met_before(events: Interactions) -> float:
    """The share of users with two events or more whose last event is of an item that they had met before; 0 where there are none."""
    several = events.lengths > 1
    last = np.zeros(events.users, events.items.dtype)
    last[several] = events.items[events.offsets[1:][several] - 1]
    rows = np.flatnonzero(events.items == np.repeat(last, events.lengths))
    users = np.searchsorted(events.offsets, rows, side="right") - 1
    again = np.bincount(users, minlength=events.users) > 1  # the last event is one of them
    return np.count_nonzero(again) / (np.count_nonzero(several) or 1)
