"""The ranking part of `genrec train`, and `genrec train-ranker`, which adds a ranker to a model that is there.

Whether the ranker orders recommendations is decided on the validation events, by models that never saw them; a refit comes afterwards.
"""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from cluster.bundle import RANKER, Bundle, BundleStore, Draft, ModelRecord
from cluster.config import Settings
from cluster.dataset import Dataset
from deployments.cli.as_options import as_options
from deployments.cli.dataset_options import DatasetOptions, with_dataset_options
from deployments.cli.evaluate import open_with_dataset
from deployments.cli.generative import served_lists
from deployments.cli.pretrained import export_pretrained
from deployments.cli.training_progress import TrainingProgress
from integrations.hstu.weights import load_model, save_weights
from pipelines.blend import BlendWeights
from pipelines.fit_blend import CRITERION, Quality
from pipelines.generative_run import Lists
from pipelines.ranker_run import TrainedRanker, improves, last_stage_quality, train_ranker
from pipelines.splits import TEST, VALIDATION
from pipelines.train_ranker import RankerOptions
from pipelines.training_run import Observer, RunOptions, TrainedModel

_DEFAULT = RankerOptions()
_RANK_POOL = Settings().gateway.rank_pool


@dataclass(frozen=True, eq=False)
class RankingPart:
    """A ranker as it is published, and how good recommendations are without and with it, on the test events."""

    trained: TrainedRanker
    last_stage: Quality

    def put(self, draft: Draft) -> None:
        """Into a version that is being written."""
        save_weights(self.trained.ranker.state_dict(), draft.path / RANKER)
        draft.ranker = self.trained.record

    def described(self, options: RankerOptions) -> dict[str, Any]:
        """For the manifest's provenance."""
        return {
            "options": options.model_dump(mode="json"),
            "epochs": self.trained.epochs,
            "best_epoch": self.trained.best.epoch,
            "validation": self.trained.best.validation,
            "recommendations": {name: dict(figures) for name, figures in self.last_stage.items()},
            "seconds": round(self.trained.seconds, 1),
        }

    def told(self) -> str:
        """For people."""
        found, ranked = (self.last_stage[name][CRITERION] for name in ("found", "ranked"))
        serves = "it is their last stage" if self.trained.record.last_stage else "it ranks given candidates only"
        quality = ", ".join(f"{name} {value:.3f}" for name, value in self.trained.record.quality.items())
        return f"ranker: {quality}; {CRITERION} of recommendations {found:.4f} without it, {ranked:.4f} with it: {serves}"


def train_ranking(  # noqa: PLR0917 - what a run has made so far, in its order
    trained: TrainedModel,
    record: ModelRecord,
    dataset: Dataset,
    lists: tuple[Lists, Lists],
    weights: BlendWeights,
    options: RankerOptions,
    *,
    run: RunOptions,
    observer: Observer,
) -> RankingPart:
    """The ranker to publish with `trained.model`. `lists`: what is recommended before the validation and the test events."""
    validation, test = lists
    first = train_ranker(trained.validated, record, dataset, options, run=run, observer=observer)
    better = bool(options.validate_every) and improves(_measured(first, validation, weights))
    last = first
    if trained.model is not trained.validated:
        again = options.model_copy(update={"validate_every": 0, "stop_after": first.best.epoch})
        last = train_ranker(trained.model, record, dataset, again, run=run, observer=observer, phase="ranker refit")
    return _part(last, test, weights, last_stage=better)


@with_dataset_options(optional=True)
def train_ranker_command(
    dataset: DatasetOptions,
    *,
    model_dir: Annotated[Path | None, typer.Option(help="where the model is published (default: models/DATASET)")] = None,
    epochs: Annotated[int, typer.Option(help="at most, and the end of the learning-rate schedule")] = _DEFAULT.epochs,
    batch_users: Annotated[int, typer.Option(help="users in a batch")] = _DEFAULT.batch_users,
    learning_rate: Annotated[float, typer.Option()] = _DEFAULT.learning_rate,
    negatives: Annotated[int, typer.Option(help="items drawn in the place of each event")] = _DEFAULT.negatives,
    seed: Annotated[int, typer.Option()] = _DEFAULT.seed,
    last_stage: Annotated[
        bool | None, typer.Option(help="whether it orders recommendations (default: where they are better so on the validation events)")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    export: Annotated[Path | None, typer.Option(help="write the weights and model.json here too, without the catalogue")] = None,
) -> None:
    """Train a ranker for the current version of a model, and publish both as its next version.

    For a model that has learnt the validation events too (`genrec train --refit`), say whether it is to be the last stage: there is nothing
    left to decide that by.
    """
    bundle, data = open_with_dataset(dataset, model_dir)
    store = BundleStore(bundle.path.parent)
    with as_options():
        options = RankerOptions(epochs=epochs, batch_users=batch_users, learning_rate=learning_rate, negatives=negatives, seed=seed)
    with TrainingProgress() as progress:
        part = _of_bundle(bundle, data, options, last_stage, RunOptions(device=device), progress)
    with store.recompile(bundle) as draft:
        part.put(draft)
        draft.training["ranker"] = part.described(options)
        draft.compiled_from = None
    published = store.open()
    if export:
        export_pretrained(published, export, shlex.join(["genrec", *sys.argv[1:]]))
    typer.echo(part.told())
    typer.echo(f"published {published.path}; its graphs and engines: genrec compile --model-dir {store.root}", err=True)


def _of_bundle(  # noqa: PLR0917
    bundle: Bundle, dataset: Dataset, options: RankerOptions, last_stage: bool | None, run: RunOptions, observer: Observer
) -> RankingPart:
    record, refit = bundle.manifest.model, bool(bundle.manifest.training.get("refit"))
    weights = BlendWeights.of(bundle.manifest.blend)
    given = options.model_copy(update={"validate_every": 0}) if refit else options
    trained = train_ranker(load_model(bundle), record, dataset, given, run=run, observer=observer)
    if last_stage is None:
        last_stage = not refit and improves(_measured(trained, served_lists(bundle, dataset, VALIDATION), weights))
    return _part(trained, served_lists(bundle, dataset, TEST), weights, last_stage=last_stage)


def _part(trained: TrainedRanker, test: Lists, weights: BlendWeights, *, last_stage: bool) -> RankingPart:
    trained = trained.with_last_stage(last_stage)
    return RankingPart(trained, _measured(trained, test, weights))


def _measured(trained: TrainedRanker, lists: Lists, weights: BlendWeights) -> Quality:
    return last_stage_quality(trained.ranker, trained.record, lists, weights, rank_pool=_RANK_POOL)
