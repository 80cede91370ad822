"""What an object keeps in memory, wherever in it that stands."""

from collections.abc import Iterator
from typing import Any


def strings_in(*things: Any) -> set[str]:
    """All strings that they hold, as far as they are made of containers and of objects of the cache."""
    found, met, waiting = set[str](), set[int](), list(things)
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, str):
            found.add(thing)
        elif id(thing) not in met:
            met.add(id(thing))
            waiting += _parts_of(thing)
    return found


def _parts_of(thing: Any) -> Iterator[Any]:
    if isinstance(thing, dict):
        yield from thing
        yield from thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        yield from thing
    elif type(thing).__module__.startswith("cluster.cache"):
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()) if hasattr(thing, name)]
        yield from (getattr(thing, name) for name in slots)
        yield from getattr(thing, "__dict__", {}).values()
