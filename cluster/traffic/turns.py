"""Requests that wait: callers take turns, and each caller's requests go most urgent first. So urgency orders a caller's own requests, and
is no advantage over other callers.
"""

import heapq
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Request = TypeVar("Request")


class Turns(Generic[Request]):
    """`Request`s are ordered by `<`."""

    def __init__(self) -> None:
        self._of: OrderedDict[Hashable, list[Request]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def put(self, caller: Hashable, request: Request) -> None:
        heapq.heappush(self._of.setdefault(caller, []), request)  # type: ignore[type-var]

    def take(self) -> Request:
        """Take out the next request. Raises StopIteration where none waits."""
        caller, own = next(iter(self._of.items()))
        request: Request = heapq.heappop(own)  # type: ignore[type-var]
        if own:
            self._of.move_to_end(caller)
        else:
            del self._of[caller]
        return request

    def remove(self, caller: Hashable, request: Request) -> None:
        """Take out this request of the caller's, which waits."""
        own = self._of[caller]
        own.remove(request)
        heapq.heapify(own)  # type: ignore[type-var]
        if not own:
            del self._of[caller]

    def give_way(self, caller: Hashable) -> Request | None:
        """Take out the last request of whichever caller has the most, where those are more than this caller's will be with one more."""
        most = max(self._of, key=lambda one: len(self._of[one]), default=caller)
        if len(self._of.get(most, ())) <= len(self._of.get(caller, ())) + 1:
            return None
        last: Request = max(self._of[most])  # type: ignore[type-var]
        self.remove(most, last)
        return last
