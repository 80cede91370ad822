"""A manifest's record of a model's training: the data, how they were read, and the software."""

import hashlib
import platform
from importlib.metadata import version
from typing import Any, cast

from cluster.bundle import Bundle
from cluster.dataset import Catalogue, Dataset
from cluster.errors import DataError

READ_AS = "read_as"
"""The key in a manifest's `training` under which the options of the data set stand."""


def provenance(dataset: Dataset) -> dict[str, Any]:
    """The data that the model learnt from, and the software that made it."""
    return {
        "dataset": dataset.name,
        "users": dataset.interactions.users,
        "items": len(dataset.catalogue),
        "events": len(dataset.interactions),
        "item_order_sha256": item_order_sha256(dataset.catalogue),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("genrec", "torch", "numpy")}},
    }


def item_order_sha256(catalogue: Catalogue) -> str:
    """A digest of the item ids in index order: weights fit only a catalogue with the same one."""
    return hashlib.sha256("\n".join(item.item_id for item in catalogue.items).encode()).hexdigest()


def added_items(bundle: Bundle) -> int:
    """How many items came after the training."""
    return int(bundle.manifest.training.get("added_items", 0))  # type: ignore[arg-type]  # JSON; written by new_items.py


def was_validated(bundle: Bundle) -> bool:
    """Whether the manifest says that validation events were held back to the end. Meta's trainer learns them, and says nothing of it."""
    training = bundle.manifest.training
    options = cast("dict[str, Any]", training.get("options") or {})
    return bool(options.get("validate_every")) and not training.get("refit")


def require_same_items(bundle: Bundle, dataset: Dataset) -> None:
    """Raises DataError unless catalogue indices of the data set mean the same items as those of the bundle."""
    if item_order_sha256(bundle.catalogue) != item_order_sha256(dataset.catalogue):
        added = added_items(bundle)
        since = f"; genrec add-items added {added} of them: use a version from before (genrec models rollback)" if added else ""
        raise DataError(
            f"{bundle.version} knows {len(bundle.catalogue)} items, {dataset.source} has {len(dataset.catalogue)}, and they are not "
            f"the same in the same order; give the data set the model was trained on{since}"
        )
