"""A manifest's record of a model's training: the data, how they were read, and the software."""

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from typing import Any, cast

import numpy as np

from cluster.bundle import Bundle, Manifest
from cluster.dataset import Catalogue, Dataset
from cluster.errors import DataError

READ_AS = "read_as"
"""The key in a manifest's `training` under which the options of the data set stand."""
RANKED = "ranked"
"""What the lists in the order of the ranker are called beside those of the strategies."""
_TOLD = 3
"""How many items an error names."""


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


def recorded_strategies(manifest: Manifest) -> dict[str, Mapping[str, float]]:
    """The metrics of each strategy's lists on the test events, as training has measured them, and of the `RANKED` ones where the ranker is
    the last stage. Empty where a request gets what the encoder alone finds, or nothing was measured.
    """
    strategies: dict[str, Mapping[str, float]] = dict(manifest.blend.quality) if manifest.blend else {}
    if manifest.ranker and manifest.ranker.last_stage:
        ranker = cast("dict[str, Any]", manifest.training.get("ranker") or {})
        if recommendations := ranker.get("recommendations"):
            strategies = strategies or {"retrieval": recommendations["found"]}
            strategies[RANKED] = recommendations["ranked"]
    return strategies


def with_items_of(bundle: Bundle, dataset: Dataset, since_added: str) -> Dataset:
    """The data set with the bundle's catalogue, so that catalogue indices mean the same items in both.

    `since_added`: what to do where items were added since the training. Raises DataError where the data set's items are not those of the
    bundle.
    """
    ours, theirs = bundle.catalogue, dataset.catalogue
    if item_order_sha256(ours) == item_order_sha256(theirs):
        return dataset
    lacking = [
        f"{place} lacks {told}"
        for place, there, others in ((bundle.version, ours, theirs), (dataset.source, theirs, ours))
        if (told := _told(there.unknown(item.item_id for item in others.items)))
    ]
    if lacking:
        added = added_items(bundle)
        since = f"; genrec add-items added {added} of them: {since_added}" if added else ""
        raise DataError(
            f"{bundle.version} knows {len(ours)} items, {dataset.source} has {len(theirs)}, and they are not the same: "
            f"{', and '.join(lacking)}; give the data set the model was trained on{since}"
        )
    index = np.array([0, *(ours.index_of(item.item_id) for item in theirs.items)], np.int32)
    return replace(dataset, interactions=replace(dataset.interactions, items=index[dataset.interactions.items]), catalogue=ours)


def _told(item_ids: Sequence[str]) -> str:
    """The first few of the ids, and how many more there are; "" where there are none."""
    more = f" and {len(item_ids) - _TOLD} more" if len(item_ids) > _TOLD else ""
    return ", ".join(map(repr, item_ids[:_TOLD])) + more
