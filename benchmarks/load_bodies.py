"""Bodies of requests to a model: users with a few events over its items, always the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from cluster.bundle import BundleStore


def bodies(model_dir: Path, users: int = 64, events: int | None = None, **fields: Any) -> tuple[str, ...]:
    """`users` requests of the items of the model that is served, with so many events, else 3 to 19 of them, and `fields` in each."""
    bundle, _ = BundleStore(model_dir).open_last_good()
    items = [item.item_id for item in bundle.catalogue.items]
    rng = np.random.default_rng(0)
    return tuple(json.dumps({**_user(rng, number, items, events), "k": 10, **fields}) for number in range(users))


def _user(rng: np.random.Generator, number: int, items: list[str], events: int | None) -> dict[str, Any]:
    chosen = rng.choice(len(items), events or rng.integers(3, 20), replace=False)
    behaviours = [{"item_id": items[item], "timestamp": 1_700_000_000 + 3600 * step} for step, item in enumerate(chosen)]
    return {"user_id": f"load-{number}", "behaviours": behaviours, "request_time": 1_700_000_000 + 3600 * max(len(chosen), 55)}
