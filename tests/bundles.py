"""Small published bundles with random weights, and histories to ask them about."""

from pathlib import Path

import numpy as np
import torch
from pydantic import JsonValue

from cluster.bundle import CATALOGUE, POPULARITY, WEIGHTS, Bundle, BundleStore, ModelRecord
from cluster.catalogue_file import write_catalogue
from cluster.dataset import Catalogue
from cluster.values import Item, UserSequence
from integrations.hstu.weights import build_model, save_weights

CONFIGS: dict[str, dict[str, JsonValue]] = {
    "hstu": {"dim": 16, "layers": 2, "heads": 2, "attention_dim": 8, "linear_dim": 8, "max_length": 31, "max_history": 20},
    "sasrec": {"dim": 16, "layers": 2, "heads": 2, "feedforward_dim": 16, "max_length": 31, "max_history": 20},
}


def make_bundle(root: Path, *, items: int = 200, family: str = "hstu", seed: int = 0, **config: JsonValue) -> Bundle:
    """Publish a version of a model named after `root` and open it. Weights are random but large enough to make histories matter.

    `config` overrides keys of CONFIGS[family]. The catalogue's ids are "1".."V" with titles "Item 1" and so on; item 1 is the most popular.
    """
    store = BundleStore(root)
    record = ModelRecord(family=family, config={**CONFIGS[family], "items": items, **config})
    with store.publish(record) as draft:
        torch.manual_seed(seed)
        model = build_model(record)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)
        save_weights(model, draft.path / WEIGHTS)
        write_catalogue(Catalogue([Item(str(i), f"Item {i}") for i in range(1, items + 1)]), draft.path / CATALOGUE)
        np.save(draft.path / POPULARITY, np.r_[0, np.arange(items, 0, -1)].astype(np.int64))
    return store.open()


def random_sequence(length: int, *, items: int = 200, seed: int = 0) -> UserSequence:
    """A history of `length` events, minutes to weeks apart, asked about an hour after the last."""
    rng = np.random.default_rng([seed, length])
    timestamps = 1_700_000_000 + np.cumsum(np.exp(rng.uniform(4, 14, length)).astype(np.int64))
    return UserSequence(
        items=rng.integers(1, items + 1, length).astype(np.int32),
        timestamps=timestamps,
        actions=np.zeros(length, np.int8),
        values=np.full(length, np.nan, np.float32),
        request_time=int(timestamps[-1]) + 3600,
    )
