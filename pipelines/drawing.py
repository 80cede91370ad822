"""Items drawn at random, to be ranked beside the item that a user turned to."""

import numpy as np

from cluster.values import Int64Array

POPULARITY_POWER = 0.75


class Drawing:
    """Draws every other item by its popularity to the power of `POPULARITY_POWER`, the others uniformly from all items."""

    def __init__(self, popularity: Int64Array) -> None:
        """`popularity`: events by catalogue index, (V + 1,)."""
        shares = (popularity[1:].astype(np.float64) + 1) ** POPULARITY_POWER
        self._items, self._steps = len(shares), np.cumsum(shares / shares.sum())

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> Int64Array:
        """Catalogue indices of this shape; the two kinds alternate in its last dimension."""
        drawn = rng.integers(1, self._items + 1, shape)
        by_popularity = np.searchsorted(self._steps, rng.random(drawn[..., ::2].shape)) + 1
        drawn[..., ::2] = np.minimum(by_popularity, self._items)  # the last step may lie below 1 by rounding
        return drawn
