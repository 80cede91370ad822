"""The processes that keep something of users: how far each has carried out the erasures, and which of them have ended.

A silent process may be stopped, and go on later with all that it keeps. It has ended only where it is not in the list of living processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from cluster.fleet.erasures import NO_PLACE, Place


@dataclass(frozen=True, slots=True)
class Question:
    """A question which processes live: the followers that were known, and the log's number, when it was put."""

    heard_of: frozenset[str] = frozenset()
    number: int = -1


@dataclass
class Followers:
    """The followers by their processes' names. `places`: how far each has come, by its last report."""

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
        """The places of all followers that may keep a user of that erasure; None where it is not known which these are."""
        unheard = [name for name, keeps in self._live.items() if keeps and name not in self.places]
        if number > self._question.number or unheard:
            return None
        return [place for name, place in self.places.items() if place != NO_PLACE or self._live.get(name, True)]
