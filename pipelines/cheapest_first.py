"""Work in one thread, the cheapest of what waits first: little work does not wait behind much that was asked for before."""

from asyncio import Future, wrap_future
from collections.abc import Callable
from concurrent import futures
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")


class CheapestFirst:
    """One thread of this `name`. What waits and is cancelled is never begun."""

    def __init__(self, name: str) -> None:
        self._thread = futures.ThreadPoolExecutor(1, name)
        self._waiting = list[tuple[int, int, futures.Future[Any], Callable[[], Any]]]()
        self._numbers = count()

    def run(self, cost: int, work: Callable[[], T]) -> Future[T]:
        """The result of `work`, for the running event loop; `cost` in any unit, the same for all. Of equal costs the first goes first."""
        result = futures.Future[T]()
        heappush(self._waiting, (cost, next(self._numbers), result, work))  # in one step, as the pop is: the numbers differ
        self._thread.submit(self._next)
        return wrap_future(result)

    def _next(self) -> None:
        _, _, result, work = heappop(self._waiting)
        if not result.set_running_or_notify_cancel():
            return
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the caller's to handle
            result.set_exception(error)
