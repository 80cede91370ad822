"""Measure a ranker on each user's held-out event: whether it ranks before drawn items, and how well its labels are predicted.

Each event is ranked among the items of `CANDIDATES` draws, the same ones every time, and each item once: of a small catalogue they are few.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from cluster.dataset import Interactions
from cluster.errors import DataError
from cluster.ranking import Task
from cluster.values import Action, FloatArray, UserSequence
from pipelines.drawing import Drawing
from pipelines.ranking_labels import labels
from pipelines.ranking_metrics import ranking_metrics

CANDIDATES = 200
MOST_USERS = 2000


class MeasuredRanker(Protocol):
    """`after`: predictions (M, T) of candidates after one user's events."""

    @property
    def config(self) -> Any: ...
    def eval(self) -> Any: ...
    def after(self, sequence: UserSequence, candidates_M: Tensor) -> Tensor: ...


def ranker_quality(ranker: MeasuredRanker, interactions: Interactions, *, from_end: int, device: torch.device) -> dict[str, float]:
    """`hr@10` and `ndcg@10` of the event among drawn items by the first task, without dislikes, which are to rank low; for every task
    `auc.TASK`; for `rating` `rmse.rating` and, to compare with, `rmse.mean`, that of always predicting the mean. NaN where the events have
    no labels for a task.

    Where more than `MOST_USERS` users have such an event, that many are drawn. The ranker is left in eval mode.
    Raises DataError where a prediction is not finite.
    """
    ranker.eval()
    tasks, scale = ranker.config.tasks, ranker.config.rating
    rng = np.random.default_rng(0)
    users = rng.permutation(np.flatnonzero(interactions.lengths >= from_end))[:MOST_USERS].tolist()
    drawn = Drawing(interactions.popularity(ranker.config.items)).draw((len(users), CANDIDATES), rng)
    said, predicted, first = [], [], []
    with torch.inference_mode():
        for user, others in zip(users, drawn, strict=True):
            event = int(interactions.offsets[user + 1]) - from_end
            target = interactions.items[event]
            candidates = np.concatenate([[target], np.unique(others[others != target])])
            history = interactions.sequence(user, drop_last=from_end)
            predictions = ranker.after(history, torch.from_numpy(candidates).to(device)).cpu().numpy()
            if not np.isfinite(predictions).all():
                raise DataError("the ranker predicts NaN or infinity; train it again with a lower learning rate")
            predicted.append(predictions[0])
            if interactions.actions[event] != Action.DISLIKE.code:
                first.append(predictions[:, 0])
            said.append(labels(interactions.actions[event : event + 1], interactions.values[event : event + 1], scale, tasks)[0])
    return _quality(tasks, np.stack(said), np.stack(predicted), first)


def known_figures(quality: Mapping[str, float]) -> dict[str, float]:
    """Without the figures of which the events say nothing: a manifest is JSON, which has no NaN."""
    return {name: value for name, value in quality.items() if np.isfinite(value)}


def _quality(tasks: Sequence[Task], said: FloatArray, predicted: FloatArray, first: Sequence[FloatArray]) -> dict[str, float]:
    ranks = np.array([int((scores[1:] >= scores[0]).sum()) + 1 for scores in first], np.int64)
    metrics = ranking_metrics(ranks)
    quality = {name: metrics[name] for name in ("hr@10", "ndcg@10")}
    above = [(scores[1:] < scores[0]).mean() + (scores[1:] == scores[0]).mean() / 2 for scores in first if len(scores) > 1]
    quality["auc.click"] = float(np.mean(above)) if above else float("nan")
    for column, task in enumerate(tasks):
        known = np.isfinite(said[:, column])
        wanted, got = said[known, column], predicted[known, column]
        if task is Task.RATING:
            quality["rmse.rating"] = float(np.sqrt(np.mean((got - wanted) ** 2))) if len(wanted) else float("nan")
            quality["rmse.mean"] = float(np.std(wanted)) if len(wanted) else float("nan")
        elif task is not Task.CLICK:
            quality[f"auc.{task}"] = auc(got, wanted)
    return quality


def auc(scores: FloatArray, wanted: FloatArray) -> float:
    """How often a wanted item (1) has a higher score than an unwanted one (0); ties count half. NaN where one kind is missing."""
    right, wrong = scores[wanted == 1], np.sort(scores[wanted == 0])
    if not len(right) or not len(wrong):
        return float("nan")
    below = (np.searchsorted(wrong, right, "left") + np.searchsorted(wrong, right, "right")) / 2
    return float(np.mean(below) / len(wrong))
