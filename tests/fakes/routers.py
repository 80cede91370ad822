"""Serve's request routers on replicas that are played."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, TypeVar

from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID
from ray.serve._private.router import AsyncioRouter
from ray.serve.request_router import PendingRequest

from deployments.routers import RankingRouter

RouterT = TypeVar("RouterT", bound=RankingRouter)
ENCODER = DeploymentID("encoder")


class Replica:
    """One of the encoder's, as a router sees it, with `queue` requests under way."""

    def __init__(self, name: str, stats: dict[str, float] | None = None, node: str = "node", zone: str | None = None) -> None:
        self.replica_id, self.max_ongoing_requests, self.routing_stats = ReplicaID(name, ENCODER), 100, stats or {}
        self.node_id, self.availability_zone, self.multiplexed_model_ids = node, zone, set[str]()
        self.queue, self.is_cross_language = 0, False

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.queue

    def try_send_request(self, request: PendingRequest, *, with_rejection: bool) -> "UnansweredCall":
        return UnansweredCall()


class UnansweredCall:
    """A call over gRPC, which tells with the answer that the replica has taken it."""

    async def get_rejection_response(self) -> None:
        await asyncio.get_running_loop().create_future()

    def cancel(self) -> None:
        """Nothing computes it."""


async def router_of(kind: type[RouterT], *replicas: Replica, **options: Any) -> RouterT:
    """A router that has heard how busy each of these is."""
    made = kind(deployment_id=ENCODER, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
    made.initialize_state(**options)  # type: ignore[no-untyped-call]  # Serve's own
    played: list[Any] = [*replicas]
    made.update_replicas(played)
    while any(made.replica_queue_len_cache.get(one.replica_id) is None for one in replicas):  # noqa: ASYNC110 - nothing tells when it knows
        await asyncio.sleep(0)
    return made


async def routed(router: RankingRouter, request: PendingRequest) -> Any:
    """The replica that a request is sent to."""
    return await router._choose_replica_for_request(request)  # noqa: SLF001 - what Serve calls, and there is no other door to it


async def sent_over_grpc(router: RankingRouter, request: PendingRequest) -> None:
    """Have Serve's own code send a request to a replica that does not answer."""
    serves = SimpleNamespace(
        _active_request_router=router,
        _enable_strict_max_ongoing_requests=True,
        _metrics_manager=SimpleNamespace(wrap_queued_request=lambda *_: nullcontext()),
        _register_completion_callback=lambda *_: None,
        _resolve_args_with_metrics=lambda _: asyncio.sleep(0),
    )
    await AsyncioRouter._route_and_send_request_once(serves, request, "response", is_retry=False)  # type: ignore[arg-type]  # noqa: SLF001


def replicas_of(router: RankingRouter) -> list[Any]:
    return list(router.curr_replicas.values())
