"""A doubly linked list of objects in the order of their last use; every operation takes constant time."""

from collections.abc import Iterator
from typing import Any, Generic, TypeVar, cast


class Link:
    """An object that can be in one list. A link that is in none points to none: one that pointed to itself would be freed by the garbage
    collector alone, sooner or later.
    """

    __slots__ = ("after", "before")

    def __init__(self) -> None:
        self.before: Any = None
        self.after: Any = None

    @property
    def linked(self) -> bool:
        return self.after is not None


LinkT = TypeVar("LinkT", bound=Link)


class LruList(Generic[LinkT]):
    """Links, the least recently used first. They form a ring with a link of the list's own, so that the ends need no special cases."""

    def __init__(self) -> None:
        self._end = Link()
        self._end.before = self._end.after = self._end
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[LinkT]:
        link = self._end.after
        while link is not self._end:
            yield cast(LinkT, link)  # only `push` puts links here
            link = link.after

    def push(self, link: LinkT) -> None:
        """Add a link as the most recently used. Raises ValueError where it is in a list already."""
        if link.linked:
            raise ValueError(f"{link} stands in a list already; touch it, or remove it first")
        last = self._end.before
        link.before, link.after = last, self._end
        last.after = self._end.before = link
        self._length += 1

    def remove(self, link: LinkT) -> None:
        """Take a link out. Raises ValueError where it is in no list."""
        if not link.linked:
            raise ValueError(f"{link} stands in no list")
        link.before.after, link.after.before = link.after, link.before
        link.before = link.after = None
        self._length -= 1

    def touch(self, link: LinkT) -> None:
        """Make a link the most recently used."""
        self.remove(link)
        self.push(link)

    def pop(self) -> LinkT | None:
        """Take out the least recently used link; None where the list is empty."""
        first = next(iter(self), None)
        if first is not None:
            self.remove(first)
        return first
