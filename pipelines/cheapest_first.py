"""Work in one thread, the cheapest of what waits first: little work does not wait behind much that was asked for before."""

from asyncio import Future, wrap_future
from collections.abc import Callable
from concurrent import futures
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")


class CheapestFirst:
    """One thread of this `name`. Cheaper work that comes later overtakes only until work worth the waiting one's own cost has been done.
    Work cancelled while it waits is released at once.
    """

    def __init__(self, name: str) -> None:
        self._thread = futures.ThreadPoolExecutor(1, name)
        self._waiting = list[tuple[int, int, int, futures.Future[Any], list[Callable[[], Any]]]]()
        self._numbers, self._done = count(), 0

    def run(self, cost: int, work: Callable[[], T]) -> Future[T]:
        """The result of `work`, for the running event loop; `cost` in any unit, the same for all. Of equal costs the first goes first."""
        result, once = futures.Future[T](), [work]
        result.add_done_callback(lambda _: once.clear())
        heappush(self._waiting, (self._done + cost, next(self._numbers), cost, result, once))  # in one step, as the pop is: numbers differ
        self._thread.submit(self._next)
        return wrap_future(result)

    def _next(self) -> None:
        _, _, cost, result, once = heappop(self._waiting)
        if not result.set_running_or_notify_cancel():
            return
        self._done += cost
        try:
            result.set_result(once.pop()())
        except BaseException as error:  # noqa: BLE001 - the caller's to handle
            result.set_exception(error)
