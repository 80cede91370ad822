"""Put a model and its catalogue into a new bundle version."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cluster.bundle import CATALOGUE, FIRST_SEEN, ITEM_VECTORS, LEARNT, POPULARITY, WEIGHTS, Bundle, ModelRecord
from cluster.bundle_store import BundleStore, Draft
from cluster.catalogue_file import write_catalogue
from cluster.dataset import Catalogue, Dataset
from cluster.values import FloatArray, Int64Array
from deployments.training.provenance import held_back, provenance, window_of
from integrations.hstu.weights import save_weights
from pipelines.sequence_models import TrainableModel, TrainableModule
from pipelines.splits import learnt_items


def publish(
    model_dir: Path,
    record: ModelRecord,
    model: TrainableModel,
    dataset: Dataset,
    *,
    training: Mapping[str, Any],
    quality: Mapping[str, float],
    puts: Iterable[Callable[[Draft], None]] = (),
) -> Bundle:
    """Publish a new current version of the model in `model_dir`, and open it; `puts` add its other parts, such as the decoder."""
    store = BundleStore(model_dir)
    with store.publish(record) as draft:
        items, vectors = len(dataset.catalogue), model.item_vectors().detach().cpu().numpy()
        popularity, first_seen = dataset.interactions.popularity(items), dataset.interactions.first_seen(items)
        write_required(draft, model, dataset.catalogue, popularity=popularity, first_seen=first_seen, item_vectors=vectors)
        held_out_events, window, max_history = held_back(training), window_of(training), model.config.max_history
        learnt = learnt_items(dataset.interactions, items, held_out_events=held_out_events, max_history=max_history, window=window)
        np.save(draft.path / LEARNT, learnt)
        for put in puts:
            put(draft)
        draft.training, draft.quality = {**provenance(dataset), **training}, dict(quality)
    return store.open(draft.version)


def write_required(
    draft: Draft, model: TrainableModule, catalogue: Catalogue, *, popularity: Int64Array, first_seen: Int64Array, item_vectors: FloatArray
) -> None:
    """Write the files that every version has; the arrays are by catalogue index, (V + 1, ...)."""
    save_weights(model.state_dict(), draft.path / WEIGHTS)
    write_catalogue(catalogue, draft.path / CATALOGUE)
    np.save(draft.path / POPULARITY, popularity)
    np.save(draft.path / FIRST_SEEN, first_seen)
    np.save(draft.path / ITEM_VECTORS, item_vectors)
