"""Which replicas of this application live: a replica that Serve's controller does not list, or that has no actor in Ray, has ended."""

import asyncio
from collections.abc import Collection
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE
from ray.serve.exceptions import RayServeException

from cluster.errors import BackendUnavailable
from cluster.stages import STAGES

KEEPERS = (*STAGES, "gateway")
"""The deployments with replicas that keep something of users."""
WITHIN_S = 2.0


async def processes() -> dict[str, bool]:
    """Replica id -> whether it may keep something of users, as a replica that is still starting does not.

    Raises BackendUnavailable outside a replica, and where the controller does not answer.
    """
    try:
        application = serve.get_replica_context().app_name
        controller = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
        actors = await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True)
        details: dict[str, Any] = await asyncio.wait_for(controller.get_serve_instance_details.remote(), WITHIN_S)
    except (RayError, RayServeException, ValueError, TimeoutError) as error:
        raise BackendUnavailable(f"Serve's controller does not say which replicas live: {error or type(error).__name__}") from error
    return listed(details["applications"].get(application, {}), {actor["name"] for actor in actors})


def listed(application: dict[str, Any], actors: Collection[str]) -> dict[str, bool]:
    """The replicas in Serve's REST description of an application, as far as there is an actor of that name."""
    deployments = application.get("deployments", {})
    return {
        replica["replica_id"]: name in KEEPERS and replica["state"] != "STARTING"
        for name, deployment in deployments.items()
        for replica in deployment.get("replicas", ())
        if replica["actor_name"] in actors
    }
