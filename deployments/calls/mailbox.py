"""Send requests that wait at a gateway to a replica together, in one remote call.

    request -> address: its user's home replica, the version of the model -> one call with all that wait for it, at most two under way

A remote call costs a gateway about a millisecond of Python, for one request or many. Each member of a call has its own answer, error and
deadline; only the failure of the call itself, as when the replica dies, is every member's. Versions do not share calls, so that a slow
version on trial delays no other. Neither do traced requests, so that each trace continues at the replica.
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
"""Calls to one address at a time: one that is computed, and the next, which waits at the replica."""
PATIENCE_S = 1.0
"""A call older than this no longer delays others: its replica may have stopped, which a router learns only from further calls."""
MOST = 64
"""Requests in one call."""


@dataclass(frozen=True, slots=True)
class Raised:
    """In place of an answer: the error that the replica raised for this request."""

    error: Exception


@dataclass(slots=True, eq=False)
class _Member:
    """A waiting request. `until`: its deadline on this process's monotonic clock."""

    request: object
    until: float
    answer: asyncio.Future[Any]


Address: TypeAlias = tuple[str, str, str, int]
"""Method; home replica, "" for any; version of the model; span of a traced request, else 0."""


class Mailbox:
    """Calls StageReplica.together of a deployment. One instance for each handle; for one event loop."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._replicas: tuple[str, ...] = ()
        self._waiting: dict[Address, list[_Member]] = {}
        self._calls: dict[Address, list[float]] = {}  # when those on the way began
        self._due = set[Address]()  # addresses that `_begin` is about to look at
        self._context = copy_context()  # not a request's: Serve cancels calls made in the context of a cancelled request

    def learn(self, replicas: Iterable[str]) -> None:
        """Take the ids of the live replicas, by which users' homes are found."""
        self._replicas = tuple(replicas)

    async def send(self, method: str, request: object, left_s: float, wait_s: float) -> Any:
        """The answer of `method` to one request, which has `left_s` seconds at the replica. Raises TimeoutError after `wait_s`, the
        replica's error for this request, or Ray's error if the call fails.
        """
        loop = asyncio.get_running_loop()
        member = _Member(request, monotonic() + left_s, loop.create_future())
        traced = tracing.here()
        version, span = str(getattr(request, "model_version", "")), traced.span_id if traced else 0
        to = method, home_of(request, self._replicas), version, span
        self._waiting.setdefault(to, []).append(member)
        if to not in self._due:
            self._due.add(to)
            loop.call_soon(self._begin, to)  # together with requests that arrive in the same turn of the loop
        return await asyncio.wait_for(member.answer, wait_s)

    def _begin(self, to: Address) -> None:
        """Send what waits for this address, unless `ON_THE_WAY` calls are under way there."""
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
            response.cancel()  # an overloaded replica need not compute what no member awaits
            raise
        except Exception as error:  # noqa: BLE001 - every error belongs to the members
            answers = [Raised(error)] * len(members)
        for member, answer in zip(members, answers, strict=True):
            if member.answer.done():
                continue
            if isinstance(answer, Raised):
                member.answer.set_exception(answer.error)
            else:
                member.answer.set_result(answer)
