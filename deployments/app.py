r"""The Serve application: the only place where the deployments are wired together.

    gateway -> encoder, then generator
        \        |         /
             switchboard

``ray_config.yaml`` names `build` as its import_path and gives it the configuration tree as ``args``.
"""

import logging
from typing import Any

from ray import serve
from ray.serve import Application

from cluster.bundle import BundleStore
from cluster.config import Settings, parse
from deployments.encoder import Encoder
from deployments.gateway import Gateway
from deployments.generator import Generator
from deployments.switchboard import SwitchboardDeployment

logger = logging.getLogger("ray.serve")


def build(args: dict[str, Any]) -> Application:
    """The application for a configuration tree. Raises ConfigError or BundleError before anything is started."""
    settings = pin_version(parse(args))
    tree = settings.model_dump(mode="json")
    switchboard = serve.deployment(name="switchboard")(SwitchboardDeployment).bind()
    encoder = serve.deployment(name="encoder", user_config={})(Encoder).bind(tree, switchboard)
    generator = serve.deployment(name="generator", user_config={})(Generator).bind(tree, switchboard)
    return serve.deployment(name="gateway")(serve.ingress()(Gateway)).bind(tree, encoder, generator, switchboard)


def pin_version(settings: Settings) -> Settings:
    """Settings that name one verified version, and files by absolute paths, so that all replicas serve the same wherever they start."""
    store = BundleStore(settings.model_dir.absolute())
    if settings.version is not None:
        bundle = store.open(settings.version)
    else:
        bundle, refused = store.open_last_good()
        for reason in refused:
            logger.warning("a model version was refused, serving %s instead: %s", bundle.version, reason)
    events = settings.events.model_copy(update={"url": settings.event_store_url})
    return settings.model_copy(update={"model_dir": store.root, "version": bundle.manifest.version, "events": events})
