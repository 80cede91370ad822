r"""The Serve application: the only place where the deployments are wired together.

    placement: split                             placement: colocated

    gateway -> encoder, generator, ranker        gateway with all stages in its own replica
        \        |         /                         \
             switchboard                          switchboard

``ray_config.yaml`` names `build` as its import_path and gives it the configuration tree as ``args``.
"""

import logging
from typing import Any

from ray import serve
from ray.serve import Application

from cluster.bundle import Bundle, BundleStore
from cluster.config import Settings, parse
from deployments.encoder import EncoderDeployment
from deployments.gateway import Gateway
from deployments.generator import GeneratorDeployment
from deployments.ranker import RankerDeployment
from deployments.switchboard import SwitchboardDeployment

logger = logging.getLogger("ray.serve")


def build(args: dict[str, Any]) -> Application:
    """The application for a configuration tree. Raises ConfigError or BundleError before anything is started."""
    settings = resolved(parse(args))
    tree = settings.model_dump(mode="json")
    switchboard = serve.deployment(name="switchboard")(SwitchboardDeployment).bind(tree)
    gateway = serve.deployment(name="gateway", user_config={})(serve.ingress()(Gateway))
    if settings.placement == "colocated":
        return gateway.bind(tree, switchboard)
    encoder = serve.deployment(name="encoder", user_config={})(EncoderDeployment).bind(tree, switchboard)
    generator = serve.deployment(name="generator", user_config={})(GeneratorDeployment).bind(tree, switchboard)
    ranker = serve.deployment(name="ranker", user_config={})(RankerDeployment).bind(tree, switchboard)
    return gateway.bind(tree, switchboard, encoder, generator, ranker)


def resolved(settings: Settings) -> Settings:
    """Settings that name files by absolute paths, so that all replicas find the same wherever they start; there is something to serve."""
    served_bundle(settings)
    events = settings.events.model_copy(update={"url": settings.event_store_url})
    return settings.model_copy(update={"model_dir": settings.model_dir.absolute(), "events": events})


def served_bundle(settings: Settings) -> Bundle:
    """What would be served first. Raises BundleError where nothing can be."""
    store = BundleStore(settings.model_dir.absolute())
    if settings.version is not None:
        return store.open(settings.version)
    bundle, refused = store.open_last_good()
    for reason in refused:
        logger.warning("a model version was refused, serving %s instead: %s", bundle.version, reason)
    return bundle
