"""Requests that wait: lanes take turns, and a lane's requests go most urgent first. So urgency orders a caller's own requests, and is no
advantage over other callers, which have lanes of their own.
"""

import asyncio
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from itertools import count
from typing import Generic, TypeVar

Request = TypeVar("Request")


class Turns(Generic[Request]):
    """`Request`s are ordered by `<`. A lane's stand in that order in a list: taking one out of thousands takes microseconds."""

    def __init__(self) -> None:
        self._of: OrderedDict[Hashable, list[Request]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def put(self, lane: Hashable, request: Request) -> None:
        insort(self._of.setdefault(lane, []), request)  # type: ignore[call-overload]

    def take(self) -> Request:
        """Take out the next request. Raises StopIteration where none waits."""
        lane, own = next(iter(self._of.items()))
        request = own.pop(0)
        if own:
            self._of.move_to_end(lane)
        else:
            del self._of[lane]
        return request

    def remove(self, lane: Hashable, request: Request) -> None:
        """Take out this request, which waits in the lane. Raises KeyError or ValueError where it does not."""
        own = self._of[lane]
        del own[own.index(request, bisect_left(own, request))]  # type: ignore[call-overload]
        if not own:
            del self._of[lane]

    def give_way(self, lane: Hashable) -> Request | None:
        """Take out the last request of the fullest lane, where that has more than this lane will have with one more."""
        most = max(self._of, key=lambda one: len(self._of[one]), default=lane)
        if len(self._of.get(most, ())) <= len(self._of.get(lane, ())) + 1:
            return None
        last = self._of[most][-1]
        self.remove(most, last)
        return last


class InTurns:
    """Work of which `most()` pieces run at a time, each between `begin` and `end`. Lanes take turns; a lane's own go as they came. For one
    event loop.
    """

    def __init__(self, most: Callable[[], int]) -> None:
        self.running = 0
        self._most, self._numbers = most, count()
        self._waiting = Turns[tuple[int, asyncio.Future[None]]]()

    async def begin(self, lane: Hashable) -> None:
        """Returns when it is the lane's turn. A caller that is cancelled leaves the line, and has nothing to end."""
        if self.begin_at_once():
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.put(lane, numbered := (next(self._numbers), turn))
        self._let_in()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                with suppress(KeyError, ValueError):  # it may have left the line already
                    self._waiting.remove(lane, numbered)
            else:  # its turn came at the same moment
                self.end()
            raise

    def begin_at_once(self) -> bool:
        """Begin where there is room and none waits; returns whether it has begun."""
        free = not self._waiting and self.running < self._most()
        self.running += free
        return free

    def end(self) -> None:
        self.running -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self.running < self._most():
            _, turn = self._waiting.take()
            if not turn.done():
                self.running += 1
                turn.set_result(None)
