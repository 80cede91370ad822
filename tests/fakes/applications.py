"""What `build` has bound, as Serve keeps it."""

from collections.abc import Iterator
from typing import Any

from ray.serve import Application, Deployment


def deployment_of(application: Application) -> Deployment:
    """Its root, with the arguments it is given."""
    return application._bound_deployment  # noqa: SLF001 - Serve has no door to it before it runs


def most_on_a_node(deployment: Deployment) -> int | None:
    """How many of its replicas may run on one node."""
    return deployment._replica_config.max_replicas_per_node  # noqa: SLF001 - as above


def deployments_of(application: Application) -> Iterator[Deployment]:
    """The root, and those it is given."""
    root = deployment_of(application)
    yield root
    by_name: Any = root.init_kwargs  # a dictionary, which Serve declares to be a tuple
    for one in [*root.init_args, *by_name.values()]:
        if isinstance(one, Application):
            yield from deployments_of(one)
