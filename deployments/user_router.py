"""Serve's request router, with homes for users: `cluster.user_router` between the gateway's handle and the replicas of the encoder.

In ray_config.yaml:

request_router_config:
  request_router_class: "deployments.user_router:UserAffinityRouter"
  request_router_kwargs: {bound: 1.25, slack: 8}
"""

from collections import Counter
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from cluster.errors import ConfigError
from cluster.user_router import BOUND, SLACK, choose, user_key


class UserAffinityRouter(PowerOfTwoChoicesRequestRouter):
    """A request goes to its user's home unless that is busy; one that is nobody's, as the parent class has it.

    Whose it is stands in the request itself, or in the handle's `session_id`, which counts where both are given. How busy the replicas are
    stands in the queue-length cache, which counts this process's requests as they are sent, and is corrected by what each replica says as
    it takes one. What dies with a replica, or is refused by a full one, is the parent's business.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]  # Ray's
        self._unsent: Counter[ReplicaID] = Counter()  # given a replica, and not sent yet: in a burst, hundreds before the first is sent

    def initialize_state(self, bound: float = BOUND, slack: int = SLACK, **unknown: Any) -> None:
        """The keys of `request_router_kwargs`. Raises ConfigError."""
        if unknown:
            raise ConfigError(f"UserAffinityRouter takes bound and slack, not {', '.join(sorted(unknown))}")
        if not bound >= 1 or not isinstance(slack, int) or slack < 0:
            raise ConfigError(f"bound is {bound} and slack {slack}; give a bound of 1 or more and a slack of 0 or more requests")
        self._bound, self._slack = bound, slack

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas to try, one after another; asked again, after a pause, while all of them are full."""
        if pending_request is None or not (user := _user_of(pending_request)):
            return await super().choose_replicas(candidate_replicas, pending_request)
        pending_request.routing_context.should_backoff = True
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self._load(replica.replica_id) for name, replica in replicas.items()}
        return [[replicas[name]] for name in choose(user, loads, self._bound, self._slack)]

    def _load(self, replica_id: ReplicaID) -> int:
        """Requests under way there; where it was not heard of for long, those that it is about to get."""
        return (self.replica_queue_len_cache.get(replica_id) or 0) + self._unsent[replica_id]

    async def _choose_replica_for_request(self, pending_request: PendingRequest, *, is_retry: bool = False) -> RunningReplica:
        """As the parent does; when it returns, the request is sent before anything else happens."""
        try:
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        finally:  # also where the caller leaves just as the replica was found
            found = pending_request.future
            if found.done() and not found.cancelled():
                self._unsent[found.result().replica_id] -= 1

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Give the replica to the request it was chosen for.

        The parent gives it to whoever has waited longest, who may live elsewhere. RequestRouter looks for the request by its
        internal_request_id, which all calls made within one HTTP request share, and never finds the second: it waits for ever.
        """
        waiting = (one for one in self._pending_requests_to_fulfill if one.metadata is request_metadata and not one.future.done())
        if (request := next(waiting, None)) is not None:
            self._record_queue_wait_time(request)
            request.future.set_result(replica)
            self._unsent[replica.replica_id] += 1
            self._remove_pending_request_from_indices(request)


def _user_of(pending: PendingRequest) -> str:
    session: str = pending.metadata.session_id
    return session or next(filter(None, map(user_key, pending.args)), "")
