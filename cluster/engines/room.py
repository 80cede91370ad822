"""What the backends of a stage share: the model, the stage's rules, and one thread in which engines run, one call after another."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from time import monotonic
from typing import Generic, Protocol, TypeAlias, TypeVar

from cluster.bundle import Bundle
from cluster.engines.stage_rules import StageRules
from cluster.traffic.breaker import BreakerSettings
from cluster.values import SkippedBackend

T = TypeVar("T")
RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")

AskBatch: TypeAlias = Callable[[list[RequestT]], Awaitable[Sequence[AnswerT | SkippedBackend]]]
AskOne: TypeAlias = Callable[[RequestT], Awaitable[AnswerT | SkippedBackend]]
Joined: TypeAlias = tuple[AskOne[RequestT, AnswerT], Callable[[], float]]
"""A function that answers one request, in a batch with others, and one that says how much waits for a batch."""
Join: TypeAlias = Callable[[str, AskBatch[RequestT, AnswerT]], Joined[RequestT, AnswerT]]
"""Makes both for a backend, of its name and a function that answers a batch."""

TURN_S = 0.0005
"""How long one thread may keep the interpreter from another. By Python's default, 5 ms, an event loop with much to do holds up the engine
thread that long at both ends of a batch, and is held up by it.
"""


class Run(Protocol):
    """Does work in some thread, and waits for it."""

    def __call__(self, work: Callable[[], T], /) -> Awaitable[T]: ...


async def beside(work: Callable[[], T]) -> T:
    """Do work in a thread of its own, not in the engine thread nor in one of a pool: where it never ends, other work has its own."""
    return await asyncio.wrap_future(apart(work))


def _done(work: Callable[[], T]) -> T:
    """The work's result. Errors that asyncio's futures do not take become RuntimeErrors: a StopIteration, as of a `next` that finds
    nothing, would leave the future open for good; a SystemExit, as of a library that parses a command line, would end the event loop; a
    CancelledError, as of a task or a future of the engine's own, would end the task that waits, as if that had been cancelled. A thread
    cannot be.
    """
    try:
        return work()
    except (StopIteration, SystemExit, asyncio.CancelledError, CancelledError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def apart(work: Callable[[], T]) -> Future[T]:
    """Do work in a thread of its own, which may never end: it keeps neither other work nor the end of the process waiting."""
    doing: Future[T] = Future()
    doing.set_running_or_notify_cancel()  # what stops waiting for it does not end it

    def do() -> None:
        try:
            doing.set_result(_done(work))
        except BaseException as error:  # noqa: BLE001 - every error belongs to the caller
            doing.set_exception(error)

    threading.Thread(target=do, name="apart", daemon=True).start()
    return doing


class EngineThread:
    """`run` does one piece of work after another, so that the event loop stays free and no engine is called twice at a time."""

    def __init__(self) -> None:
        sys.setswitchinterval(TURN_S)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self.busy_s = 0.0
        self.pending = 0
        """Pieces of work that run or wait in the thread, those too that no caller waits for any longer."""
        self._counting = threading.Lock()

    async def run(self, work: Callable[[], T]) -> T:
        try:
            working = self._pool.submit(_done, work)
        except RuntimeError:  # the stage was closed meanwhile: what is under way ends in another thread
            return await beside(work)
        self._count(1)
        working.add_done_callback(lambda _: self._count(-1))  # in the thread: a caller that leaves ends its wait, not the work
        return await asyncio.wrap_future(working)

    async def compute(self, work: Callable[[], T]) -> T:
        """As `run`, and counted in `busy_s`: the work for requests, of which more replicas could take some."""
        return await self.run(lambda: self._timed(work))

    async def compute_here(self, work: Callable[[], T]) -> T:
        """As `compute`, on the event loop: for what is brief, while nothing is `pending`."""
        return self._timed(work)

    def close(self) -> None:
        """Returns when the work that runs has ended."""
        self._pool.shutdown()

    def _count(self, change: int) -> None:
        with self._counting:
            self.pending += change

    def _timed(self, work: Callable[[], T]) -> T:
        began = monotonic()
        try:
            return work()
        finally:
            self.busy_s += monotonic() - began


@dataclass(slots=True, eq=False)
class EngineRoom(Generic[RequestT, AnswerT]):
    """`join` puts requests to one backend into batches; None: a batch is what the controller is called with.

    `loads_on_demand`: a call loads the backend it needs, until refreshes do so beside the calls.
    """

    bundle: Bundle
    rules: StageRules[RequestT, AnswerT]
    breaker: BreakerSettings
    retries: int
    clock: Callable[[], float]
    join: Join[RequestT, AnswerT] | None = None
    loads_on_demand: bool = True
    thread: EngineThread = field(default_factory=EngineThread)
