"""Train a sequence model: windows of behaviour -> states -> softmax over the catalogue, stopped by the validation event.

trainer = Trainer(model, interactions, options)
best = trainer.fit()                # EpochReport of the epoch whose weights the model now has
"""

from collections.abc import Callable

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from cluster.dataset import Interactions
from cluster.errors import DataError
from cluster.values import Int64Array
from pipelines.epochs import EpochOptions, EpochTrainer, chosen_device
from pipelines.evaluate import MOST_USERS, evaluate
from pipelines.losses import SMALL_CATALOGUE, Loss, Seen, next_item_loss
from pipelines.sequence_models import TrainableModel
from pipelines.splits import VALIDATION, Window, Windows, told_windows, training_examples


class TrainOptions(EpochOptions):
    """How to train. Defaults are HSTU's research code, save the full softmax and the smaller batch, which learn faster on a CPU."""

    batch_users: int = Field(default=64, ge=1, description="users in a batch")
    loss: Loss = Field(
        default="auto",
        description=f"softmax over the whole catalogue (full), over drawn items (sampled), or auto: full up to {SMALL_CATALOGUE} items",
    )
    negatives: int = Field(default=128, ge=1, description="items drawn for each event by the sampled loss")
    temperature: float = Field(default=0.05, gt=0)
    seen_as_negatives: bool = Field(
        default=True,
        description="count items a user has seen as wrong answers; switch it off where users do not come back to items",
    )
    window: Window = Field(
        default="random",
        description="random: long histories give other windows too, several an epoch where one a user would be few; latest: only the last",
    )
    compile: bool = Field(default=False, description="torch.compile: slow to start, then several times faster")


class Trainer(EpochTrainer[Windows, TrainOptions]):
    """A run over the users' windows."""

    def __init__(self, model: TrainableModel, interactions: Interactions, options: TrainOptions, *, device: str = "auto") -> None:
        place = torch.device(chosen_device(device))
        self.model, self.interactions = model.to(place), interactions
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0)
        super().__init__(model, optimizer, options, place)
        self.forward: Callable[..., Tensor] = torch.compile(model, dynamic=False) if options.compile else model
        least = options.held_out_events + 2
        if not (interactions.lengths >= least).any():
            raise DataError(f"none of the {interactions.users} users has events enough to learn from: at least {least} are needed")

    @property
    def remark(self) -> str:
        """How many windows an epoch has, where these are more than one a user."""
        asked, history = self.options, self.model.config.max_history
        return told_windows(self.interactions, held_out_events=asked.held_out_events, max_history=history, window=asked.window)

    def _batches(self, rng: np.random.Generator) -> list[Windows]:
        """The epoch's windows in batches of similar length, shuffled within a length and among each other."""
        asked, history = self.options, self.model.config.max_history
        windows = training_examples(
            self.interactions, held_out_events=asked.held_out_events, max_history=history, window=asked.window, rng=rng
        )
        order = rng.permutation(len(windows))
        padded = self._padded(windows.lengths[order])
        groups = [order[padded == length] for length in dict.fromkeys(padded)]
        batches = [group[start : start + asked.batch_users] for group in groups for start in range(0, len(group), asked.batch_users)]
        return [windows[batches[index]] for index in rng.permutation(len(batches)).tolist()]

    def _padded(self, lengths: Int64Array) -> Int64Array:
        """The lengths padded to a quarter, a half or all of the window: a compiled model is compiled anew for each length."""
        longest = self.model.config.max_history
        sizes = np.array([-(-longest // 4), -(-longest // 2), longest])
        return sizes[np.searchsorted(sizes, lengths)]

    def _loss(self, batch: Windows) -> tuple[Tensor, int]:
        examples = list(batch)
        histories = [example.history for example in examples]
        padding = self.options.batch_users - len(batch) if self.options.compile else 0  # a compiled model wants one batch size
        pad_to = int(self._padded(batch.lengths).max())
        columns = self.model.collate([*histories, *[histories[0]] * padding], pad_to=pad_to).tensors()
        states_BLD = self.forward(*(columns[name].to(self.device) for name in ("items", "times", "next_times")))[: len(batch)]
        items_BL = columns["items"][: len(batch)].to(self.device)
        targets_R = torch.from_numpy(np.concatenate([example.targets for example in examples])).to(self.device)
        seen = None if self.options.seen_as_negatives else Seen.of(items_BL, self.model.config.items)
        states_RD, asked = states_BLD[items_BL != 0], self.options
        loss = next_item_loss(states_RD, self.model, targets_R, asked.temperature, seen, loss=asked.loss, negatives=asked.negatives)
        return loss, len(targets_R)

    def _validate(self) -> dict[str, float]:
        return dict(evaluate(self.model, self.interactions, from_end=VALIDATION, most_users=MOST_USERS))
