"""Time that a test need not wait for: an event loop whose clock jumps to the next timer as soon as nothing is left to do.

    pytestmark = pytest.mark.virtual_time      # or a decorator of one asynchronous test

    async def test_a_call_that_stalls_is_given_up_after_ten_seconds():
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await patient(asyncio.sleep(3600))
        assert time.monotonic() - began == pytest.approx(10)     # at once, and as exact on a busy machine

While such a loop runs, `time.monotonic`, `time.perf_counter` and `time.time` tell its time to whatever runs on it. Computing takes no
time at all there, and neither does work in the loop's threads, which is waited for with the clock standing still. A test that talks
over a real socket, or has a thread wait for a timer, needs a real loop.
"""

import asyncio
import selectors
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar, TypeVarTuple

T, Ts = TypeVar("T"), TypeVarTuple("Ts")
WRAP_FUTURE = asyncio.wrap_future
REAL = {name: getattr(time, name) for name in ("monotonic", "perf_counter", "time")}


class VirtualLoop(asyncio.SelectorEventLoop):
    """Ready callbacks run as in every loop; where none is ready and no thread works for it, the next timer is due now.

    `began`: what its clocks say at first, for runs that are the same to the last bit; without it, what the real ones say.
    """

    def __init__(self, began: float | None = None) -> None:
        self.passed_s = 0.0
        self._working: set[asyncio.Future[Any]] = set()
        self._began = {name: clock() if began is None else began for name, clock in REAL.items()}
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        return self.read("monotonic")

    def read(self, clock: str) -> float:
        """What that clock of the module `time` says here."""
        return self._began[clock] + self.passed_s

    def wait_s(self, until_next_timer_s: float | None) -> float | None:
        """How long to wait, in real time, for a thread or another process before the clock jumps; None: until one is done."""
        return None if until_next_timer_s is None or (until_next_timer_s and self._working) else 0.0

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        return self.works(super().run_in_executor(executor, func, *args))

    def works(self, future: asyncio.Future[T]) -> asyncio.Future[T]:
        """The future as it is: that of work in a thread, for which the clock stands still."""
        self._working.add(future)
        future.add_done_callback(self._working.discard)
        return future


class _JumpingSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """`timeout`: 0 where callbacks are ready, None where there is no timer either."""
        events = super().select(self._loop.wait_s(timeout))
        if not events and timeout:
            self._loop.passed_s += timeout
        return events


class _Clock:
    """A function of the module `time`, told by the loop that runs. It is pickled as that function is, by its name."""

    __module__ = "time"

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self._real = REAL[name]

    def __call__(self) -> float:
        loop = asyncio._get_running_loop()  # noqa: SLF001 - the public one raises where no loop runs
        return loop.read(self.__name__) if isinstance(loop, VirtualLoop) else self._real()

    def __reduce__(self) -> str:
        return self.__name__


def _wrap_future(future: "Future[T] | asyncio.Future[T]", *, loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Future[T]:
    """As `asyncio.wrap_future`, of work in a thread that the loop did not start."""
    wrapped = WRAP_FUTURE(future, loop=loop)
    running = asyncio._get_running_loop()  # noqa: SLF001 - the public one raises where no loop runs
    return running.works(wrapped) if isinstance(running, VirtualLoop) else wrapped


def install() -> None:
    """Have the clocks of the module `time` tell the running loop's time; to be called before anything imports them by name."""
    for name in REAL:
        setattr(time, name, _Clock(name))
    asyncio.wrap_future = _wrap_future
