"""Call another deployment: its answer, all at once or piece by piece, or an error of ours that says what went wrong."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from time import monotonic
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from cluster.errors import BackendFailed, BackendUnavailable, GenrecError

logger = logging.getLogger("ray.serve")


async def ask(handle: DeploymentHandle[Any], method: str, *args: Any, within_s: float, tries: int = 1) -> Any:
    """What `method` of a replica answers. A replica that dies with the call costs a try; the time is for all tries together.

    Raises what the callee raised where that is a GenrecError, BackendFailed where it raised anything else, and BackendUnavailable where
    no replica could be reached or answered in time.
    """
    deadline = monotonic() + within_s
    with _errors_of(handle, method, within_s):
        for _ in range(tries - 1):
            with suppress(RayActorError):
                return await _once(handle, method, args, deadline)
        return await _once(handle, method, args, deadline)


async def ask_stream(handle: DeploymentHandle[Any], method: str, *args: Any, within_s: float) -> AsyncGenerator[Any, None]:
    """What `method` of a replica yields, as it comes, within that time for all of it. Raises as `ask` does, of one replica."""
    deadline = monotonic() + within_s
    with _errors_of(handle, method, within_s):
        async with aclosing(_pieces(handle, method, args, deadline)) as pieces:
            async for piece in pieces:
                yield piece


@contextmanager
def _errors_of(handle: DeploymentHandle[Any], method: str, within_s: float) -> Iterator[None]:
    """What went wrong in a call, as an error of ours."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, GenrecError):
            raise error.cause from None
        logger.exception("%s.%s failed in a way it does not know", handle.deployment_name, method)
        raise BackendFailed(f"{handle.deployment_name} raised {error.cause!r}; its log has the trace") from error
    except TimeoutError as error:
        raise BackendUnavailable(f"no replica of {handle.deployment_name} answered within {within_s:g} s") from error
    except (RayError, RayServeException) as error:
        raise BackendUnavailable(f"no replica of {handle.deployment_name} could be reached ({type(error).__name__}: {error})") from error


async def _pieces(handle: DeploymentHandle[Any], method: str, args: tuple[Any, ...], deadline: float) -> AsyncGenerator[Any, None]:
    pieces = getattr(handle.options(stream=True), method).remote(*args)
    try:
        while True:
            try:
                piece = await asyncio.wait_for(anext(pieces), max(0.0, deadline - monotonic()))
            except StopAsyncIteration:
                return
            yield piece
    finally:
        pieces.cancel()  # as below; after the last piece it does nothing


async def _once(handle: DeploymentHandle[Any], method: str, args: tuple[Any, ...], deadline: float) -> Any:
    response = getattr(handle, method).remote(*args)
    try:
        return await asyncio.wait_for(response, max(0.0, deadline - monotonic()))
    except (TimeoutError, asyncio.CancelledError):
        response.cancel()  # nobody waits for it any more: an overloaded replica need not compute it
        raise
