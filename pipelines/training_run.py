"""From a dataset to a trained, measured model: train with early stop, learn the validation events too, measure on the test events."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from pydantic import ValidationError

from cluster.bundle import ModelRecord
from cluster.dataset import Dataset
from cluster.errors import ConfigError, DataError
from cluster.registry import MODELS, choose
from pipelines.evaluate import evaluate
from pipelines.sequence_models import TrainableModel
from pipelines.train import EpochReport, Trainer, TrainOptions, load_checkpoint, save_checkpoint


class Observer(Protocol):
    """Is told how a run goes."""

    def phase(self, name: str, epochs: int, done: int) -> None: ...
    def batch(self, share: float) -> None: ...
    def epoch(self, report: EpochReport) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """What a run does around the training itself; `checkpoint` is written after every epoch and removed at the end."""

    refit: bool = False
    device: str = "auto"
    checkpoint: Path | None = None
    resume: bool = False


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A finished run: `best` is the epoch that validation chose, `quality` the metrics on the test events, before and after a refit."""

    model: TrainableModel
    best: EpochReport
    epochs: int
    quality: dict[str, float]
    quality_before_refit: dict[str, float]
    seconds: float


def new_model(record: ModelRecord, seed: int) -> TrainableModel:
    """A model with first weights drawn from the seed. Raises ConfigError where the configuration is not one of the family."""
    family = choose("model family", MODELS, record.family)
    try:
        config = family.config_type.model_validate(record.config)
    except ValidationError as error:
        raise ConfigError(f"not a configuration of {record.family}: {error}") from error
    torch.manual_seed(seed)
    model: TrainableModel = family(config)
    return model


def train_model(record: ModelRecord, dataset: Dataset, options: TrainOptions, run: RunOptions, observer: Observer) -> TrainedModel:
    """Train on all but each user's last two events, choosing the epoch by the second-last, and measure on the last.

    With `run.refit` the model is then trained anew, for as many epochs as validation chose, with the second-last events learnt as well.
    """
    began = time.perf_counter()
    first = _train("train", record, dataset, options, run, observer)
    quality = quality_before_refit = dict(evaluate(first.model, dataset.interactions))
    last = first
    if run.refit and options.validate_every:
        again = options.model_copy(update={"validate_every": 0, "stop_after": first.best.epoch})
        last = _train("refit", record, dataset, again, run, observer)
        quality = dict(evaluate(last.model, dataset.interactions))
    for phase in ("train", "refit"):
        if run.checkpoint:
            _checkpoint(run.checkpoint, phase).unlink(missing_ok=True)
    return TrainedModel(last.model, first.best, first.epoch, quality, quality_before_refit, time.perf_counter() - began)


def _train(  # noqa: PLR0917 - `train_model`'s own parameters
    phase: str, record: ModelRecord, dataset: Dataset, options: TrainOptions, run: RunOptions, observer: Observer
) -> Trainer:
    trainer = Trainer(new_model(record, options.seed), dataset.interactions, options, device=run.device)
    path = _checkpoint(run.checkpoint, phase) if run.checkpoint else None
    if run.resume:
        _resume(trainer, path, needed=phase == "train")
    observer.phase(phase, options.stop_after or options.epochs, trainer.epoch)

    def after_epoch(report: EpochReport) -> None:
        observer.epoch(report)
        if path:
            save_checkpoint(trainer, path)

    trainer.fit(after_batch=observer.batch, after_epoch=after_epoch)
    return trainer


def _resume(trainer: Trainer, path: Path | None, *, needed: bool) -> None:
    if path and path.is_file():
        load_checkpoint(trainer, path)
    elif needed:
        raise DataError(f"there is no checkpoint {path} to resume from; start without --resume")


def _checkpoint(path: Path, phase: str) -> Path:
    return path.with_name(f"{path.name}.{phase}")
