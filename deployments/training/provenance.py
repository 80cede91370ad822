"""A manifest's record of a model's training: the data, how they were read, and the software."""

import hashlib
import logging
import platform
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from importlib.metadata import version
from typing import Any, cast

import numpy as np

from cluster.bundle import Bundle, Manifest
from cluster.dataset import Catalogue, Dataset
from cluster.errors import DataError
from pipelines.splits import TEST, VALIDATION, Window

READ_AS = "read_as"
"""The key in a manifest's `training` under which the options of the data set stand."""
RANKED = "ranked"
"""What the lists in the order of the ranker are called beside those of the strategies."""
_TOLD = 3
"""How many items an error or a warning names."""
logger = logging.getLogger(__name__)


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


def was_validated(bundle: Bundle) -> bool:
    """Whether the manifest says that validation events were held back to the end. Meta's trainer learns them, and says nothing of it."""
    return held_back(bundle.manifest.training) == VALIDATION


def held_back(training: Mapping[str, Any]) -> int:
    """How many of each user's last events a training has not learnt, by its entry in the manifest."""
    options = cast("dict[str, Any]", training.get("options") or {})
    return VALIDATION if options.get("validate_every") and not training.get("refit") else TEST


def window_of(training: Mapping[str, Any]) -> Window:
    """Which windows of long histories a training has learnt, by its entry in the manifest; any where it says nothing, as of Meta's."""
    options = cast("dict[str, Any]", training.get("options") or {})
    return "latest" if options.get("window") == "latest" else "random"


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


def with_items_of(bundle: Bundle, dataset: Dataset, from_end: int = TEST, *, without_added: bool = False) -> Dataset:
    """The data set with the bundle's catalogue, so that catalogue indices mean the same items in both. Items that were added since the
    training may be in the data set, or not. Items that the bundle does not know are left out, their events as `as_known_by` does.

    `without_added`: with the beginning of the catalogue that was trained on, and without events of the items after it; for a training,
    which leaves nothing else out. Raises DataError where the data set's items are not those of the bundle: it lacks some of the training,
    or most of its events are of unknown ones.
    """
    ours, trained = bundle.catalogue, len(bundle.catalogue) - bundle.added_items
    if without_added and bundle.added_items:
        dataset = _without(dataset, {item.item_id for item in ours.items[trained:]})
        ours = Catalogue(ours.items[:trained])
    elif not without_added:
        dataset = as_known_by(bundle, dataset, from_end)
        dataset = _without(dataset, set(ours.unknown(item.item_id for item in dataset.catalogue.items)))
    theirs = dataset.catalogue
    if item_order_sha256(ours) == item_order_sha256(theirs):
        return dataset
    lacking = [
        f"{place} lacks {told}"
        for place, there, others in ((bundle.version, ours, theirs.items), (dataset.source, theirs, ours.items[:trained]))
        if (told := _told(there.unknown(item.item_id for item in others)))
    ]
    if lacking:
        raise DataError(
            f"{bundle.version} knows {len(ours)} items, {dataset.source} has {len(theirs)}, and they are not the same: "
            f"{', and '.join(lacking)}; give the data set the model was trained on"
        )
    index = np.array([0, *(ours.index_of(item.item_id) for item in theirs.items)], np.int32)
    return replace(dataset, interactions=replace(dataset.interactions, items=index[dataset.interactions.items]), catalogue=ours)


def as_known_by(bundle: Bundle, dataset: Dataset, from_end: int = TEST) -> Dataset:
    """The data set, with all its items, without events of those that the bundle does not know, which is warned of. Users with one of them
    among their last `from_end` events have none left: an earlier one would be measured, which a version that knows them all may have
    learnt. Raises DataError where most events are of unknown items.
    """
    if not (unknown := bundle.catalogue.unknown(item.item_id for item in dataset.catalogue.items)):
        return dataset
    events, lacking = dataset.interactions, set(unknown)
    known = np.array([True, *(item.item_id not in lacking for item in dataset.catalogue.items)])[events.items]
    of, skipped = f"{bundle.version} does not know {_told(unknown)} of {dataset.source}", len(events) - int(known.sum())
    if skipped > len(events) / 2:
        raise DataError(f"{of}, and {skipped:,} of {len(events):,} events are of these; give the data set the model was trained on")
    users, measured = np.repeat(np.arange(events.users), events.lengths), np.repeat(events.offsets[1:] - from_end, events.lengths)
    left_out = np.bincount(users[~known & (np.arange(len(events)) >= measured)], minlength=events.users) > 0
    told = "%s: %s of %s events are left out, and so are %s users with one of them at the end"
    logger.warning(told, of, f"{skipped:,}", f"{len(events):,}", f"{int(left_out.sum()):,}")
    return replace(dataset, interactions=events.where(known & ~left_out[users]))


def _without(dataset: Dataset, item_ids: AbstractSet[str]) -> Dataset:
    """The data set without these items and their events; users stay, also where they have no event left."""
    if not item_ids:
        return dataset
    kept = [index for index, item in enumerate(dataset.catalogue.items, start=1) if item.item_id not in item_ids]
    index = np.zeros(len(dataset.catalogue) + 1, np.int32)
    index[kept] = np.arange(1, len(kept) + 1)
    events = replace(dataset.interactions, items=index[dataset.interactions.items])
    catalogue = Catalogue([dataset.catalogue[item] for item in kept])
    return replace(dataset, interactions=events.where(events.items > 0), catalogue=catalogue)


def _told(item_ids: Sequence[str]) -> str:
    """The first few of the ids, and how many more there are; "" where there are none."""
    more = f" and {len(item_ids) - _TOLD} more" if len(item_ids) > _TOLD else ""
    return ", ".join(map(repr, item_ids[:_TOLD])) + more
