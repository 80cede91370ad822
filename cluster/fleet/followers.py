"""The processes that keep something of users: how far each has carried out the erasures, and which of them have ended.

A process that says nothing may be stopped, and go on with all it keeps. It has ended only where the list of those that live lacks it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.fleet.erasures import NO_PLACE, Place


@dataclass(frozen=True, slots=True)
class Question:
    """Which processes live? Put when these followers had been heard of, and the log had come to this number."""

    heard_of: frozenset[str] = frozenset()
    number: int = -1


@dataclass
class Followers:
    """By the name of the process. `places` is how far each has come, by what it said last."""

    places: dict[str, Place] = field(default_factory=dict)
    _question: Question = Question()
    _live: Mapping[str, bool] = field(default_factory=dict)

    def question(self, number: int) -> Question:
        """What to ask whatever starts the processes; the answer counts for erasures up to `number`."""
        return Question(frozenset(self.places), number)

    def answered(self, question: Question, live: Mapping[str, bool]) -> None:
        """Take which processes live: name -> whether it may keep something of users, as one that is still starting does not."""
        self.places = {name: place for name, place in self.places.items() if name in live or name not in question.heard_of}
        self._question, self._live = question, live

    def waited_for(self, number: int) -> list[Place] | None:
        """Where those stand that may keep a user of that erasure; None where it is not known which they are."""
        unheard = [name for name, keeps in self._live.items() if keeps and name not in self.places]
        if number > self._question.number or unheard:
            return None
        return [place for name, place in self.places.items() if place != NO_PLACE or self._live.get(name, True)]
