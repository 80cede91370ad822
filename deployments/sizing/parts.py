"""Parts of memory, and the processes that hold them."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, get_args

MIB = 2**20
Place: TypeAlias = Literal["host", "gpu"]
When: TypeAlias = Literal["start", "filled", "passing", "mapped"]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a process's memory. `when`: start, taken as soon as the process serves; filled, a store that is full; passing, the most
    that requests under way take; mapped, programs' files, which processes of a machine share and the system can take back. `key`: the
    setting by which the part is so large; `users`: how many users it holds, where it holds users.
    """

    name: str
    bytes: int
    when: When = "start"
    place: Place = "host"
    key: str = ""
    users: int | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """A process, and how many of its kind there are (`count`)."""

    name: str
    count: int
    parts: tuple[Part, ...]

    def bytes(self, *when: When, place: Place = "host") -> int:
        """The memory of one such process, at these times; without `when`, of all parts."""
        return sum(part.bytes for part in self.parts if part.place == place and (not when or part.when in when))


@dataclass(frozen=True, slots=True)
class Plan:
    """All processes of a configuration, on one machine."""

    model: str
    processes: tuple[Process, ...]

    def bytes(self, *when: When, place: Place = "host") -> int:
        """The memory of all processes together; mapped files count once, as the most that any process maps."""
        return sum(map(partial(self._bytes, place), when or get_args(When)))

    def _bytes(self, place: Place, when: When) -> int:
        of_each = [one.count * one.bytes(when, place=place) for one in self.processes]
        return sum(of_each) if when != "mapped" else max((one.bytes(when, place=place) for one in self.processes), default=0)

    def largest(self, *when: When) -> list[tuple[Process, Part]]:
        """The three parts that take the most of the host's memory, over all processes that have them."""
        held = ((one, part) for one in self.processes for part in one.parts if part.place == "host" and part.when in when)
        return sorted(held, key=lambda pair: -pair[0].count * pair[1].bytes)[:3]


def present(parts: Iterable[Part]) -> tuple[Part, ...]:
    """The parts that take any memory."""
    return tuple(part for part in parts if part.bytes)
