"""How an engine is called: two adapters with one interface.

    Queue     an engine with `ainfer`: request by request on the event loop, many at a time; it may stream
    Batches   any other: a batch at a time, in a thread, or on the event loop where the call is brief

Each request gets its answer, checked by the stage's rules, or the exception that says why there is none.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from time import thread_time
from typing import Any, ClassVar, Generic, TypeVar

from cluster.engines.room import Run
from cluster.engines.skipped import reason_of
from cluster.engines.stage_rules import StageRules
from cluster.errors import BackendFailed, DeadlineExceeded
from cluster.traffic.budget import in_time

T = TypeVar("T")
RequestT = TypeVar("RequestT")
AnswerT = TypeVar("AnswerT")
GAVE_UP = "it gave the request up by itself"


class Nonsense(Exception):
    """An answer that breaks the stage's rules, and how."""


@dataclass(frozen=True, slots=True)
class Reply(Generic[AnswerT]):
    """What one call of an engine came to; `duration_s` leaves out the time before the thread was free. `spent_s`: the processor time of
    the thread that called it.
    """

    outcomes: Sequence[AnswerT | Exception]
    duration_s: float
    spent_s: float = 0.0


class Engine(Generic[RequestT, AnswerT]):
    """An instance of a backend's class. `rules` are the stage's; `known_good` is a sample that it has answered, never a user's
    request, which is not kept beyond its answer.
    """

    queued: ClassVar[bool]

    def __init__(self, backend: Any, rules: StageRules[RequestT, AnswerT], clock: Callable[[], float]) -> None:
        self.backend, self._rules, self._clock = backend, rules, clock
        self.known_good: RequestT | None = None
        self.late_in_a_row = self.answered = 0

    async def ask(self, requests: Sequence[RequestT], run: Run) -> Reply[AnswerT]:
        """The outcome of each request, in order; `run` does the work of an engine that needs a thread."""
        raise NotImplementedError

    @property
    def brief(self) -> bool:
        """Whether its calls always return, and compute in the thread that calls; see cluster.protocols."""
        return getattr(self.backend, "brief", False) is True

    def rows(self, requests: Sequence[RequestT], otherwise: int) -> int:
        """How many rows it would compute for these requests now; `otherwise` where it does not say."""
        try:
            return int(self.backend.rows(requests)) if hasattr(self.backend, "rows") else otherwise
        except Exception:  # noqa: BLE001 - what it says is a guess; a request at fault breaks its call, where the reason is told
            return otherwise

    def is_alive(self) -> bool:
        return not self.loss()

    def loss(self) -> str:
        """Why the engine counts as lost; "" where it is alive."""
        try:
            alive = self.optional("alive") is not False
        except Exception as error:  # noqa: BLE001 - an engine that cannot even say so is not
            return f"has lost its engine: asked whether it is alive, it broke: {reason_of(error)}"
        return "" if alive else "has lost its engine"

    def optional(self, name: str, *args: Any) -> Any:
        """What an optional method of the backend returns; None where the backend lacks it."""
        method = getattr(self.backend, name, None)
        return method(*args) if method else None

    def _checked(self, request: RequestT, answer: AnswerT, *, whole: bool = True) -> AnswerT | Exception:
        if isinstance(answer, DeadlineExceeded):  # what a backend gives for the late ones of a batch
            return answer
        problem = (self._rules.problem if whole else self._rules.nonsense)(request, answer)
        return Nonsense(problem) if problem else answer


class Batches(Engine[RequestT, AnswerT]):
    """An engine that takes a batch at a time."""

    queued = False

    async def ask(self, requests: Sequence[RequestT], run: Run) -> Reply[AnswerT]:
        return await run(lambda: self._called(requests))

    def _called(self, requests: Sequence[RequestT]) -> Reply[AnswerT]:
        began, used = self._clock(), thread_time()
        outcomes = self._outcomes(requests)
        return Reply(outcomes, self._clock() - began, thread_time() - used)

    def _outcomes(self, requests: Sequence[RequestT]) -> Sequence[AnswerT | Exception]:
        try:
            answers = self.backend.batch_infer(requests)
        except asyncio.CancelledError:  # of an event loop of its own: a thread cannot be cancelled
            return [BackendFailed(GAVE_UP)] * len(requests)
        except Exception as error:  # noqa: BLE001 - any error of an engine is a reason to ask the next one
            return [error] * len(requests)
        except SystemExit as error:
            return [_no_end(error)] * len(requests)
        if not isinstance(answers, list | tuple) or len(answers) != len(requests):
            given = f"{len(answers)} answers" if isinstance(answers, list | tuple) else f"a {type(answers).__name__}"
            return [Nonsense(f"returned {given} for {len(requests)} requests")] * len(requests)
        return [self._checked(request, answer) for request, answer in zip(requests, answers, strict=True)]


class Queue(Engine[RequestT, AnswerT]):
    """An engine with a queue of its own. `answered`: calls that it answered; `late_in_a_row`: calls given up since the last of them, by
    their deadline or by their caller.
    """

    queued = True

    @property
    def streams(self) -> bool:
        return hasattr(self.backend, "astream")

    async def ask(self, requests: Sequence[RequestT], run: Run) -> Reply[AnswerT]:  # noqa: ARG002 - it takes no thread
        began = self._clock()
        outcomes = await together([self._one(request) for request in requests])
        return Reply(outcomes, self._clock() - began)

    async def stream(self, request: RequestT) -> AsyncGenerator[AnswerT | Exception, None]:
        """What the engine finds as it finds it, lastly the exception that ended it, if one did, or says what all of it lacks."""
        found = list[AnswerT]()
        try:
            async with ended(self.backend.astream(request)) as pieces:
                async for piece in pieces:
                    outcome = self._checked(request, piece, whole=False)
                    yield outcome
                    if isinstance(outcome, Exception):
                        return
                    found.append(piece)
            self._has_answered()
            if problem := self._rules.lacking(request, found):
                yield Nonsense(problem)
        except (DeadlineExceeded, asyncio.CancelledError) as error:
            yield self._late(error)
        except Exception as error:  # noqa: BLE001 - any error of an engine is a reason to ask the next one
            yield error
        except SystemExit as error:
            yield _no_end(error)

    async def _one(self, request: RequestT) -> AnswerT | Exception:
        try:
            answer = await self._in_time(request)
        except (DeadlineExceeded, asyncio.CancelledError) as error:
            return self._late(error)
        except Exception as error:  # noqa: BLE001 - any error of an engine is a reason to ask the next one
            return error
        except SystemExit as error:
            return _no_end(error)
        self._has_answered()
        return self._checked(request, answer)

    async def _in_time(self, request: RequestT) -> AnswerT:
        """The engine's answer. Raises DeadlineExceeded at the request's deadline: in a batch, others wait for its end."""
        deadline: float | None = getattr(request, "deadline", None)
        ask = partial(self.backend.ainfer, request)
        answer: AnswerT = await (ask() if deadline is None else in_time(ask, deadline - self._clock()))
        return answer

    def _has_answered(self) -> None:
        self.answered, self.late_in_a_row = self.answered + 1, 0

    def _late(self, error: DeadlineExceeded | asyncio.CancelledError) -> Exception:
        """The error to report for a call that was late. Raises CancelledError again where the caller cancelled the call. Where it did not,
        the engine broke: it may have given up a task or a connection of its own.
        """
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling():
            return BackendFailed(GAVE_UP)
        self.late_in_a_row += 1
        if isinstance(error, DeadlineExceeded):
            return error
        raise error


def _no_end(error: SystemExit) -> RuntimeError:
    """An error in place of a SystemExit, which would end the process, and with it the backends that could answer."""
    return RuntimeError(f"SystemExit: {error}")


@asynccontextmanager
async def ended(pieces: AsyncIterator[T]) -> AsyncGenerator[AsyncIterator[T], None]:
    """As `aclosing`, for any async iterator: one that is no generator has nothing to close."""
    try:
        yield pieces
    finally:
        if hasattr(pieces, "aclose"):
            await pieces.aclose()


async def together(awaited: Sequence[Awaitable[T]]) -> list[T]:
    """The results in order, awaited at the same time; a single one costs no task."""
    return [await awaited[0]] if len(awaited) == 1 else list(await asyncio.gather(*awaited))
