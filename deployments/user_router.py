"""Serve's request router, with homes for users: `cluster.traffic.user_router` between the gateway's handle and the replicas of the encoder.

In ray_config.yaml:

    request_router_config:
      request_router_class: "deployments.user_router:UserAffinityRouter"
      request_router_kwargs: {bound: 1.25, slack: 8, slow_times: 1.5}
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from math import inf
from time import monotonic
from typing import Any, Protocol, runtime_checkable

from ray.serve._private.replica_result import ReplicaResult
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from cluster.traffic.paces import Paces
from cluster.traffic.router_keys import UserAffinityKeys, taken
from cluster.traffic.user_router import asked_by_all, choose, user_key
from deployments.routers import RankingRouter


class UserAffinityRouter(RankingRouter):
    """Routes a request to its user's home unless that is busy, and a request without a user by Serve's power of two choices.

    The user is the handle's `session_id` if given, else the request's. A replica is left out if most of its answers of a second
    take more than `slow_times` as long as nineteen in twenty of the others', or a few take far longer than any; its users go to the next
    replica of their orders, until a trial is quick again. `slow_times` 0: no replica is left out.
    """

    BY_USER = True

    def initialize_state(self, **given: Any) -> None:
        """Take the keys of `request_router_kwargs`. Raises ConfigError."""
        keys: UserAffinityKeys = taken("deployments.user_router:UserAffinityRouter", given)
        self._bound, self._slack, self._paces = keys.bound, keys.slack, Paces(keys.slow_times or inf)
        self._unrouted: dict[asyncio.Task[Any], tuple[str, float]] = {}  # by the task that sends a request: where to, and since when

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The ranking of the quick replicas and, for when they are full or were asked before, the slow ones behind those that were not
        asked. A slow one answers: it goes before those that say nothing.
        """
        heard, slow = self._heard(candidate_replicas), self._paces.slow(monotonic())
        quick = [one for one in heard if one.replica_id.unique_id not in slow] or heard
        ranks = await super().choose_replicas(quick, pending_request)
        behind = [[one] for one in heard if one not in quick]
        if not behind or pending_request is None:
            return [*ranks, *behind]
        order = [one.replica_id.unique_id for one in quick] if _user_of(pending_request) else []
        asked = set[str]().union(*(asked_by_all(call, order) for call in pending_request.args))
        return sorted([*ranks, *behind], key=lambda rank: all(one.replica_id.unique_id in asked for one in rank))

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._paces.keep((one.replica_id.unique_id for one in replicas), monotonic())

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        replica, now = replica_id.unique_id, monotonic()
        self._paces.sent(replica, now)
        if (sender := asyncio.current_task()) is not None:
            self._unrouted[sender] = replica, now
            sender.add_done_callback(self._left)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult) -> None:
        super().on_request_routed(pending_request, replica_id, result)
        # over gRPC a replica accepts a request only with the answer: so its time counts from when the request was sent
        _, since = self._replied() or ("", monotonic())
        answered = partial(self._answered, replica_id.unique_id, since)
        result.add_done_callback(lambda outcome: self._event_loop.call_soon_threadsafe(answered, outcome))  # in a thread of Ray's

    def _left(self, sender: asyncio.Task[Any]) -> None:
        """Count a request that was cancelled before its replica accepted it (over gRPC: before the answer). Ray tells no more."""
        if (sent := self._unrouted.pop(sender, None)) is not None and sender.cancelled():
            (replica, since), now = sent, monotonic()
            self._paces.answered(replica, now - since, now, failed=True)

    def _replied(self) -> tuple[str, float] | None:
        """Where this task's request was sent last, and since when it has been there; the replica has accepted or refused it by now."""
        sender = asyncio.current_task()
        return None if sender is None else self._unrouted.pop(sender, None)

    def _answered(self, replica: str, since: float, outcome: object) -> None:
        now = monotonic()
        self._paces.answered(replica, now - since, now, failed=isinstance(outcome, Exception) or _was_cancelled(outcome))

    def rank(self, replicas: Mapping[str, RunningReplica], loads: Mapping[str, int], request: PendingRequest) -> list[str] | None:  # noqa: ARG002
        if not (user := _user_of(request)):
            return None
        return choose(user, loads, self._bound, self._slack)

    async def _choose_replica_for_request(self, pending_request: PendingRequest, *, is_retry: bool = False) -> RunningReplica:
        self._replied()  # where a replica refused it before
        return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)


def _user_of(pending: PendingRequest) -> str:
    session: str = pending.metadata.session_id
    return session or next(filter(None, map(user_key, pending.args)), "")


def _was_cancelled(outcome: object) -> bool:
    """Whether a call over gRPC was cancelled: Ray passes that call itself; of any other call, the error or the result."""
    return bool(isinstance(outcome, _Call) and outcome.cancelled())


@runtime_checkable
class _Call(Protocol):
    def cancelled(self) -> bool: ...
