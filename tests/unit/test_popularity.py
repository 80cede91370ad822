"""What most people chose."""

import numpy as np
import pytest

from pipelines.popularity import Popularity


@pytest.mark.parametrize("top_n", [1, 5, 200])
def test_those_among_some_items_are_the_most_popular_ones_of_these(top_n):
    rng = np.random.default_rng(0)
    counts = np.concatenate(([0], rng.integers(0, 5, 100)))
    popular, among = Popularity(counts), np.unique(rng.integers(1, 101, 40)).astype(np.int32)
    best = sorted(among.tolist(), key=lambda item: (-counts[item], item))[:top_n]
    items, shares = popular.nearest(top_n, among)
    assert items.tolist() == best
    assert shares == pytest.approx(counts[best] / counts.sum())
    assert popular.nearest(top_n)[0].tolist() == sorted(range(1, 101), key=lambda item: (-counts[item], item))[:top_n]
    assert popular.nearest(top_n, np.empty(0, np.int32))[0].tolist() == []
