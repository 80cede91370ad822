"""Bodies of requests to a model: users with a few events over its items, always the same."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cluster.bundle_store import BundleStore

START = 1_700_000_000


def bodies(model_dir: Path, users: int = 64, events: int | None = None, **fields: Any) -> tuple[str, ...]:
    """`users` requests of the items of the model that is served, with so many events, else 3 to 19 of them, and `fields` in each."""
    items, rng = _items(model_dir), np.random.default_rng(0)
    chosen = (rng.choice(len(items), events or rng.integers(3, 20), replace=False) for _ in range(users))
    return tuple(_body(number, items, mine, fields) for number, mine in enumerate(chosen))


def alike(model_dir: Path, users: int, shared: int, own: int, **fields: Any) -> tuple[str, ...]:
    """As `bodies`, of users with the same `shared` first events, at the same times, and so many of their `own` behind them."""
    items, rng = _items(model_dir), np.random.default_rng(0)
    first = rng.choice(len(items), shared, replace=False)
    chosen = (np.concatenate([first, rng.choice(len(items), own, replace=False)]) for _ in range(users))
    return tuple(_body(number, items, mine, fields) for number, mine in enumerate(chosen))


def _items(model_dir: Path) -> list[str]:
    return [item.item_id for item in BundleStore(model_dir).open_last_good()[0].catalogue.items]


def _body(number: int, items: list[str], chosen: Iterable[int], fields: Mapping[str, Any]) -> str:
    behaviours = [{"item_id": items[item], "timestamp": START + 3600 * step} for step, item in enumerate(chosen)]
    asked_at = START + 3600 * max(len(behaviours), 55)
    return json.dumps({"user_id": f"load-{number}", "behaviours": behaviours, "request_time": asked_at, "k": 10, **fields})
