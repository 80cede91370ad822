"""The items recommended lately, to tell events that follow a recommendation from others. Time is passed in.

An item counts once each time it is shown. Each gateway remembers only its own recommendations, and an event reaches any gateway: one that
showed the user nothing lately does not count it, and one that showed an older list counts it as not followed unless that list has the item,
too. So with more gateways the number of followed events falls, and so does their share.
"""

from dataclasses import dataclass
from enum import StrEnum

from cluster.cache.entry import Key
from cluster.cache.recent import REMEMBERED, Recent

MOST_ITEMS = 200
CLOCKS_DIFFER_S = 60.0


class Followed(StrEnum):
    """Whether an event followed a recommendation."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Show:
    """Items that were shown together and have not been followed yet. `at`: when they were shown, in seconds since 1970."""

    at: float
    model_version: str
    items: list[str]


class ShownItems:
    """The latest shows of at most `users` users, each for `window_s`; of a user at most `MOST_ITEMS` items, of a longer show the best. A
    show without items, as one whose items were all followed, counts as one item.
    """

    def __init__(self, users: int = REMEMBERED, window_s: float = 1800.0) -> None:
        self._window_s, self._users = window_s, Recent[list[_Show]](users)

    def __len__(self) -> int:
        return len(self._users)

    def show(self, tenant: str, user: str, items: list[str], model_version: str, now: float) -> None:
        key = _key(tenant, user)
        shows, items = self._users.get(key) or [], items[:MOST_ITEMS]
        if shows and shows[-1].items == items:
            shows.pop()  # it is shown again
        shows.append(_Show(now, model_version, items))
        self._expire(shows, now)
        self._users.put(key, shows)
        self._drop(now)

    def follow(self, tenant: str, user: str, item: str, timestamp: float, now: float) -> tuple[Followed, str]:
        """Whether an event at `timestamp` that arrived at `now` followed a recommendation, and the model version that had recommended its
        item: the latest that was not made after the event. An event from before all of them, as in a log that is sent later, says nothing.
        """
        shows = self._users.get(_key(tenant, user))
        if not shows:
            return Followed.UNKNOWN, ""
        self._expire(shows, now)
        if not shows or not -CLOCKS_DIFFER_S <= timestamp - shows[0].at <= self._window_s:
            return Followed.UNKNOWN, ""
        holding = [show for show in shows if item in show.items]
        fitting = [show for show in holding if -CLOCKS_DIFFER_S <= timestamp - show.at <= self._window_s]
        if not fitting:
            return Followed.NO, ""
        followed = fitting[-1]
        for show in holding:
            if show.at <= followed.at:  # a later one may be followed by another event
                show.items.remove(item)
        return Followed.YES, followed.model_version

    def forget(self, tenant: str | None = None, user: str | None = None) -> None:
        """Forget a user, which takes no longer where many are known, a tenant's users, or all."""
        self._users.forget(tenant, user)

    def _expire(self, shows: list[_Show], now: float) -> None:
        gone, items = 0, sum(map(_weight, shows))
        while gone < len(shows) and (now - shows[gone].at > self._window_s or items > MOST_ITEMS):
            items -= _weight(shows[gone])
            gone += 1
        del shows[:gone]

    def _drop(self, now: float) -> None:
        while self._users and self._gone(next(iter(self._users.items()))[1], now):
            self._users.take()

    def _gone(self, shows: list[_Show], now: float) -> bool:
        return not shows or now - shows[-1].at > self._window_s


def _weight(show: _Show) -> int:
    return max(1, len(show.items))


def _key(tenant: str, user: str) -> Key:
    return Key(tenant, user, "shown")
