"""What a configuration has served first."""

import logging

from cluster.bundle import Bundle, BundleStore
from cluster.config import Settings

logger = logging.getLogger("ray.serve")


def served_bundle(settings: Settings) -> Bundle:
    """Raises BundleError where nothing can be served."""
    store = BundleStore(settings.model_dir.absolute())
    if settings.version is not None:
        return store.open(settings.version)
    bundle, refused = store.open_last_good()
    for reason in refused:
        logger.warning("a model version was refused, serving %s instead: %s", bundle.version, reason)
    return bundle
