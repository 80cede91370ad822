"""`genrec train-ranker`: a ranker for an existing model."""

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.bundle_store import BundleStore
from deployments.cli.dataset_options import OPTIONAL_DATASET
from deployments.cli.evaluate import open_with_dataset
from deployments.cli.fields import Fields, with_fields
from deployments.cli.models import overtaken
from deployments.training.dataset_options import DatasetOptions
from deployments.training.pretrained import export_pretrained, require_exportable
from deployments.training.progress import TrainingProgress
from deployments.training.ranking import publish_ranking, train_ranking_of
from pipelines.train_ranker import RankerOptions
from pipelines.training_run import RunOptions, TrainingRun


@with_fields
def train_ranker(
    dataset: Annotated[DatasetOptions, OPTIONAL_DATASET],
    *,
    model_dir: Annotated[Path | None, typer.Option(help="where the model is published (default: models/DATASET)")] = None,
    options: Annotated[RankerOptions, Fields(("epochs", "batch_users", "learning_rate", "negatives", "seed"))],
    last_stage: Annotated[
        bool | None, typer.Option(help="whether it orders recommendations (default: where they are better so on the validation events)")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda")] = "auto",
    export: Annotated[Path | None, typer.Option(help="write the weights and model.json here too, without the catalogue")] = None,
) -> None:
    """Train a ranker for the current version of a model, and publish both as its next version.

    For a model that has learnt the validation events too (`genrec train` with `--refit` or `--validate-every 0`, `genrec import meta`), say
    whether it is to be the last stage: there is nothing left to decide that by. Items that were added since the training, and events of
    them, are not trained on: they stand in the ranker as `genrec add-items` places them, by those that it has learnt.
    """
    if export:
        require_exportable(export)  # before the training, not after
    bundle, data = open_with_dataset(dataset, model_dir, without_added=True)
    with TrainingProgress() as progress:
        run = TrainingRun(bundle.manifest.model, data, RunOptions(device=device), progress)
        part = train_ranking_of(bundle, run, options, last_stage=last_stage)
    published = publish_ranking(bundle, part)
    typer.echo(part.told())
    if told := overtaken(BundleStore(bundle.path.parent), published.manifest.version):
        typer.echo(told, err=True)
    for failed in published.manifest.failed_steps:
        typer.echo(f"left out: {failed.step}: {failed.reason}", err=True)
    typer.echo(f"published {published.path}; the ranker's graphs and engines: genrec compile --model-dir {bundle.path.parent}", err=True)
    if export:
        export_pretrained(published, export, shlex.join(["genrec", *sys.argv[1:]]))
