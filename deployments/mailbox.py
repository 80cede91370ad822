"""Requests for one deployment that wait at a gateway go to a replica together: one remote call for all of them.

    request -> the replica that is home to its user, the version of the model -> a call with all that wait for both, at most two on the way

A remote call costs a gateway about a millisecond of Python, whatever it carries. What a member of a call comes to is its own: its answer,
its error, its time. Only where the call itself fails, as when the replica dies, do all of its members. Versions have calls of their own, so
that a slow one on trial holds up none of the other's; so do requests that are traced, so that their traces go on at the replica.
"""

import asyncio
from collections.abc import Iterable
from contextvars import copy_context
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeAlias

from ray.serve.handle import DeploymentHandle

from cluster import tracing
from cluster.traffic.user_router import Together, home_of

ON_THE_WAY = 2
"""Calls to one address at a time: one that is computed, and the next one that waits for it there."""
PATIENCE_S = 1.0
"""After which a call holds up no other: its replica may be stopped, which a router finds out by the calls that it is asked to route."""
MOST = 64
"""Requests in one call."""


@dataclass(frozen=True, slots=True)
class Raised:
    """In the place of an answer: what the replica raised over this request."""

    error: Exception


@dataclass(slots=True, eq=False)
class _Member:
    """A request that waits. `until`: when its time is over, on this process's monotonic clock."""

    request: object
    until: float
    answer: asyncio.Future[Any]


Address: TypeAlias = tuple[str, str, str, int]
"""The method of the replica; the home, "" for any replica; the version of the model; the span of a request that is traced, else 0."""


class Mailbox:
    """Calls methods of a deployment's StageReplica by its `together`. One for each handle; for one event loop."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._replicas: tuple[str, ...] = ()
        self._waiting: dict[Address, list[_Member]] = {}
        self._calls: dict[Address, list[float]] = {}  # when those on the way began
        self._due = set[Address]()  # addresses that `_begin` is about to look at
        self._context = copy_context()  # of no request: Serve cancels the calls that were made in the context of one that is cancelled

    def learn(self, replicas: Iterable[str]) -> None:
        """Which replicas live now, by their ids: requests whose users have the same home go together."""
        self._replicas = tuple(replicas)

    async def send(self, method: str, request: object, left_s: float, wait_s: float) -> Any:
        """What `method` answers to one request, which it may take `left_s` for. Raises TimeoutError after `wait_s`, what the replica raised
        over this request, and what Ray raises where the call fails.
        """
        loop = asyncio.get_running_loop()
        member = _Member(request, monotonic() + left_s, loop.create_future())
        traced = tracing.here()
        version, span = str(getattr(request, "model_version", "")), traced.span_id if traced else 0
        to = method, home_of(request, self._replicas), version, span
        self._waiting.setdefault(to, []).append(member)
        if to not in self._due:
            self._due.add(to)
            loop.call_soon(self._begin, to)  # with what else arrives in this turn of the loop
        return await asyncio.wait_for(member.answer, wait_s)

    def _begin(self, to: Address) -> None:
        """Send what waits for this address, unless enough is on the way there."""
        self._due.discard(to)
        waiting = self._waiting[to] = [member for member in self._waiting.get(to, ()) if not member.answer.done()]
        if not waiting:
            del self._waiting[to]
            return
        loop, calls = asyncio.get_running_loop(), self._calls.setdefault(to, [])
        now = loop.time()
        lately = [began for began in calls if now - began < PATIENCE_S]
        if len(lately) >= ON_THE_WAY:
            self._due.add(to)
            loop.call_at(lately[0] + PATIENCE_S, self._begin, to)
            return
        members, self._waiting[to] = waiting[:MOST], waiting[MOST:]
        calls.append(now)
        call = loop.create_task(self._call(to[0], members), context=None if to[-1] else self._context)

        def left(_: object) -> None:
            if all(member.answer.done() for member in members):
                call.cancel()

        def ended(_: object) -> None:
            calls.remove(now)
            if not calls and self._calls.get(to) is calls:
                del self._calls[to]
            self._begin(to)

        for member in members:
            member.answer.add_done_callback(left)
        call.add_done_callback(ended)

    async def _call(self, method: str, members: list[_Member]) -> None:
        now = monotonic()
        together = Together(tuple((member.request, max(0.0, member.until - now)) for member in members))
        response: Any = self._handle.together.remote(method, together)
        try:
            answers = await response
        except asyncio.CancelledError:
            response.cancel()  # no member waits for it any more: an overloaded replica need not compute it
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, it belongs to the members
            answers = [Raised(error)] * len(members)
        for member, answer in zip(members, answers, strict=True):
            if member.answer.done():
                continue
            if isinstance(answer, Raised):
                member.answer.set_exception(answer.error)
            else:
                member.answer.set_result(answer)
