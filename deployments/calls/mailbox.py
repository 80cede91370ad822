"""Send requests that wait at a gateway to a replica together, in one remote call.

    request -> address: its user's home replica, the version of the model -> one call with all that wait for it, at most two under way

A remote call costs a gateway about a millisecond of Python, for one request or many. Each member of a call has its own answer, error and
deadline; only the failure of the call itself, as when the replica dies, is that of every member without an answer. All answers come
together, as each part costs half a call; they come in parts, as the engine's batches end, where one might wait long for another: where the
latest call of similar size ended far apart, or there was none, and where the engine takes requests one by one. Versions do not share calls,
so that a slow version on trial delays no other. Neither do traced requests, so that each trace continues at the replica.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf
from time import monotonic
from typing import Any, NamedTuple, TypeAlias

from ray.serve.handle import DeploymentHandle

from cluster import tracing
from cluster.background import no_requests_context
from cluster.errors import BackendFailed
from cluster.traffic.batcher import Batcher, Member, Pacing, Raised
from cluster.traffic.user_router import home_of
from cluster.values import Outcomes, Together

ON_THE_WAY = 2
"""Calls to one address at a time: one that is computed, and the next, which waits at the replica."""
PATIENCE_S = 1.0
"""A call older than this no longer delays others: its replica may have stopped, which a router learns only from further calls."""
MOST = 64
"""Requests in one call."""
HELD_S = 0.02
"""So long an answer may wait for the others of its call. Before each deadline a replica leaves 50 ms, or a tenth of the time, for that."""
PICKLED = "pickle"
"""Where Serve calls over gRPC, it would use cloudpickle, which takes up to three times as long and is for code: this sends values alone."""

Sent: TypeAlias = tuple[Any, float]
"""A request, and its deadline on this process's monotonic clock."""


class Address(NamedTuple):
    """Where requests go together. `home`: a replica's id, "" for any; `span`: of a traced request, else 0."""

    home: str
    model_version: str
    span: int


class Mailbox:
    """Calls the BatchedReplicas of a deployment. One instance for each handle, made outside of requests; for one event loop."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._replicas: tuple[str, ...] = ()
        self._batchers: dict[Address, Batcher[Sent, Any]] = {}
        self._lately: dict[tuple[str, str], _Lately] = {}  # by home and version
        self._context = no_requests_context()

    def learn(self, replicas: Iterable[str]) -> None:
        """Take the ids of the replicas that serve, by which users' homes are found. Where they have changed, what is known of their calls
        begins anew.
        """
        if (there := tuple(replicas)) != self._replicas:
            self._replicas, self._lately = there, {}

    @property
    def replica_count(self) -> int:
        """How many serve; 0 while none was learnt."""
        return len(self._replicas)

    def send(self, request: Any, left_s: float) -> asyncio.Future[Any]:
        """A future of the answer to one request, which has `left_s` seconds at the replica; it raises the request's error, or Ray's."""
        traced = tracing.here()
        address = Address(home_of(request, self._replicas), request.model_version, traced.span_id if traced else 0)
        batcher = self._batchers.get(address)
        if batcher is None:
            batcher = self._batchers[address] = self._batcher(address)
        return batcher.submit((request, monotonic() + left_s))

    @cached_property
    def _together(self) -> Any:
        """The method `together`; `handle.together` would be a new handle for each call."""
        return self._handle.options(method_name="together", request_serialization=PICKLED, response_serialization=PICKLED)

    @cached_property
    def _together_in_parts(self) -> Any:
        return self._handle.options(
            method_name="together_in_parts", stream=True, request_serialization=PICKLED, response_serialization=PICKLED
        )

    def _batcher(self, address: Address) -> Batcher[Sent, Any]:
        def idle() -> None:
            if self._batchers.get(address) is batcher:
                del self._batchers[address]

        batcher = Batcher(
            partial(self._call, address),
            lambda sizes: range(min(len(sizes), MOST)),
            lambda: MOST,
            pacing=Pacing(max_running=lambda: ON_THE_WAY, patience_s=PATIENCE_S),
            cancel_when_all_left=True,  # an overloaded replica need not compute what no member awaits
            context=None if address.span else self._context,
            idle=idle,
        )
        return batcher

    async def _call(self, address: Address, members: Sequence[Member[Sent, Any]]) -> Sequence[Any | Raised]:
        """The outcome of each member, which has it as soon as it has come."""
        began, lately = monotonic(), self._lately.setdefault((address.home, address.model_version), _Lately())
        together = Together(tuple((request, max(0.0, until - began)) for request, until in (member.request for member in members)))
        outcomes: list[Any | Raised] = [Raised(BackendFailed("the call ended without an answer to this request"))] * len(members)

        def take(some: Outcomes) -> None:
            lately.note(len(members), some.spread_s, apart=some.apart)
            for place, outcome in some.by_place:
                outcomes[place] = outcome
                members[place].end(outcome)

        in_parts = lately.in_parts(len(members))
        response: Any = (self._together_in_parts if in_parts else self._together).remote(together)
        try:
            if in_parts:
                async for part in response:
                    take(part)
            else:
                take(await response)
        except asyncio.CancelledError:
            response.cancel()
            lately.note(len(members), monotonic() - began)  # the last may have kept the others until they left
            raise
        return outcomes


@dataclass(slots=True)
class _Lately:
    """What the latest calls to a home for a version were like. `apart`: see Outcomes."""

    apart: bool = False
    _spread_s: dict[int, float] = field(default_factory=dict)
    """Between the first outcome and the last, by the bits of the call's number of requests: far more of them may be more batches."""

    def in_parts(self, requests: int) -> bool:
        """Whether some of so many requests may have to wait for others where they are answered together."""
        return requests > 1 and (self.apart or self._spread_s.get(requests.bit_length(), inf) > HELD_S)

    def note(self, requests: int, spread_s: float, apart: bool | None = None) -> None:
        self._spread_s[requests.bit_length()] = spread_s
        self.apart = self.apart if apart is None else apart
