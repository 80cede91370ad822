"""The version of the model that a configuration serves first."""

import logging

from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.config import Settings

logger = logging.getLogger("ray.serve")


def served_bundle(settings: Settings) -> Bundle:
    """The version that the settings name, else the last good one of the store. Raises BundleError where there is none."""
    store = BundleStore(settings.model_dir.absolute())
    if settings.version is not None:
        return store.open(settings.version)
    bundle, refused = store.open_last_good()
    for reason in refused:
        logger.warning("a model version was refused, serving %s instead: %s", bundle.version, reason)
    return bundle
