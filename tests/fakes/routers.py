"""Serve's request routers on replicas that are played."""

import asyncio
from typing import Any, TypeVar

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve.request_router import PendingRequest

from deployments.routers import RankingRouter

RouterT = TypeVar("RouterT", bound=RankingRouter)
ENCODER = DeploymentID("encoder")


class Replica:
    """One of the encoder's, as a router sees it, with `queue` requests under way."""

    def __init__(self, name: str, stats: dict[str, float] | None = None, node: str = "node", zone: str | None = None) -> None:
        self.replica_id, self.max_ongoing_requests, self.routing_stats = ReplicaID(name, ENCODER), 100, stats or {}
        self.node_id, self.availability_zone, self.multiplexed_model_ids = node, zone, set[str]()
        self.queue = 0

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue


async def router_of(kind: type[RouterT], *replicas: Replica, **options: Any) -> RouterT:
    """A router that has heard how busy each of these is."""
    made = kind(deployment_id=ENCODER, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    made.initialize_state(**options)
    made.update_replicas(list(replicas))
    while any(made.replica_queue_len_cache.get(one.replica_id) is None for one in replicas):  # noqa: ASYNC110 - nothing tells when it knows
        await asyncio.sleep(0)
    return made


async def routed(router: RankingRouter, request: PendingRequest) -> Any:
    """The replica that a request is sent to."""
    return await router._choose_replica_for_request(request)  # noqa: SLF001 - what Serve calls, and there is no other door to it


def replicas_of(router: RankingRouter) -> list[Any]:
    return list(router.curr_replicas.values())
