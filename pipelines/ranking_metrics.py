"""Metrics of a ranking with one right answer, from the rank (1 = first) it was given."""

from collections.abc import Mapping

import numpy as np

from cluster.values import Int64Array

HIT_CUTOFFS = (10, 50, 200)
NDCG_CUTOFFS = (10, 50)


def ranking_metrics(ranks: Int64Array) -> Mapping[str, float]:
    """HR@10/50/200, NDCG@10/50 and MRR over all ranks, by names such as ``hr@10``; zeros where there are none."""
    if not len(ranks):
        ranks = np.array([np.iinfo(np.int64).max])
    gains = 1 / np.log2(ranks.astype(np.float64) + 1)
    hits = {f"hr@{k}": float(np.mean(ranks <= k)) for k in HIT_CUTOFFS}
    ndcg = {f"ndcg@{k}": float(np.mean(np.where(ranks <= k, gains, 0.0))) for k in NDCG_CUTOFFS}
    return {**hits, **ndcg, "mrr": float(np.mean(1 / ranks))}


def up_to(most: int | None, metrics: Mapping[str, float]) -> Mapping[str, float]:
    """The metrics less those of more than `most` items; all where that is None."""
    return {name: value for name, value in metrics.items() if most is None or int(name.partition("@")[2] or 0) <= most}
