"""Handles of deployments, without a cluster: on an object in this process, or on a list of outcomes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from ray.exceptions import ActorDiedError, RayError

from cluster.values import Outcomes, Together

NEVER = object()
"""The outcome of a call that is not answered."""


@dataclass(frozen=True, slots=True)
class Raw:
    """The outcome of a call over gRPC in which the callee raised this: it arrives as it is, without a RayTaskError around it."""

    error: BaseException


def raised_by(outcome: Any) -> BaseException | None:
    """What a call of this outcome raises; any other exception is a value."""
    if isinstance(outcome, Raw):
        return outcome.error
    return outcome if isinstance(outcome, RayError) else None


class Handle:
    """Calls methods of `replica` with what is `given` beside the call's own arguments. While that is None no replica lives."""

    deployment_name = "switchboard"

    def __init__(self, replica: Any, **given: Any) -> None:
        self.replica, self.given = replica, given
        self.calls: list[tuple[Any, ...]] = []

    def options(self, *, method_name: str, stream: bool = False, **_: str) -> Any:
        return SimpleNamespace(remote=lambda *args: Streamed(self._stream(method_name, args))) if stream else getattr(self, method_name)

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda *args: asyncio.ensure_future(self._call(method, args)))

    async def _stream(self, method: str, args: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
        self.calls.append((method, *args))
        async with aclosing(getattr(self.replica, method)(*args, **self.given)) as pieces:
            async for piece in pieces:
                yield piece

    async def _call(self, method: str, args: tuple[Any, ...]) -> Any:
        self.calls.append((method, *args))
        if self.replica is None:
            raise ActorDiedError
        answer = getattr(self.replica, method)(*args, **self.given)
        return await answer if asyncio.iscoroutine(answer) else answer


class Streamed:
    """What a method yields. The task that reads it runs the method, and takes it along when it is cancelled."""

    def __init__(self, pieces: AsyncGenerator[Any, None]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._pieces

    def __anext__(self) -> Awaitable[Any]:
        return anext(self._pieces)

    def cancel(self) -> None:
        """As a stream's of Serve."""


class ScriptedHandle:
    """Answers each call with the next of `outcomes`: a value, an exception of Ray's or a Raw one to raise, NEVER, or a list of those to
    stream. A call of several requests has as many outcomes, unless the first is one of the call itself. `calls`: the arguments of each
    request.
    """

    deployment_name = "encoder"

    def __init__(self, *outcomes: Any) -> None:
        self.outcomes, self.calls, self.responses = list(outcomes), list[tuple[Any, ...]](), list[Any]()

    def options(self, *, stream: bool = False, method_name: str = "", **_: str) -> Any:
        assert stream or method_name
        if method_name == "together_in_parts":
            return SimpleNamespace(remote=lambda together: Streamed(self._in_one_part(together)))
        return getattr(self, method_name) if method_name else self

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=self._together if method == "together" else self._remote)

    def _together(self, together: Together) -> Any:
        response = self._remote(*together.requests[0])
        self.calls += together.requests[1:]
        if response.done() and not response.exception():
            answers = [response.result(), *(self.outcomes.pop(0) for _ in together.requests[1:])]
            self.responses[-1] = response = asyncio.get_running_loop().create_future()
            response.set_result(Outcomes(list(enumerate(answers))))
        return response

    async def _in_one_part(self, together: Together) -> AsyncGenerator[Outcomes, None]:
        yield await self._together(together)

    def _remote(self, *args: Any) -> Any:
        self.calls.append(args)
        outcome = self.outcomes.pop(0)
        response = Pieces(outcome) if isinstance(outcome, list) else answered(outcome)
        self.responses.append(response)
        return response


def answered(outcome: Any) -> asyncio.Future[Any]:
    """A call's future answer; without one where the outcome is NEVER."""
    future = asyncio.get_running_loop().create_future()
    if error := raised_by(outcome):
        future.set_exception(error)
    elif outcome is not NEVER:
        future.set_result(outcome)
    return future


class Pieces:
    """What a stream yields."""

    def __init__(self, pieces: list[Any]) -> None:
        self.pieces, self.was_cancelled = list(pieces), False

    def __aiter__(self) -> "Pieces":
        return self

    async def __anext__(self) -> Any:
        if not self.pieces:
            raise StopAsyncIteration
        if (piece := self.pieces.pop(0)) is NEVER:
            await asyncio.Event().wait()
        if error := raised_by(piece):
            raise error
        return piece

    def cancel(self) -> None:
        self.was_cancelled = True

    def cancelled(self) -> bool:
        """As a future's."""
        return self.was_cancelled
