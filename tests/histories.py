"""Made-up data in which something can be learnt: users of two tastes, who choose from one half of the catalogue each."""

import numpy as np

from cluster.dataset import Catalogue, Dataset, Interactions
from cluster.values import Item


def taste_data(*, users: int = 60, items: int = 200, length: int = 20, seed: int = 0) -> Dataset:
    """Even users choose even items, odd users odd ones; each walks on by small steps, so that the next item is near the last."""
    rng = np.random.default_rng(seed)
    starts, steps = rng.integers(0, items // 2, (users, 1)), rng.integers(1, 4, (users, length)).cumsum(axis=1)
    walks = 1 + ((starts + steps) % (items // 2)) * 2 + (np.arange(users) % 2)[:, None]
    events = Interactions(
        user_ids=[f"user {number}" for number in range(users)],
        offsets=np.arange(0, users * length + 1, length, dtype=np.int64),
        items=walks.ravel().astype(np.int32),
        timestamps=np.tile(1_700_000_000 + np.arange(length) * 3600, users).astype(np.int64),
        actions=np.zeros(users * length, np.int8),
        values=np.full(users * length, np.nan, np.float32),
    )
    return Dataset("tastes", events, Catalogue([Item(str(number), f"Item {number}") for number in range(1, items + 1)]), "made up")
