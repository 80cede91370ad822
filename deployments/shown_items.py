"""What was recommended lately, to tell the events that follow a recommendation from those that do not. Time is passed in.

An item counts once each time it is shown. The memory is this gateway's: where another one is told of the event, nothing is counted, so that
the share of followed among a remembered user's events holds, however many gateways there are, and their number does not.
"""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

MOST_ITEMS = 200
CLOCKS_DIFFER_S = 60.0


class Followed(StrEnum):
    """What an event was."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class _Shown:
    """Item -> model version and when it was shown, in seconds since 1970, the latest last."""

    items: OrderedDict[str, tuple[str, float]] = field(default_factory=OrderedDict)
    at: float = 0.0


class ShownItems:
    """The latest `MOST_ITEMS` items of each of at most `users` users, each for `window_s`."""

    def __init__(self, users: int = 10_000, window_s: float = 1800.0) -> None:
        self._most, self._window_s = users, window_s
        self._users: OrderedDict[tuple[str, str], _Shown] = OrderedDict()

    def __len__(self) -> int:
        return len(self._users)

    def show(self, tenant: str, user: str, items: Iterable[str], model_version: str, now: float) -> None:
        shown = self._users.setdefault((tenant, user), _Shown())
        self._users.move_to_end((tenant, user))
        for item in items:
            shown.items[item] = (model_version, now)
            shown.items.move_to_end(item)
        shown.at = now
        self._expire(shown, now)
        self._drop(now)

    def follow(self, tenant: str, user: str, item: str, timestamp: float, now: float) -> tuple[Followed, str]:
        """What an event at `timestamp` was that arrived at `now`, and the model version that had recommended its item. An event from before
        the recommendation, as a log that is sent later has them, says nothing of it.
        """
        shown = self._users.get((tenant, user))
        if shown is None:
            return Followed.UNKNOWN, ""
        self._expire(shown, now)
        if not -CLOCKS_DIFFER_S <= timestamp - self._first(shown) <= self._window_s or now - shown.at > self._window_s:
            return Followed.UNKNOWN, ""
        version, at = shown.items.get(item, ("", 0.0))
        if not version or not -CLOCKS_DIFFER_S <= timestamp - at <= self._window_s:
            return Followed.NO, ""
        del shown.items[item]
        return Followed.YES, version

    def forget(self, tenant: str | None = None, user: str | None = None) -> None:
        """Forget a user, a tenant's users, or all."""
        for key in [key for key in self._users if tenant in (None, key[0]) and user in (None, key[1])]:
            del self._users[key]

    def _first(self, shown: _Shown) -> float:
        """When the oldest that is remembered was shown; in the end it was `at`."""
        return next((at for _, at in shown.items.values()), shown.at)

    def _expire(self, shown: _Shown, now: float) -> None:
        while shown.items and (len(shown.items) > MOST_ITEMS or now - next(iter(shown.items.values()))[1] > self._window_s):
            shown.items.popitem(last=False)

    def _drop(self, now: float) -> None:
        while self._users and (len(self._users) > self._most or now - next(iter(self._users.values())).at > self._window_s):
            self._users.popitem(last=False)
