"""Train a sequence model: windows of behaviour -> states -> softmax over the catalogue, stopped by the validation event.

    trainer = Trainer(model, interactions, options)
    best = trainer.fit()                # EpochReport of the epoch whose weights the model now has

Everything that draws at random takes its numbers from `options.seed` and the epoch, so that a run resumed from a checkpoint is
bit-equal to one that was never interrupted (on a CPU; a GPU adds up in no fixed order).
"""

import copy
import math
import pickle
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from cluster.dataset import Interactions
from cluster.errors import DataError
from pipelines.evaluate import evaluate
from pipelines.losses import Seen, full_softmax, sampled_softmax
from pipelines.sequence_models import TrainableModel
from pipelines.splits import VALIDATION, Example, Window, training_examples

SMALL_CATALOGUE = 20_000
"""Up to this many items the softmax over all of them is cheap, and it is stronger than sampling."""


class TrainOptions(BaseModel):
    """How to train. Defaults are HSTU's research code, save the full softmax and the smaller batch, which learn faster on a CPU."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: int = Field(default=100, ge=1)
    batch_users: int = Field(default=64, ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: Literal["constant", "cosine"] = Field(default="cosine", description="cosine falls to a hundredth at the last epoch")
    loss: Literal["auto", "full", "sampled"] = Field(default="auto", description=f"auto: full up to {SMALL_CATALOGUE} items")
    negatives: int = Field(default=128, ge=1, description="items drawn for each event by the sampled loss")
    temperature: float = Field(default=0.05, gt=0)
    seen_as_negatives: bool = Field(
        default=True, description="without, items a user has seen are no wrong answers: fits catalogues where nobody comes back to an item"
    )
    window: Window = Field(default="random", description="which part of a history longer than the model's window is trained on")
    validate_every: int = Field(
        default=1, ge=0, description="epochs between validations; 0: none, the last epoch counts and all but the test event is learnt"
    )
    patience: int = Field(default=10, ge=1, description="validations without a better one after which training stops")
    stop_after: int | None = Field(default=None, ge=1, description="stop after this many epochs, with `epochs` still the schedule's end")
    seed: int = 42
    compile: bool = Field(default=False, description="torch.compile the layers: a few minutes once, then several times faster")


@dataclass(frozen=True)
class EpochReport:
    """How an epoch went; `validation` is empty where none was due."""

    epoch: int
    loss: float
    seconds: float
    validation: dict[str, float]

    @property
    def score(self) -> float:
        """What the best epoch is chosen by."""
        return self.validation.get("ndcg@10", -math.inf)


class Trainer:
    """One training run, an epoch at a time; `state` and `restore` carry it over a restart."""

    def __init__(self, model: TrainableModel, interactions: Interactions, options: TrainOptions, *, device: str = "auto") -> None:
        self.device = torch.device(chosen_device(device))
        self.model, self.interactions, self.options = model.to(self.device), interactions, options
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0)
        self.forward: Callable[..., Tensor] = torch.compile(model, dynamic=False) if options.compile else model
        self.history: list[EpochReport] = []
        self.best_weights: dict[str, Tensor] = {}
        if not self._examples(np.random.default_rng(0)):
            raise DataError(
                f"none of the {interactions.users} users has events enough to learn from: at least {self._held_out + 2} are needed"
            )

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return len(self.history)

    @property
    def best(self) -> EpochReport:
        """The epoch with the best validation or, without validation, the last."""
        return max(self.history, key=lambda report: (report.score, report.epoch if report.score == -math.inf else -report.epoch))

    @property
    def finished(self) -> bool:
        last = min(self.options.epochs, self.options.stop_after or self.options.epochs)
        return self.epoch >= last or (bool(self.options.validate_every) and self._stale() >= self.options.patience)

    def fit(
        self, *, after_batch: Callable[[float], None] | None = None, after_epoch: Callable[[EpochReport], None] | None = None
    ) -> EpochReport:
        """Train until finished and put the best epoch's weights into the model."""
        while not self.finished:
            report = self.run_epoch(after_batch)
            if after_epoch:
                after_epoch(report)
        if self.best_weights:
            self.model.load_state_dict(self.best_weights)
        self.model.eval()
        return self.best

    def run_epoch(self, after_batch: Callable[[float], None] | None = None) -> EpochReport:
        """One pass over every user, then a validation where one is due. `after_batch` is told the share of the epoch that is done."""
        began = time.perf_counter()
        torch.manual_seed(_mixed(self.options.seed, self.epoch))
        losses, rows = 0.0, 0
        self.model.train()
        batches = self._batches(np.random.default_rng([self.options.seed, self.epoch]))
        for number, batch in enumerate(batches):
            self._set_learning_rate(self.epoch + number / len(batches))
            losses += self._step(batch) * (count := sum(len(example.history) for example in batch))
            rows += count
            if after_batch:
                after_batch((number + 1) / len(batches))
        return self._finish_epoch(losses / rows, began)

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, to be saved with torch.save."""
        return {
            "options": self.options.model_dump(mode="json"),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best_weights": self.best_weights,
            "history": [asdict(report) for report in self.history],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`. Raises DataError where it was made with other options; only what merely lengthens a run may differ."""
        free = {"patience"} | ({"epochs"} if self.options.schedule == "constant" else set())
        saved, now = state["options"], self.options.model_dump(mode="json")
        names = [name for name in now if name not in free and saved.get(name) != now[name]]
        if different := [f"{name} ({saved.get(name)}, now {now[name]})" for name in names]:
            values = ", ".join(different)
            raise DataError(f"the checkpoint was made with other options: {values}; give the same ones, or start anew without --resume")
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best_weights = state["best_weights"]
        self.history = [EpochReport(**report) for report in state["history"]]

    @property
    def _held_out(self) -> int:
        return 2 if self.options.validate_every else 1

    def _examples(self, rng: np.random.Generator) -> list[Example]:
        history = self.model.config.max_history
        return training_examples(
            self.interactions, held_out_events=self._held_out, max_history=history, window=self.options.window, rng=rng
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
        """A quarter, a half or all of the window: few shapes, so that a compiled model is compiled for few."""
        longest = self.model.config.max_history
        return next(size for size in (-(-longest // 4), -(-longest // 2), longest) if length <= size)

    def _step(self, batch: list[Example]) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    def _loss(self, batch: list[Example]) -> Tensor:
        histories = [example.history for example in batch]
        padding = self.options.batch_users - len(batch) if self.options.compile else 0  # a compiled model wants one batch size
        columns = self.model.collate([*histories, *[histories[0]] * padding], pad_to=self._padded(max(map(len, histories)))).tensors()
        states_BLD = self.forward(*(columns[name].to(self.device) for name in ("items", "times", "next_times")))[: len(batch)]
        items_BL = columns["items"][: len(batch)].to(self.device)
        targets_R = torch.from_numpy(np.concatenate([example.targets for example in batch])).to(self.device)
        seen = None if self.options.seen_as_negatives else Seen.of(items_BL, self.model.config.items)
        return self._softmax(states_BLD[items_BL != 0], self.model.item_vectors(), targets_R, seen)

    def _softmax(self, states_RD: Tensor, vectors_VD: Tensor, targets_R: Tensor, seen: Seen | None) -> Tensor:
        temperature, negatives = self.options.temperature, self.options.negatives
        if self.options.loss == "full" or (self.options.loss == "auto" and len(vectors_VD) <= SMALL_CATALOGUE):
            return full_softmax(states_RD, vectors_VD, targets_R, temperature, seen)
        return sampled_softmax(states_RD, vectors_VD, targets_R, temperature, seen, negatives=negatives)

    def _set_learning_rate(self, epochs_done: float) -> None:
        share = epochs_done / self.options.epochs
        factor = 1.0 if self.options.schedule == "constant" else 0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * factor

    def _finish_epoch(self, loss: float, began: float) -> EpochReport:
        due = self.options.validate_every and (self.epoch + 1) % self.options.validate_every == 0
        validation = dict(evaluate(self.model, self.interactions, from_end=VALIDATION)) if due else {}
        report = EpochReport(self.epoch + 1, loss, time.perf_counter() - began, validation)
        self.history.append(report)
        if validation and self.best is report:
            self.best_weights = copy.deepcopy(self.model.state_dict())
        return report

    def _stale(self) -> int:
        """Validations since the best one."""
        validated = [report.epoch for report in self.history if report.validation]
        return sum(epoch > self.best.epoch for epoch in validated)


def chosen_device(name: str) -> str:
    """`name`, or for "auto" the GPU where there is one."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write the run's state beside `path` and rename it, so that an interruption leaves the last one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    torch.save(trainer.state(), partial)
    partial.replace(path)


def load_checkpoint(trainer: Trainer, path: Path) -> None:
    """Go on from what `save_checkpoint` wrote. Raises DataError where it is damaged or of another model."""
    try:
        trainer.restore(torch.load(path, map_location=trainer.device, weights_only=True))
    except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise DataError(f"{path} is damaged or the checkpoint of another model; start anew without --resume: {error}") from error


def _mixed(seed: int, epoch: int) -> int:
    """A seed of torch's generator for one epoch, unlike that of any other epoch or neighbouring seed."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
