"""Request routers for Serve, between a handle and the replicas of a deployment. In ray_config.yaml:

request_router_config:                     # left out: Serve's power of two choices
  request_router_class: "deployments.routers:LeastLoadedRouter"
  # or "deployments.routers:WeightedRouter"; request_router_kwargs: {figure: weight}     # what each replica reports
  #                                          request_router_kwargs: {weights: {zone-a: 2, zone-b: 1}}
  # or "deployments.user_router:UserAffinityRouter"; request_router_kwargs: {bound: 1.25, slack: 8, slow_times: 1.5}
"""

from collections import Counter, defaultdict
from collections.abc import Mapping
from random import Random, sample
from time import monotonic
from typing import Any

from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica

from cluster.traffic.balancing import least_loaded, weighted
from cluster.traffic.router_keys import WeightedKeys, taken
from cluster.traffic.user_router import asked_before, note_asked
from cluster.values import Together

SILENT_S = 1.0
"""A replica reports its load as soon as it is sent a request, however long the answer takes: a replica that does not is stopped or stuck.
Over gRPC (the fast profile) it reports with the answer, unless that is a stream; a replica that computes for longer is asked, and reports
then.
"""


class RankingRouter(PowerOfTwoChoicesRequestRouter):
    """A request goes to the first replica of its ranking that takes it, a copy of one to those last that were asked before: a replica
    without a sound engine answers at once, and is idle. The routers differ in `rank`.

    The replicas' loads are in the queue-length cache, which counts this process's calls as they are sent, and is corrected by each
    replica's report as it takes one: that tells all processes' calls. A call of this process counts with all requests that go together in
    it; how many are in a call of another, a router does not learn. Calls that die with a replica, or that a full one refuses, are the
    parent's business. A replica that was sent a call and says nothing for `SILENT_S` is left out, unless all are, and asked once a second
    whether it is back: by the cache alone it would get the next call each time that a caller gives up on one.
    """

    BY_USER = False
    """Whether a ranking begins with the user's order: then it is known where attempts go that are not sent yet."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[no-untyped-call]  # Ray's
        # requests that were given a replica and are not sent yet are in no queue, and count all the same: in a burst there are hundreds
        self._unsent: Counter[ReplicaID] = Counter()
        # requests under way beyond the first of their call, which the cache counts; and those of each call: several may have one id
        self._companions: Counter[ReplicaID] = Counter()
        self._companions_of: defaultdict[tuple[ReplicaID, str], list[int]] = defaultdict(list)
        self._unheard_since: dict[ReplicaID, float] = {}  # of replicas that were sent something, and have not answered to it
        self._asked_at = 0.0

    def rank(self, replicas: Mapping[str, RunningReplica], loads: Mapping[str, int], request: PendingRequest) -> list[str] | None:
        """All replicas' names, best first; None leaves the request to the parent's power of two choices. `loads`: requests under way."""
        raise NotImplementedError

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replicas to try, one after another; asked again, after a pause, while all of them are full."""
        candidate_replicas = self._heard(candidate_replicas)
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        loads = {name: self._load(replica.replica_id) for name, replica in replicas.items()}
        if pending_request is None or (ranking := self.rank(replicas, loads, pending_request)) is None:
            return self._among(candidate_replicas, await super().choose_replicas(candidate_replicas, pending_request))
        pending_request.routing_context.should_backoff = True
        order = ranking if self.BY_USER else ()
        asked = set[str]().union(*(asked_before(call, order) for call in pending_request.args))
        return [[replicas[name]] for name in sorted(ranking, key=asked.__contains__)]

    def _among(self, candidates: list[RunningReplica], ranks: list[list[RunningReplica]]) -> list[list[RunningReplica]]:
        """The parent's choice without replicas that are no candidates, as it draws from all; where none is left, two candidates."""
        return [[one for one in rank if one in candidates] or sample(candidates, min(2, len(candidates))) for rank in ranks]

    def on_send_request(self, replica_id: ReplicaID) -> None:
        super().on_send_request(replica_id)
        self._unheard_since.setdefault(replica_id, monotonic())

    def on_new_queue_len_info(self, replica_id: ReplicaID, num_ongoing_requests: int) -> None:
        super().on_new_queue_len_info(replica_id, num_ongoing_requests)
        self._unheard_since.pop(replica_id, None)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        here = {replica.replica_id for replica in replicas}
        self._unheard_since = {replica: since for replica, since in self._unheard_since.items() if replica in here}
        self._unsent = Counter({replica: requests for replica, requests in self._unsent.items() if requests or replica in here})
        self._companions = +self._companions

    def _heard(self, replicas: list[RunningReplica]) -> list[RunningReplica]:
        """The replicas without the silent ones."""
        now = monotonic()
        silent = [one for one in replicas if now - self._unheard_since.get(one.replica_id, now) > SILENT_S]
        if silent and now - self._asked_at > SILENT_S:
            self._asked_at = now
            self._event_loop.create_task(self._ask(silent))
        return [one for one in replicas if one not in silent] or replicas

    async def _ask(self, silent: list[RunningReplica]) -> None:
        for replica, requests in await self._probe_queue_lens(silent, 0):
            if requests is not None:
                self._unheard_since.pop(replica.replica_id, None)

    def _load(self, replica_id: ReplicaID) -> int:
        """The requests under way at a replica; where it was not heard of for long, those that it is about to get."""
        return (self.replica_queue_len_cache.get(replica_id) or 0) + self._companions[replica_id] + self._unsent[replica_id]

    async def _choose_replica_for_request(self, pending_request: PendingRequest, *, is_retry: bool = False) -> RunningReplica:
        """The replica that the request goes to. Once this returns, the request is sent before anything else happens."""
        requests = _requests_in(pending_request)
        try:
            replica = await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        finally:  # also where the caller leaves just as the replica was found
            found = pending_request.future
            if found.done() and not found.cancelled():
                self._unsent[found.result().replica_id] -= requests
        self._companions[replica.replica_id] += requests - 1
        self._companions_of[replica.replica_id, pending_request.metadata.internal_request_id].append(requests - 1)
        for call in pending_request.args:
            note_asked(call, replica.replica_id.unique_id)
        return replica

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A call has ended, whatever came of it. Of several with this id, any: sooner or later all of them do."""
        super().on_request_completed(replica_id, internal_request_id)
        if calls := self._companions_of.get((replica_id, internal_request_id)):
            self._companions[replica_id] -= calls.pop()
            if not calls:
                del self._companions_of[replica_id, internal_request_id]

    def _fulfill_next_pending_request(self, replica: RunningReplica, request_metadata: Any = None) -> None:
        """Give the replica to the request it was chosen for.

        The parent gives it to the request that has waited longest, which may rank replicas otherwise. RequestRouter looks for a request by
        its internal_request_id, which all calls within one HTTP request share, and never finds the second: that waits for ever.
        """
        waiting = (one for one in self._pending_requests_to_fulfill if one.metadata is request_metadata and not one.future.done())
        if (request := next(waiting, None)) is not None:
            self._record_queue_wait_time(request)
            request.future.set_result(replica)
            self._unsent[replica.replica_id] += _requests_in(request)
            self._remove_pending_request_from_indices(request)


class LeastLoadedRouter(RankingRouter):
    """A request goes to the replica with the fewest requests under way."""

    def initialize_state(self, **given: Any) -> None:
        """Take no keys of `request_router_kwargs`. Raises ConfigError where there are any."""
        taken("deployments.routers:LeastLoadedRouter", given)
        self._random = Random()

    def rank(self, replicas: Mapping[str, RunningReplica], loads: Mapping[str, int], request: PendingRequest) -> list[str]:  # noqa: ARG002
        return least_loaded(loads, self._random)


class WeightedRouter(RankingRouter):
    """Routes a request to the replica that finishes it soonest, by the requests under way there and the replica's weight.

    The weight is that of the replica's node id or availability zone in `weights`, else the `figure` of its `record_routing_stats`: answers
    a second of engine time. (Answers a second of wall time would give a replica with few requests fewer still.) A replica without a
    weight has the mean of the others.
    """

    def initialize_state(self, **given: Any) -> None:
        """Take the keys of `request_router_kwargs`. Raises ConfigError."""
        keys: WeightedKeys = taken("deployments.routers:WeightedRouter", given)
        self._figure, self._weights, self._random = keys.figure, dict(keys.weights), Random()

    def rank(self, replicas: Mapping[str, RunningReplica], loads: Mapping[str, int], request: PendingRequest) -> list[str]:  # noqa: ARG002
        return weighted(loads, {name: self._weight(replica) for name, replica in replicas.items()}, self._random)

    def _weight(self, replica: RunningReplica) -> object:
        places = (place for place in (replica.node_id, replica.availability_zone) if place in self._weights)
        return next((self._weights[place] for place in places if place), replica.routing_stats.get(self._figure))


def _requests_in(call: PendingRequest) -> int:
    return next((len(one.requests) for one in call.args if isinstance(one, Together)), 1)
