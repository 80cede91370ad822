"""Requests that wait: callers take turns, and each one's own go most urgent first. So urgency orders a caller's requests, and gives it
nothing over others.
"""

import heapq
from collections import OrderedDict
from typing import Generic, TypeVar

Request = TypeVar("Request")


class Turns(Generic[Request]):
    """`Request`s are ordered by `<`."""

    def __init__(self) -> None:
        self._of: OrderedDict[bytes, list[Request]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def put(self, caller: bytes, request: Request) -> None:
        heapq.heappush(self._of.setdefault(caller, []), request)  # type: ignore[type-var]

    def take(self) -> Request:
        """The next request. Raises StopIteration where none waits."""
        caller, own = next(iter(self._of.items()))
        request: Request = heapq.heappop(own)  # type: ignore[type-var]
        if own:
            self._of.move_to_end(caller)
        else:
            del self._of[caller]
        return request
