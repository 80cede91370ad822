"""From a dataset to a trained, measured model: train with early stop, learn the validation events too, measure on the test events."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from pydantic import ValidationError

from cluster.bundle import ModelRecord
from cluster.dataset import Dataset
from cluster.errors import ConfigError, DataError
from cluster.registry import MODELS, choose
from pipelines.epochs import EpochReport, EpochTrainer, load_checkpoint, save_checkpoint
from pipelines.evaluate import evaluate
from pipelines.sequence_models import TrainableModel
from pipelines.train import Trainer, TrainOptions

FIRST_PHASE = "train"
PHASES = (FIRST_PHASE, "refit", "decoder", "decoder refit", "ranker", "ranker refit")


class Observer(Protocol):
    """Is told how a run goes."""

    def phase(self, name: str, epochs: int, done: int) -> None: ...
    def batch(self, share: float) -> None: ...
    def epoch(self, report: EpochReport) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """What a run does around the training itself; `checkpoint` is written after every epoch, a file for each phase."""

    refit: bool = False
    device: str = "auto"
    checkpoint: Path | None = None
    resume: bool = False


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A finished run: `best` is the epoch that validation chose, `quality` the metrics on the test events, before and after a refit.

    `validated` is the model before the refit, which knows nothing of the validation events.
    """

    model: TrainableModel
    validated: TrainableModel
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
    first = _train("train", record, dataset, options, run, observer)
    quality = quality_before_refit = dict(evaluate(first.model, dataset.interactions))
    last = first
    if run.refit and options.validate_every:
        again = options.model_copy(update={"validate_every": 0, "stop_after": first.best.epoch})
        last = _train("refit", record, dataset, again, run, observer)
        quality = dict(evaluate(last.model, dataset.interactions))
    return TrainedModel(
        last.model,
        first.model,
        first.best,
        first.epoch,
        quality,
        quality_before_refit,
        first.seconds + (last.seconds if last is not first else 0),
    )


def _train(  # noqa: PLR0917 - `train_model`'s own parameters
    phase: str, record: ModelRecord, dataset: Dataset, options: TrainOptions, run: RunOptions, observer: Observer
) -> Trainer:
    trainer = Trainer(new_model(record, options.seed), dataset.interactions, options, device=run.device)
    trainer.identity = record.model_dump(mode="json")
    trainer.fit(after_batch=observer.batch, after_epoch=begin(trainer, phase, run, observer))
    return trainer


def begin(trainer: EpochTrainer[Any, Any], phase: str, run: RunOptions, observer: Observer) -> Callable[[EpochReport], None]:
    """Begin a phase of a run, from its checkpoint where that is asked for; what is returned, called after an epoch, shows and saves it.

    Raises DataError where there is nothing to resume: the first phase has no checkpoint.
    """
    if phase == FIRST_PHASE and not run.resume:
        forget_checkpoints(run)  # of a run that was abandoned: its later phases belong to another model
    path = _checkpoint(run.checkpoint, phase) if run.checkpoint else None
    if run.resume and path and path.is_file():
        load_checkpoint(trainer, path)
    elif run.resume and phase == FIRST_PHASE:
        raise DataError(f"there is no checkpoint {path} to resume from; start without --resume")
    options = trainer.options
    observer.phase(phase, options.stop_after or options.epochs, trainer.epoch)

    def after_epoch(report: EpochReport) -> None:
        observer.epoch(report)
        if path:
            save_checkpoint(trainer, path)

    return after_epoch


def forget_checkpoints(run: RunOptions) -> None:
    """Once what was trained is published, nothing is left to resume."""
    if run.checkpoint:
        for phase in PHASES:
            _checkpoint(run.checkpoint, phase).unlink(missing_ok=True)


def _checkpoint(path: Path, phase: str) -> Path:
    return path.with_name(f"{path.name}.{phase}")
