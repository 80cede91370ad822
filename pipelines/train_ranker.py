"""Train the ranker: windows of events, and in each event's place the item that the user turned to, beside drawn items.

    trainer = RankerTrainer(ranker, interactions, options)
    best = trainer.fit()                # EpochReport of the epoch whose weights the ranker now has

Each place teaches all tasks at once, from the events before it alone, as a request at that moment would have been answered.
Shapes: B users, L places (events), N candidates of a place, T tasks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional as F

from cluster.dataset import Interactions
from cluster.errors import DataError
from cluster.ranking import Task
from cluster.values import UserSequence
from pipelines.drawing import Drawing
from pipelines.epochs import EpochOptions, EpochTrainer, chosen_device
from pipelines.evaluate_ranker import known_figures, ranker_quality
from pipelines.losses import next_item_loss
from pipelines.ranking_labels import labels
from pipelines.sequence_models import TrainableModule
from pipelines.splits import VALIDATION, Window, Windows, learnt_events, told_windows, training_examples

TEMPERATURE = 0.05
"""The temperature of the softmax over items."""


class RankerOptions(EpochOptions):
    """How to train the ranker."""

    epochs: int = Field(default=10, ge=1, description="at most, and the end of its learning-rate schedule")
    patience: int = Field(default=2, ge=1, description="validations without a better one before it stops")
    batch_users: int = Field(default=32, ge=1, description="users in a batch")
    negatives: int = Field(default=4, ge=1, description="items drawn in each event's place, half of them by popularity")
    weight_decay: float = Field(default=0.01, ge=0)
    window: Window = Field(default="random", description="which part of a history longer than the ranker's window is trained on")


class TrainableRanker(TrainableModule, Protocol):
    """What training asks of a ranker, see integrations/hstu/ranker.py. `config` has items, max_history, tasks and rating."""

    @property
    def config(self) -> Any: ...
    def __call__(
        self, items_BL: Tensor, actions_BL: Tensor, ratings_BL: Tensor, times_BL: Tensor, candidates_BLN: Tensor
    ) -> tuple[Tensor, Tensor]: ...
    def item_vectors(self, items_N: Tensor | None = None) -> Tensor: ...
    def start_from(self, weights: Mapping[str, Tensor]) -> None: ...
    def after(self, sequence: UserSequence, candidates_M: Tensor) -> Tensor: ...
    def collate(self, sequences: Sequence[UserSequence]) -> dict[str, Tensor]: ...


class RankerTrainer(EpochTrainer[Windows, RankerOptions]):
    """A run over the users' windows; validation ranks items in the place of each user's validation event."""

    largest_gradient = 1.0

    def __init__(self, ranker: TrainableRanker, interactions: Interactions, options: RankerOptions, *, device: str = "auto") -> None:
        place = torch.device(chosen_device(device))
        self.ranker, self.interactions = ranker.to(place), interactions
        optimizer = torch.optim.AdamW(ranker.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=options.weight_decay)
        super().__init__(ranker, optimizer, options, place)
        self._drawing = Drawing(learnt_events(interactions, options.held_out_events).popularity(ranker.config.items))
        least = options.held_out_events + 1
        if not (interactions.lengths >= least).any():
            raise DataError(f"none of the {interactions.users} users has events enough to learn from: at least {least} are needed")

    @property
    def remark(self) -> str:
        """How many windows an epoch has, where these are more than one a user."""
        asked, history = self.options, self.ranker.config.max_history + 1
        return told_windows(self.interactions, held_out_events=asked.held_out_events - 1, max_history=history, window=asked.window)

    def examples(self, rng: np.random.Generator) -> Windows:
        """Windows with all events that may be learnt. Here the last event of a window is a place too, and the item after it is not used.
        Before the last place there are as many events as a ranker is ever given.
        """
        history, options = self.ranker.config.max_history + 1, self.options
        return training_examples(
            self.interactions, held_out_events=options.held_out_events - 1, max_history=history, window=options.window, rng=rng
        )

    def _batches(self, rng: np.random.Generator) -> list[Windows]:
        """An epoch's windows in batches of similar length, in random order."""
        windows, size = self.examples(rng), self.options.batch_users
        order = np.argsort(windows.lengths + rng.random(len(windows)), kind="stable")
        batches = [windows[order[start : start + size]] for start in range(0, len(order), size)]
        self._rng = rng
        return [batches[index] for index in rng.permutation(len(batches)).tolist()]

    def _loss(self, batch: Windows) -> tuple[Tensor, int]:
        columns, config = self.ranker.collate([example.history for example in batch]), self.ranker.config
        drawn = torch.from_numpy(self._drawing.draw((*columns["items"].shape, self.options.negatives), self._rng))
        candidates_BLN = torch.cat([columns["items"].unsqueeze(2), drawn], dim=2).to(self.device)
        taught = torch.from_numpy(labels(columns["actions"].numpy(), columns["values"].numpy(), config.rating, config.tasks))
        items, actions, ratings, times = (columns[name].to(self.device) for name in ("items", "actions", "ratings", "times"))
        places = items != 0
        logits_BLNT, states_BLD = self.ranker(items, actions, ratings, times, candidates_BLN)
        candidates_RN, logits_RNT = candidates_BLN[places], logits_BLNT[places]
        loss = self._of_event(logits_RNT[:, 0], taught.to(self.device)[places])
        loss = loss + _of_drawn(logits_RNT[:, 1:, 0], candidates_RN[:, 1:] == candidates_RN[:, :1])
        loss = loss + next_item_loss(states_BLD[places], self.ranker, items[places], TEMPERATURE)
        return loss, len(candidates_RN)

    def _of_event(self, logits_RT: Tensor, labels_RT: Tensor) -> Tensor:
        """The sum of the tasks' mean losses: cross entropy, but for ratings the squared error in units of their deviation."""
        losses, scale = [], self.ranker.config.rating
        for task, logits, wanted in zip(self.ranker.config.tasks, logits_RT.unbind(1), labels_RT.unbind(1), strict=True):
            said = torch.isfinite(wanted)
            if task is Task.RATING:
                losses.append(((logits[said] - (wanted[said] - scale.mean) / scale.deviation) ** 2).sum())
            else:
                losses.append(F.binary_cross_entropy_with_logits(logits[said], wanted[said], reduction="sum"))
        return torch.stack(losses).sum() / len(logits_RT)

    def _validate(self) -> dict[str, float]:
        quality = ranker_quality(self.ranker, self.interactions, from_end=VALIDATION, device=self.device)
        self.ranker.train()
        return known_figures(quality)


def _of_drawn(clicks_RN: Tensor, collides_RN: Tensor) -> Tensor:
    """Cross entropy of N drawn items as non-clicks, summed over an event and averaged over R events; draws of the event's own item
    (`collides_RN`) are left out.
    """
    return (F.softplus(clicks_RN) * ~collides_RN).sum() / len(clicks_RN)
