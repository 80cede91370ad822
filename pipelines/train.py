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
from pipelines.epochs import EpochOptions, EpochTrainer, chosen_device
from pipelines.evaluate import evaluate
from pipelines.losses import SMALL_CATALOGUE, Loss, Seen, next_item_loss
from pipelines.sequence_models import TrainableModel
from pipelines.splits import VALIDATION, Example, Window, training_examples

VALIDATED_USERS = 20_000
"""How many users' validation events are ranked after an epoch: enough to tell a share of hits to 0.4 % or better. The figures of the
trained model are over all users.
"""


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
    window: Window = Field(default="random", description="random: long histories give other windows too; latest: only the last")
    compile: bool = Field(default=False, description="torch.compile: slow to start, then several times faster")


class Trainer(EpochTrainer[list[Example], TrainOptions]):
    """A run over the users' windows."""

    def __init__(self, model: TrainableModel, interactions: Interactions, options: TrainOptions, *, device: str = "auto") -> None:
        place = torch.device(chosen_device(device))
        self.model, self.interactions = model.to(place), interactions
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0)
        super().__init__(model, optimizer, options, place)
        self.forward: Callable[..., Tensor] = torch.compile(model, dynamic=False) if options.compile else model
        if not self._examples(np.random.default_rng(0)):
            least = options.held_out_events + 2
            raise DataError(f"none of the {interactions.users} users has events enough to learn from: at least {least} are needed")

    def _examples(self, rng: np.random.Generator) -> list[Example]:
        history = self.model.config.max_history
        return training_examples(
            self.interactions, held_out_events=self.options.held_out_events, max_history=history, window=self.options.window, rng=rng
        )

    def _batches(self, rng: np.random.Generator) -> list[list[Example]]:
        """The epoch's examples in batches of similar length, shuffled within a length and among each other."""
        examples = self._examples(rng)
        size = self.options.batch_users
        by_length: dict[int, list[Example]] = {}
        for index in rng.permutation(len(examples)).tolist():
            by_length.setdefault(self._padded(len(examples[index].history)), []).append(examples[index])
        batches = [group[start : start + size] for group in by_length.values() for start in range(0, len(group), size)]
        return [batches[index] for index in rng.permutation(len(batches)).tolist()]

    def _padded(self, length: int) -> int:
        """The length padded to a quarter, a half or all of the window: a compiled model is compiled anew for each length."""
        longest = self.model.config.max_history
        return next(size for size in (-(-longest // 4), -(-longest // 2), longest) if length <= size)

    def _loss(self, batch: list[Example]) -> tuple[Tensor, int]:
        histories = [example.history for example in batch]
        padding = self.options.batch_users - len(batch) if self.options.compile else 0  # a compiled model wants one batch size
        columns = self.model.collate([*histories, *[histories[0]] * padding], pad_to=self._padded(max(map(len, histories)))).tensors()
        states_BLD = self.forward(*(columns[name].to(self.device) for name in ("items", "times", "next_times")))[: len(batch)]
        items_BL = columns["items"][: len(batch)].to(self.device)
        targets_R = torch.from_numpy(np.concatenate([example.targets for example in batch])).to(self.device)
        seen = None if self.options.seen_as_negatives else Seen.of(items_BL, self.model.config.items)
        states_RD, vectors_VD, asked = states_BLD[items_BL != 0], self.model.item_vectors(), self.options
        loss = next_item_loss(states_RD, vectors_VD, targets_R, asked.temperature, seen, loss=asked.loss, negatives=asked.negatives)
        return loss, len(targets_R)

    def _validate(self) -> dict[str, float]:
        return dict(evaluate(self.model, self.interactions, from_end=VALIDATION, most_users=VALIDATED_USERS))
