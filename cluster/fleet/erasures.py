"""The users to erase, until every process that keeps something of users has erased them.

    operator -> ErasureLog.add(tenant, user) -> number ; reached(number) once every follower is past it
    follower -> since(the place it has come to) -> News: the erasures since, or: forget everything

A log is held in memory. Followers recognise a new log by its epoch. A follower of another log, or one so far behind that this log has
dropped erasures it missed, forgets everything: that may cost time, never an erasure.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from uuid import uuid4

LONGEST = 10_000


@dataclass(frozen=True, slots=True)
class Erasure:
    """Forget this user of this tenant; with `user` None all of the tenant's users, with `tenant` None all users."""

    number: int
    tenant: str | None
    user: str | None


@dataclass(frozen=True, slots=True)
class Place:
    """How far a follower has come, in the log of that epoch. The default is of no log."""

    epoch: str = ""
    number: int = 0


NO_PLACE = Place()
"""The place of a follower that has just started."""


@dataclass(frozen=True, slots=True)
class News:
    """What to do in order to come to `place`: carry out the erasures, in any order, or forget everything where the track is lost."""

    place: Place
    erasures: tuple[Erasure, ...] = ()
    lost_track: bool = False


class ErasureLog:
    """Keeps the last `longest` erasures. `started_at` is in seconds since 1970: numbers count milliseconds since then, so that those of a
    later log are greater, and a number of an earlier one is reached once every follower has forgotten everything.
    """

    def __init__(self, started_at: float = 0.0, longest: int = LONGEST, epoch: str | None = None) -> None:
        self._epoch, self._longest = epoch or uuid4().hex, longest
        self._last = self._dropped = int(started_at * 1000)
        self._kept: deque[Erasure] = deque()

    def add(self, tenant: str | None, user: str | None, *, now: float) -> int:
        """Add an erasure; returns its number. Raises ValueError at a user without a tenant: several tenants may have users of that name."""
        if user is not None and tenant is None:
            raise ValueError(f"the tenant of user {user!r} is missing; name it, or neither of them to erase all users")
        self._last = max(self._last + 1, int(now * 1000))
        self._kept.append(Erasure(self._last, tenant, user))
        if len(self._kept) > self._longest:
            self._dropped = self._kept.popleft().number
        return self._last

    def since(self, place: Place) -> News:
        """The erasures that a follower which has come to `place` has not carried out yet."""
        if place.epoch != self._epoch or place.number < self._dropped:
            return News(self.place, lost_track=True)
        missed = takewhile(lambda one: one.number > place.number, reversed(self._kept))
        return News(self.place, tuple(missed)[::-1])

    @property
    def place(self) -> Place:
        """The end of the log."""
        return Place(self._epoch, self._last)

    def reached(self, number: int, places: Iterable[Place]) -> bool:
        """Whether followers at these places have all carried out the erasure of that number."""
        return all(place.epoch == self._epoch and place.number >= number for place in places)
