r"""The Serve application: the only place where the deployments are wired together.

    placement: split                             placement: colocated

    gateway -> encoder, generator, ranker        gateway with all stages in its own replica
        \        |         /                         \
             switchboard                          switchboard

With `zeromq` configured, a deployment of that name listens beside HTTP and asks the gateways.

``ray_config.yaml`` names `build` as its import_path and gives it the configuration tree as ``args``.
"""

import logging
from typing import Any

import ray
from ray import serve
from ray.serve import Application, context
from ray.serve.config import HTTPOptions

from cluster.addresses import is_loopback
from cluster.config import Settings, parse, require_keys, require_options
from cluster.errors import ConfigError
from cluster.profile import CERTIFICATE, carries_requests
from cluster.served import served_bundle
from deployments.fleet.switchboard import SwitchboardDeployment
from deployments.gateway import GatewayDeployment
from deployments.replicas.encoder import EncoderDeployment
from deployments.replicas.generator import GeneratorDeployment
from deployments.replicas.ranker import RankerDeployment
from deployments.zeromq.deployment import ZeroMQDeployment

logger = logging.getLogger("ray.serve")
MOST_PROCESSES = 10_000
"""Processes of one application: each keeps a call waiting at the switchboard, for orders."""


def build(args: dict[str, Any]) -> Application:
    """The application for a configuration tree. Raises ConfigError or BundleError before anything is started."""
    require_options(settings := parse(args))
    settings = resolved(settings)
    require_keys(settings, host := None if (http := _http_options()) is None else http.host)
    if http is not None and http.ssl_certfile and carries_requests():
        raise ConfigError(
            "http_options.ssl_certfile and ssl_keyfile are of Serve's own proxy (--profile default): HAProxy asks gateways in plain HTTP; "
            f"leave them out, and name a certificate by {CERTIFICATE}"
        )
    if settings.gateway.allow_anonymous:
        logger.warning("gateway.allow_anonymous: a caller without a key may read histories and store events, of the tenant 'default'")
    tree = settings.model_dump(mode="json")
    switchboard = serve.deployment(name="switchboard", max_ongoing_requests=MOST_PROCESSES)(SwitchboardDeployment).bind(tree)
    # by an empty user_config Serve calls `reconfigure` at the start, which brings `flags.hedge` of `args`, and once a file has none again
    gateway = serve.deployment(name="gateway", user_config={})(serve.ingress()(GatewayDeployment))
    more: dict[str, Any] = {"local": host is not None and is_loopback(host)}
    if settings.zeromq is not None:
        more["zeromq"] = _zeromq(tree)
    if settings.placement == "colocated":
        return gateway.bind(tree, switchboard, **more)
    encoder = serve.deployment(name="encoder", user_config={})(EncoderDeployment).bind(tree, switchboard)
    generator = serve.deployment(name="generator", user_config={})(GeneratorDeployment).bind(tree, switchboard)
    ranker = serve.deployment(name="ranker", user_config={})(RankerDeployment).bind(tree, switchboard)
    return gateway.bind(tree, switchboard, encoder, generator, ranker, **more)


def _http_options() -> HTTPOptions | None:
    """How the running Serve listens; None where no Serve runs."""
    client = context._get_global_client(raise_if_no_controller_running=False) if ray.is_initialized() else None  # noqa: SLF001
    return None if client is None else client.http_config


def _zeromq(tree: dict[str, Any]) -> Application:
    """The deployment that listens for ZeroMQ: one replica, for two on a node could not listen at one address."""
    deployment = serve.deployment(name="zeromq", num_replicas=1, max_replicas_per_node=1, ray_actor_options={"num_cpus": 0})
    return deployment(ZeroMQDeployment).bind(tree)


def resolved(settings: Settings) -> Settings:
    """The settings with absolute paths, so that all replicas find the same files. Raises BundleError where there is no model to serve."""
    served_bundle(settings)
    events = settings.events.model_copy(update={"url": settings.event_store_url})
    return settings.model_copy(update={"model_dir": settings.model_dir.absolute(), "events": events})
