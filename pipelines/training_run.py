"""From a dataset to a trained, measured model: train with early stop, learn the validation events too, measure on the test events."""

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from pydantic import ValidationError

from cluster.bundle import ModelRecord
from cluster.dataset import Dataset
from cluster.errors import ConfigError, DataError
from cluster.registry import MODELS, choose
from pipelines.epochs import EpochReport, EpochTrainer, OptionsT, add_to_checkpoint, load_checkpoint, read_checkpoint, save_checkpoint
from pipelines.evaluate import MOST_USERS, evaluate
from pipelines.sequence_models import TrainableModel
from pipelines.splits import TEST, measured_users
from pipelines.train import Trainer, TrainOptions

FIRST_PHASE = "train"
PHASES = (FIRST_PHASE, "refit", "decoder", "decoder refit", "ranker", "ranker refit")


class Observer(Protocol):
    """Watches a run: its methods are called as the run goes on."""

    def note(self, line: str) -> None: ...
    def phase(self, name: str, epochs: int, done: int) -> None: ...
    def batch(self, share: float) -> None: ...
    def epoch(self, report: EpochReport) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """The options around the training itself; `checkpoint` is written after every epoch, a file for each phase."""

    refit: bool = False
    device: str = "auto"
    checkpoint: Path | None = None
    resume: bool = False


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """The common part of a run's phases: the model, the data, the options around them, and the observer."""

    record: ModelRecord
    dataset: Dataset
    options: RunOptions
    observer: Observer
    _fitted: list[str] = field(default_factory=list, init=False)  # the phases

    def fit(self, trainer: EpochTrainer[Any, Any], phase: str) -> None:
        """Train, from the phase's checkpoint where that is asked for, and before the run's first phase note what the trainer remarks.
        Raises DataError where there is nothing to resume.
        """
        if not self._fitted and (line := trainer.remark):
            self.observer.note(line)
        self._fitted.append(phase)
        trainer.fit(after_batch=self.observer.batch, after_epoch=self._begin(trainer, phase))

    def saved(self, phase: str) -> Mapping[str, Any]:
        """The state from which the run goes on with a phase; empty where it begins with it. Raises DataError where that is damaged."""
        run = self.options
        path = _checkpoint(run.checkpoint, phase) if run.checkpoint and run.resume else None
        return read_checkpoint(path) if path and path.is_file() else {}

    def measured(self, phase: str, measure: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """The figures of what a phase has trained, as they were saved since its last epoch, or else as `measure` finds them now."""
        saved: dict[str, float] | None = self.saved(phase).get("quality")
        if saved is not None:
            return saved
        quality = dict(measure())
        if self.options.checkpoint:
            add_to_checkpoint(_checkpoint(self.options.checkpoint, phase), quality=quality)
        return quality

    def _begin(self, trainer: EpochTrainer[Any, Any], phase: str) -> Callable[[EpochReport], None]:
        """Begin a phase; returns a function that shows and saves an epoch, to be called after each.

        What is saved outdates the later phases' checkpoints, of a run that was abandoned or shorter: they go on from another model.
        """
        run = self.options
        path = _checkpoint(run.checkpoint, phase) if run.checkpoint else None
        later = _checkpoints(run, PHASES[PHASES.index(phase) + 1 :])
        if path:
            trainer.identity = {**trainer.identity, "data": self._data}
        if run.resume and path and path.is_file():
            load_checkpoint(trainer, path)
        elif run.resume and phase == FIRST_PHASE:  # a later phase may not have begun
            raise DataError(f"there is no checkpoint {path} to resume from; start without --resume")
        self.observer.phase(phase, trainer.options.stop_after or trainer.options.epochs, trainer.epoch)

        def after_epoch(report: EpochReport) -> None:
            self.observer.epoch(report)
            if path:
                save_checkpoint(trainer, path, outdates=later)

        return after_epoch

    @cached_property
    def _data(self) -> str:
        """A digest of all events, to tell whether a checkpoint has learnt from the same."""
        events = self.dataset.interactions
        digest = hashlib.sha256()
        for column in (events.offsets, events.items, events.timestamps, events.actions, events.values):
            digest.update(np.ascontiguousarray(column).data)
        return digest.hexdigest()


@dataclass(frozen=True, eq=False, kw_only=True)
class Trained:
    """The course of a training: `best` is the epoch that validation chose, of `epochs`; the seconds include a refit's."""

    best: EpochReport
    epochs: int
    seconds: float

    def course(self) -> dict[str, Any]:
        """The course as it stands in the manifest's provenance."""
        best = {"best_epoch": self.best.epoch, "validation": self.best.validation}
        return {"epochs": self.epochs, **best, "seconds": round(self.seconds, 1)}


@dataclass(frozen=True, eq=False, kw_only=True)
class TrainedModel(Trained):
    """A finished encoder. `quality`: the metrics of `model` on the test events of `measured_users` users.

    `validated`: the model before the refit, which has not seen the validation events.
    """

    model: TrainableModel
    validated: TrainableModel
    quality: dict[str, float]
    measured_users: int

    def course(self) -> dict[str, Any]:
        """As of any part, with how many users it was measured on."""
        return {**super().course(), "measured_users": self.measured_users}


def new_model(record: ModelRecord, seed: int) -> TrainableModel:
    """A model with first weights drawn from the seed. Raises ConfigError where the configuration is not one of the family."""
    family = choose("model family", MODELS, record.family)
    try:
        config = family.config_type.model_validate(record.config)
    except ValidationError as error:
        raise ConfigError(f"not a configuration of {record.family}: {said(error)}") from error
    torch.manual_seed(seed)
    model: TrainableModel = family(config)
    return model


def said(error: ValidationError) -> str:
    """The refusal of sizes by pydantic as one line, with their names and values."""
    problems = ((".".join(map(str, one["loc"])), one["input"], one["msg"].removeprefix("Value error, ")) for one in error.errors())
    return "; ".join(f"{name} = {value!r}: {problem}" if name else problem for name, value, problem in problems)


def train_model(run: TrainingRun, options: TrainOptions) -> TrainedModel:
    """Train on all but each user's last two events, choosing the epoch by the second-last, and measure on the last, of `MOST_USERS` users
    at most.

    With `refit` the model is then trained anew, for as many epochs as validation chose, with the second-last events learnt as well.
    """
    interactions = run.dataset.interactions
    first = last = _train(run, options, phase := FIRST_PHASE)
    if run.options.refit and options.validate_every:
        last = _train(run, without_validation(options, first.best), phase := "refit")
    quality = run.measured(phase, lambda: evaluate(last.model, interactions, most_users=MOST_USERS))
    seconds = first.seconds + (last.seconds if last is not first else 0)
    return TrainedModel(
        best=first.best,
        epochs=first.epoch,
        seconds=seconds,
        model=last.model,
        validated=first.model,
        quality=quality,
        measured_users=min(measured_users(interactions, TEST), MOST_USERS),
    )


def without_validation(options: OptionsT, best: EpochReport) -> OptionsT:
    """Options of a refit: the validation events are learnt too, for as many epochs as they chose."""
    return options.model_copy(update={"validate_every": 0, "stop_after": best.epoch})


def _train(run: TrainingRun, options: TrainOptions, phase: str) -> Trainer:
    trainer = Trainer(new_model(run.record, options.seed), run.dataset.interactions, options, device=run.options.device)
    trainer.identity = run.record.model_dump(mode="json")
    run.fit(trainer, phase)
    return trainer


@contextmanager
def alone(run: RunOptions) -> Iterator[None]:
    """Keep other runs away from this one's checkpoints, which they would delete and overwrite, within the block.

    A directory that is made for them and stays empty, as where the training is refused, is removed. Raises ConfigError where another run
    is under way.
    """
    if run.checkpoint is None:
        yield
        return
    place = run.checkpoint.parent
    made = not place.exists()
    place.mkdir(parents=True, exist_ok=True)
    file = _checkpoint(run.checkpoint, "lock")
    with file.open("w") as lock:
        try:
            _lock(file, lock.fileno())
        except BlockingIOError:
            raise ConfigError(f"another training is under way in {place}; wait for its end, or train in another directory") from None
        except OSError as error:
            raise ConfigError(
                f"{file} cannot be locked ({error}); train on a file system that has locks, or on this machine's disk"
            ) from None
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            if made:
                with suppress(OSError):  # it holds a version, or checkpoints to resume from
                    place.rmdir()


def _lock(file: Path, descriptor: int) -> None:
    """Lock the opened file. Raises BlockingIOError where another run holds it, or held it and deleted it: a third may hold a new one."""
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        is_there = os.path.samestat(file.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        is_there = False
    if not is_there:
        raise BlockingIOError


def forget_checkpoints(run: RunOptions) -> None:
    """Delete the checkpoints of all phases, as after the model is published, when there is nothing left to resume."""
    for path in _checkpoints(run):
        path.unlink(missing_ok=True)


def saved_epochs(run: RunOptions) -> dict[str, int]:
    """Phase -> how many epochs of it an earlier run has saved; without phases with a checkpoint that cannot be read."""
    saved = {}
    for phase, path in zip(PHASES, _checkpoints(run), strict=False):  # without `checkpoint` there are none
        if path.is_file():
            with suppress(DataError):
                saved[phase] = len(read_checkpoint(path)["history"])
    return saved


def _checkpoints(run: RunOptions, phases: Sequence[str] = PHASES) -> list[Path]:
    return [_checkpoint(run.checkpoint, phase) for phase in phases] if run.checkpoint else []


def _checkpoint(path: Path, phase: str) -> Path:
    return path.with_name(f"{path.name}.{phase}")
