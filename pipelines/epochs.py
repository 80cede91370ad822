"""The common part of all training runs: epochs with a learning-rate schedule, validation, early stop, resume.

All random numbers follow from `options.seed` and the epoch, so that a run resumed from a checkpoint is bit-equal to one that was never
interrupted (on a CPU; a GPU adds up in no fixed order).
"""

import copy
import math
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from cluster.checksums import require_intact
from cluster.disk import flush
from cluster.errors import ConfigError, DataError, UnknownChoice
from pipelines.sequence_models import TrainableModule

BatchT = TypeVar("BatchT")
OptionsT = TypeVar("OptionsT", bound="EpochOptions")


class EpochOptions(BaseModel):
    """How long and how fast to train."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    epochs: int = Field(default=100, ge=1, description="at most, and the end of the learning-rate schedule")
    learning_rate: float = Field(default=1e-3, gt=0)
    schedule: Literal["constant", "cosine"] = Field(
        default="cosine", description="cosine or constant learning rate; cosine falls to a hundredth"
    )
    validate_every: int = Field(
        default=1, ge=0, description="epochs between validations; 0: none, the last epoch counts and all but the test event is learnt"
    )
    patience: int = Field(default=10, ge=1, description="validations without a better one before it stops")
    stop_after: int | None = Field(default=None, ge=1, description="stop after this many epochs, with `epochs` still the schedule's end")
    seed: int = Field(default=42, ge=0, lt=2**63)

    @property
    def held_out_events(self) -> int:
        """How many of each user's last events are not learnt: the test event and, where there is validation, that one."""
        return 2 if self.validate_every else 1


@dataclass(frozen=True)
class EpochReport:
    """The figures of an epoch; `validation` is empty where none was due."""

    epoch: int
    loss: float
    seconds: float
    validation: dict[str, float]

    @property
    def score(self) -> float:
        """The figure by which the best epoch is chosen: NDCG@10 or, for a decoder, the validation loss."""
        return self.validation.get("ndcg@10", -self.validation.get("loss", math.inf))


class EpochTrainer(ABC, Generic[BatchT, OptionsT]):
    """One training run, an epoch at a time; `state` and `restore` carry it over a restart. A subclass makes the batches and their losses.

    The learning rate rises over the first `warm_up_epochs`; a gradient longer than `largest_gradient` is shortened to it.
    """

    warm_up_epochs = 0.0
    largest_gradient: float | None = None

    def __init__(self, model: TrainableModule, optimizer: torch.optim.Optimizer, options: OptionsT, device: torch.device) -> None:
        self._trained, self.optimizer, self.options, self.device = model, optimizer, options, device
        self.identity: Mapping[str, Any] = {}  # what is trained, beside its options: a checkpoint of something else is refused
        self.history: list[EpochReport] = []
        self.best_weights: dict[str, Tensor] = {}

    @abstractmethod
    def _batches(self, rng: np.random.Generator) -> Sequence[BatchT]:
        """An epoch's batches, in the order they are learnt."""

    @abstractmethod
    def _loss(self, batch: BatchT) -> tuple[Tensor, int]:
        """The mean loss over a batch's rows, and how many those are."""

    @abstractmethod
    def _validate(self) -> dict[str, float]:
        """Metrics on the validation events, `ndcg@10` or `loss` among them."""

    @property
    def remark(self) -> str:
        """What is to be known of the run before it begins; "" where there is nothing."""
        return ""

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return len(self.history)

    @property
    def seconds(self) -> float:
        """How long all epochs took, including those before a resume."""
        return sum(report.seconds for report in self.history)

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
        """Train until finished and put the best epoch's weights into the model. Raises DataError where the loss is no finite number."""
        while not self.finished:
            report = self.run_epoch(after_batch)
            if after_epoch:
                after_epoch(report)
        if self.best_weights:
            self._trained.load_state_dict(self.best_weights)
        self._trained.eval()
        return self.best

    def run_epoch(self, after_batch: Callable[[float], None] | None = None) -> EpochReport:
        """One pass over all windows, then a validation where one is due. `after_batch`: called with the share of the epoch that is done."""
        began = time.perf_counter()
        torch.manual_seed(_mixed(self.options.seed, self.epoch))
        losses, rows = 0.0, 0
        self._trained.train()
        batches = self._batches(np.random.default_rng([self.options.seed, self.epoch]))
        for number, batch in enumerate(batches):
            self._set_learning_rate(self.epoch + number / len(batches))
            loss, count = self._step(batch)
            losses += loss * count
            rows += count
            if after_batch:
                after_batch((number + 1) / len(batches))
        return self._finish_epoch(losses / rows, began)

    def state(self) -> dict[str, Any]:
        """All that a resumed run needs, to be saved with torch.save."""
        return {
            "identity": dict(self.identity),
            "options": self.options.model_dump(mode="json"),
            "model": self._trained.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best_weights": self.best_weights,
            "history": [asdict(report) for report in self.history],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a `state`. Raises DataError where it was made with other options; only options that lengthen a run may differ."""
        if different := [name for name, value in self.identity.items() if state["identity"].get(name) != value]:
            raise DataError(
                f"the checkpoint is of another model (its {', '.join(different)} differ); give the same options and data, or start anew"
            )
        free = {"patience"} | ({"epochs"} if self.options.schedule == "constant" else set())
        saved, now = state["options"], self.options.model_dump(mode="json")
        names = [name for name in now if name not in free and saved.get(name) != now[name]]
        if different := [f"{name} ({saved.get(name)}, now {now[name]})" for name in names]:
            values = ", ".join(different)
            raise DataError(f"the checkpoint was made with other options: {values}; give the same ones, or start anew without --resume")
        self._trained.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.best_weights = state["best_weights"]
        self.history = [EpochReport(**report) for report in state["history"]]

    def _step(self, batch: BatchT) -> tuple[float, int]:
        self.optimizer.zero_grad(set_to_none=True)
        loss, rows = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if self.largest_gradient is not None:
            torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], self.largest_gradient)
        self.optimizer.step()
        if not math.isfinite(value := loss.item()):
            cure = f"give a lower learning_rate than {self.options.learning_rate:g}, and see that no value of the data is extreme"
            raise DataError(f"the loss became {value} in epoch {self.epoch + 1}, and no weights come back from that; {cure}")
        return value, rows

    def _set_learning_rate(self, epochs_done: float) -> None:
        share = epochs_done / self.options.epochs
        factor = 1.0 if self.options.schedule == "constant" else 0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2
        if epochs_done < self.warm_up_epochs:
            factor *= 0.01 + 0.99 * epochs_done / self.warm_up_epochs
        for group in self.optimizer.param_groups:
            group["lr"] = self.options.learning_rate * factor

    def _finish_epoch(self, loss: float, began: float) -> EpochReport:
        due = self.options.validate_every and (self.epoch + 1) % self.options.validate_every == 0
        validation = self._validate() if due else {}
        report = EpochReport(self.epoch + 1, loss, time.perf_counter() - began, validation)
        self.history.append(report)
        if validation and self.best is report:
            self.best_weights = copy.deepcopy(self._trained.state_dict())
        return report

    def _stale(self) -> int:
        """How many validations there were since the best one."""
        validated = [report.epoch for report in self.history if report.validation]
        return sum(epoch > self.best.epoch for epoch in validated)


def chosen_device(name: str) -> str:
    """`name`, or for "auto" the GPU where there is one. Raises UnknownChoice, ConfigError where no GPU is there."""
    found = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if found else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UnknownChoice("device", name, ("auto", "cpu", "cuda"))
    if kind == "cuda" and not found:
        raise ConfigError("device cuda cannot be had: PyTorch finds no GPU here; give cpu, or auto")
    return name


def save_checkpoint(trainer: EpochTrainer[Any, Any], path: Path, *, outdates: Iterable[Path] = ()) -> None:
    """Write the run's state beside `path`, have it on the disk and rename it, so that neither an interruption nor a failure of the power
    costs the last checkpoint. Files that the new one `outdates` are deleted before it takes its place.

    Raises DataError where the disk does not take it; a whole checkpoint is left then, the last one or this one.
    """
    _write(trainer.state(), path, outdates)


def add_to_checkpoint(path: Path, **more: Any) -> None:
    """Add entries to the state in a checkpoint, which are gone once a later epoch is saved. Raises DataError as `save_checkpoint`."""
    _write({**read_checkpoint(path), **more}, path)


def _write(state: Mapping[str, Any], path: Path, outdates: Iterable[Path] = ()) -> None:
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(dict(state), partial)
        flush(partial)
        for file in outdates:
            file.unlink(missing_ok=True)
        partial.replace(path)
        flush(path.parent)
    except (OSError, RuntimeError) as error:  # torch's word for a full disk is a RuntimeError, as "unexpected pos 640 vs 598"
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        cure = "is the disk full? make room, and go on with --resume from what was saved before"
        raise DataError(f"the checkpoint {path} of epoch {len(state['history'])} cannot be written ({error}); {cure}") from error


def load_checkpoint(trainer: EpochTrainer[Any, Any], path: Path) -> None:
    """Go on from a checkpoint of `save_checkpoint`. Raises DataError where it is damaged or of another model."""
    with _refusing(path):
        require_intact(path)
        trainer.restore(torch.load(path, map_location=trainer.device, weights_only=True))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The state in a checkpoint; its tensors are read from the file where they are used. Raises DataError where it is damaged."""
    with _refusing(path):
        require_intact(path)
        state: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return state


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # a damaged file leads the unpickler to errors of any kind, such as UnicodeDecodeError
        # torch's own message advises to load the refused file without a guard, which runs code that the file names
        why = "it is no file of tensors and plain values" if isinstance(error, pickle.UnpicklingError) else str(error)
        raise DataError(f"{path} is damaged or the checkpoint of another model; start anew without --resume: {why}") from error


def _mixed(seed: int, epoch: int) -> int:
    """A seed for torch's generator in one epoch, which no other epoch or neighbouring seed has."""
    return int(np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)[0] >> np.uint64(1))
