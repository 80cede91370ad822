"""The users to erase, until every process that keeps something of users has erased them.

    operator -> erase(tenant, user) -> number ; erased(number) once every follower has forgotten the user
    follower -> report(the place it has come to) ; since(that place) -> News: the erasures since, or: forget everything
    Serve -> answered(question(), the processes that live) -> which have ended

A follower is a process that keeps something of users. One that is silent may be stopped, and go on later with all that it keeps: it has
ended only where it is not in the list of living processes.
A log is held in memory. Followers recognise a new log by its epoch. A follower of another log, or one so far behind that this log has
dropped erasures it missed, forgets everything: that may cost time, never an erasure.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from math import inf
from uuid import uuid4

LONGEST = 10_000


@dataclass(frozen=True, slots=True)
class Erasure:
    """Forget this user of this tenant; with `user` None all of the tenant's users, with `tenant` None all users. With `answers_only`,
    only the answers that gateways keep of them.
    """

    number: int
    tenant: str | None
    user: str | None
    answers_only: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """How far a follower has come, in the log of that epoch. The default is of no log."""

    epoch: str = ""
    number: int = 0


NO_PLACE = Place()
"""The place of a follower that has just started."""


@dataclass(frozen=True, slots=True)
class News:
    """What to do in order to come to `place`: carry out the erasures, in any order; or, where the track is lost, forget everything. The
    erasures are then those that requests under way may have begun before: what these keep has to be erased later.
    """

    place: Place
    erasures: tuple[Erasure, ...] = ()
    lost_track: bool = False


class ErasureLog:
    """Keeps the last `longest` erasures until they expire. `started_at` is in seconds since 1970: numbers count milliseconds since then, so
    that those of a later log are greater, and a number of an earlier one is reached once every follower has forgotten everything.
    """

    def __init__(self, started_at: float = 0.0, longest: int = LONGEST, epoch: str | None = None) -> None:
        self._epoch, self._longest = epoch or uuid4().hex, longest
        self._last = self._dropped = int(started_at * 1000)
        self._kept: deque[Erasure] = deque()

    def add(self, tenant: str | None, user: str | None, *, now: float, answers_only: bool = False) -> int:
        """Add an erasure; returns its number. Raises ValueError at a user without a tenant: several tenants may have users of that name."""
        if user is not None and tenant is None:
            raise ValueError(f"the tenant of user {user!r} is missing; name it, or neither of them to erase all users")
        self._last = max(self._last + 1, int(now * 1000))
        self._kept.append(Erasure(self._last, tenant, user, answers_only))
        if len(self._kept) > self._longest:
            self._drop_oldest()
        return self._last

    def expire(self, before: float) -> None:
        """Drop the erasures from before that time, in seconds since 1970."""
        while self._kept and self._kept[0].number < before * 1000:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self._dropped = self._kept.popleft().number

    def since(self, place: Place, *, under_way_since: float = inf) -> News:
        """The erasures that a follower which has come to `place` has not carried out yet. `under_way_since`: no request that is under way
        began earlier, in seconds since 1970.
        """
        lost = place.epoch != self._epoch or place.number < self._dropped
        after = under_way_since * 1000 if lost else place.number
        missed = takewhile(lambda one: one.number > after, reversed(self._kept))
        return News(self.place, tuple(missed)[::-1], lost)

    @property
    def place(self) -> Place:
        """The end of the log."""
        return Place(self._epoch, self._last)

    def reached(self, number: int, places: Iterable[Place]) -> bool:
        """Whether followers at these places have all carried out the erasure of that number."""
        return all(place.epoch == self._epoch and place.number >= number for place in places)


@dataclass(frozen=True, slots=True)
class Question:
    """A question which processes live: the followers that were known, and the log's number, when it was put."""

    heard_of: frozenset[str] = frozenset()
    number: int = -1


class Erasures:
    """The erasures, and how far each follower, named as its process, has carried them out. Plain Python, for one thread at a time. `now`:
    when the log begins.
    """

    def __init__(self, *, now: float = 0.0) -> None:
        self._log = ErasureLog(now)
        self._places: dict[str, Place] = {}
        self._question, self._live = Question(), dict[str, bool]()

    @property
    def place(self) -> Place:
        """The place of a follower that has forgotten all that it should."""
        return self._log.place

    def erase(self, tenant: str | None, user: str | None, *, now: float, answers_only: bool = False) -> int:
        """Have a user forgotten everywhere, or all users of a tenant, or all users; with `answers_only`, only the answers that gateways
        keep of them. Returns the number to pass to `erased`.
        """
        return self._log.add(tenant, user, now=now, answers_only=answers_only)

    def expire(self, before: float) -> None:
        """Keep no user's id that is older, in seconds since 1970: a follower that has been silent since then forgets everything."""
        self._log.expire(before)

    def report(self, follower: str, place: Place) -> None:
        """Take how far a follower has come (Place(): it does not know)."""
        self._places[follower] = place

    def since(self, place: Place, *, under_way_since: float = inf) -> News:
        """What a follower that has come to `place` has yet to forget; as in `ErasureLog`."""
        return self._log.since(place, under_way_since=under_way_since)

    def question(self) -> Question:
        """What to ask of whatever starts the processes, and to pass to `answered` with what it says."""
        return Question(frozenset(self._places), self.place.number)

    def answered(self, question: Question, live: Mapping[str, bool]) -> None:
        """Take which processes live: name -> whether it may keep something of users, as one that is still starting does not."""
        self._places = {name: place for name, place in self._places.items() if name in live or name not in question.heard_of}
        self._question, self._live = question, dict(live)

    def erased(self, number: int) -> bool:
        """Whether every live process that keeps something of users, even a silent one, has reported that this erasure is carried out.

        False until a `question` that was put after the erasure is answered, and until all followers in the answer have reported.
        """
        unheard = [name for name, keeps in self._live.items() if keeps and name not in self._places]
        if number > self._question.number or unheard:
            return False
        places = [place for name, place in self._places.items() if place != NO_PLACE or self._live.get(name, True)]
        return self._log.reached(number, places)
