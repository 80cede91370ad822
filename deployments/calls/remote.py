"""Call another deployment for one answer or a stream. Every failure is raised as a BackendError.

`StageCaller` asks a stage for each request; cluster.traffic.attempts says when it calls again. `ask` is for all else: the switchboard,
the start of a replica, and each request that the ZeroMQ door passes on to a gateway. It has no retry budget.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any

from grpc.aio import AioRpcError
from msgspec.structs import replace
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.engines.skipped import kind_of
from cluster.errors import BackendError, BackendFailed, BackendUnavailable, DeadlineExceeded, GenrecError
from cluster.few_lines import TOLD_EVERY_S, FewLines
from cluster.traffic.attempts import GRACE_S, Attempts, Rules
from cluster.traffic.hedging import Hedge
from cluster.traffic.paces import refused
from cluster.traffic.retry_budget import RetryBudget
from cluster.traffic.user_router import OfUser
from deployments.calls.mailbox import Mailbox

TRIES = 3
ENDED = object()
logger = logging.getLogger("ray.serve")
_lines = defaultdict[str, FewLines](lambda: FewLines(most=1, within_s=TOLD_EVERY_S))
"""By deployment: why none of its replicas could be reached, as Ray says it."""


async def ask(handle: DeploymentHandle[Any], method: str, *args: Any, within_s: float, tries: int = 1) -> Any:
    """The answer of `method`. A replica that dies during the call costs a try; `within_s` is for all tries together.

    Raises the callee's error if that is a GenrecError, BackendFailed for any other error of the callee, and BackendUnavailable if no
    replica could be reached or answered in time.
    """
    deadline = monotonic() + within_s
    with _errors_of(handle, method, within_s):
        for _ in range(tries - 1):
            with suppress(RayActorError):
                return await _once(handle, method, args, deadline)
        return await _once(handle, method, args, deadline)


class StageCaller:
    """Asks the replicas of one stage's deployment. One for each handle and process. `within_s`: seconds from the call on.

    Any call is repeated at another replica if its replica died, stalls or gave a `poor` answer, such as that all engines are broken. That
    of a `repeatable` stage is hedged, if `hedge` is given, and repeated after any other error of its replica's, too. With a `mailbox`,
    waiting requests share a call, and none is hedged where its only replica would get the copy. Errors are raised as by `ask`.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        retries: RetryBudget | None = None,
        hedge: Hedge | None = None,
        mailbox: Mailbox | None = None,
        *,
        repeatable: bool = False,
        poor: Callable[[Any], bool] = lambda _: False,
    ) -> None:
        self._handle, self._rules, self._mailbox = handle, Rules(retries or RetryBudget(), hedge), mailbox
        self._repeatable, self._poor = repeatable, poor
        self.requests = self.copies = 0

    @property
    def figures(self) -> dict[str, float]:
        """Counts since the start. `copies`: calls beyond the first of each request; `refused`: copies that the retry budget denied."""
        hedged, refused = self._rules.hedge.sent if self._rules.hedge else 0, self._rules.retries.refused
        return {"requests": self.requests, "copies": self.copies, "hedges": hedged, "refused": refused}

    async def ask(self, request: object, *, within_s: float) -> Any:
        """The first replica's answer."""

        def send(number: int, left_s: float) -> Awaitable[Any]:
            self.copies += number > 0
            sent = copy_of(request, number)
            if self._mailbox is not None:
                return self._mailbox.send(sent, left_s)
            return _once(self._handle, "answer", (sent, left_s), monotonic() + left_s + GRACE_S)

        def better(call: asyncio.Future[Any]) -> bool:
            error = call.exception()
            if found := _died(error) or (self._repeatable and _broke(error)) if error else self._poor(call.result()):
                _note_refused(request)
            return found

        self.requests += 1
        with _errors_of(self._handle, "answer", within_s):
            hedged = self._repeatable and (self._mailbox is None or self._mailbox.replica_count != 1)
            return await Attempts(send, better, self._rules, within_s=within_s, tries=TRIES, hedged=hedged).answer()

    async def ask_stream(self, request: object, *, within_s: float) -> AsyncGenerator[Any, None]:
        """The pieces of a streamed answer. The call is repeated if its replica dies or stalls before the first piece, or that is `poor`."""
        deadline = monotonic() + within_s + GRACE_S

        async def send(number: int, left_s: float) -> _Stream:
            self.copies += number > 0
            return await _opened(self._handle, "stream", (copy_of(request, number), left_s), deadline)

        def better(call: asyncio.Future[_Stream]) -> bool:
            error = call.exception()
            if found := _died(error) if error else self._poor(call.result().first):
                _note_refused(request)
            return found

        self.requests += 1
        with _errors_of(self._handle, "stream", within_s):
            attempts = Attempts(
                send,
                better,
                self._rules,
                within_s=within_s,
                tries=TRIES,
                lost=lambda lost: lost.pieces.cancel(),
            )
            stream = await attempts.answer()
            try:
                piece = stream.first
                while piece is not ENDED:
                    yield piece
                    piece = await _next_piece(stream.pieces, self._handle, deadline)
            finally:
                stream.pieces.cancel()  # stops the replica if the reader left early


@dataclass(frozen=True, slots=True)
class _Stream:
    first: Any
    pieces: Any


def copy_of(request: object, number: int) -> object:
    """The request; from the second call on with the number of earlier ones, so that it goes to another replica than those that did not
    answer, or answered poorly: one that fails at once would often be the least busy. They share the list in which a router notes where
    they went.
    """
    return replace(request, attempt=number) if number and isinstance(request, OfUser) else request


def _note_refused(request: object) -> None:
    """Tell the routers that the replica of this request refused it; nothing where copies went to others too, any of which it may be."""
    if isinstance(request, OfUser) and len(set(request.asked)) == 1:
        refused(request.asked[0])


def _died(error: BaseException) -> bool:
    return isinstance(error, RayActorError)


def _broke(error: BaseException) -> bool:
    """Whether the callee failed for a reason that another replica need not share."""
    cause = error.cause if isinstance(error, RayTaskError) else error  # over gRPC the callee's own error arrives
    if isinstance(cause, BackendError):
        return not isinstance(cause, DeadlineExceeded)
    return not isinstance(cause, GenrecError | RayServeException | TimeoutError)


@contextmanager
def _errors_of(handle: DeploymentHandle[Any], method: str, within_s: float) -> Iterator[None]:
    """Raise a call's errors as documented at `ask`. What the callee raised comes in a RayTaskError, or over gRPC as it is."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, GenrecError):
            raise error.cause from None
        raise _broken(handle, method, error.cause) from error
    except GenrecError:
        raise
    except TimeoutError as error:
        raise BackendUnavailable(f"no replica of {handle.deployment_name} answered within {within_s:g} s") from error
    except AioRpcError as error:
        raise _unreachable(handle, f"{error.code().name}: {error.details()}") from error
    except (RayError, RayServeException) as error:
        raise _unreachable(handle, f"{type(error).__name__}: {error}") from error
    except Exception as error:
        raise _broken(handle, method, error) from error


def _unreachable(handle: DeploymentHandle[Any], why: str) -> BackendUnavailable:
    """Ray says where a replica was, and which: that is for the log and for operators."""
    told = f"no replica of {handle.deployment_name} could be reached"
    if (more := _lines[handle.deployment_name].more()) is not None:
        logger.warning("%s%s: %s", told, more, why)
    return BackendUnavailable(f"{told} ({why})", told=told)


def _broken(handle: DeploymentHandle[Any], method: str, error: Exception) -> BackendFailed:
    logger.error("%s.%s failed in a way it does not know", handle.deployment_name, method, exc_info=error)
    return BackendFailed(f"{handle.deployment_name} raised {kind_of(error)}; its log has the trace")


async def _once(handle: DeploymentHandle[Any], method: str, args: tuple[Any, ...], deadline: float) -> Any:
    response = getattr(handle, method).remote(*args)
    try:
        return await _in_time(response, handle, deadline)
    except (TimeoutError, asyncio.CancelledError):
        response.cancel()  # an overloaded replica need not compute an answer that no caller awaits
        raise


async def _opened(handle: DeploymentHandle[Any], method: str, args: tuple[Any, ...], deadline: float) -> _Stream:
    """A stream whose first piece has arrived."""
    pieces = getattr(handle.options(stream=True), method).remote(*args)
    try:
        return _Stream(await _next_piece(pieces, handle, deadline), pieces)
    except BaseException:
        pieces.cancel()  # as in `_once`
        raise


async def _next_piece(pieces: Any, handle: DeploymentHandle[Any], deadline: float) -> Any:
    try:
        return await _in_time(anext(pieces), handle, deadline)
    except StopAsyncIteration:
        return ENDED


async def _in_time(answer: Awaitable[Any], handle: DeploymentHandle[Any], deadline: float) -> Any:
    """Raises CancelledError only where this task is cancelled: over gRPC one that was raised in the callee arrives here too."""
    try:
        return await asyncio.wait_for(answer, max(0.0, deadline - monotonic()))
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise BackendFailed(f"{handle.deployment_name} cancelled the call") from error
