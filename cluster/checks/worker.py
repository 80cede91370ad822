"""One thread that makes one call after another, like a stage's engine thread; it may be left behind where a call never ends."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")
Call: TypeAlias = tuple["Future[Any]", Callable[[], Any]]


class Stuck(Exception):
    """Raised where a call has not ended in its time; its thread goes on."""


class Worker:
    """`call` runs a function in the thread. It is a daemon: a backend that hangs does not keep the process from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Call | None] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="backend-check").start()

    def call(self, function: Callable[[], T], limit_s: float) -> T:
        """What the function returns or raises. Raises Stuck where it takes longer than `limit_s`."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        if not wait([future], limit_s).done:
            raise Stuck(f"had not ended after {limit_s:g} s")
        return future.result()

    def close(self) -> None:
        """Let the thread end once it has done what it was given."""
        self._calls.put(None)

    def _run(self) -> None:
        while call := self._calls.get():
            future, function = call
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - every error belongs to the caller
                future.set_exception(error)
