"""`genrec evaluate`: how well a published model ranks every user's last event."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.dataset import Dataset, Interactions
from cluster.errors import ConfigError, DataError
from deployments.cli.dataset_options import OPTIONAL_DATASET, open_dataset
from deployments.cli.fields import with_fields
from deployments.cli.models import version_in
from deployments.training.dataset_options import DatasetOptions, as_trained
from deployments.training.provenance import as_known_by, was_validated, with_items_of
from deployments.training.ranking import measure_strategies
from integrations.hstu.weights import load_model
from pipelines.evaluate import MOST_USERS
from pipelines.evaluate import evaluate as evaluate_model
from pipelines.sequence_models import TrainableModel
from pipelines.splits import TEST, VALIDATION, measured_users

TOLD_USERS = 20_000
"""After how many users a line says how far the ranking is, where no bar does."""


@with_fields
def evaluate(
    dataset: Annotated[DatasetOptions, OPTIONAL_DATASET],
    *,
    model_dir: Annotated[Path | None, typer.Option(help="where the model is published (default: models/DATASET)")] = None,
    version: Annotated[int | None, typer.Option(help="which version (default: the current one)")] = None,
    other: Annotated[Path | None, typer.Option("--as-known-by", metavar="DIRECTORY", help="only events of items that it knows")] = None,
    validation: Annotated[bool, typer.Option("--validation", help="the second-last events instead of the last")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Rank every user's last event: HR@10/50/200, NDCG@10/50, MRR. Without DATASET: of what the model was trained on.

    Of a model with a decoder, each strategy's lists as they are served without a ranker; where one is the last stage, also the lists in its
    order, which a request gets unless it says otherwise. Nothing of the history is in them. In JSON also the encoder's ranking of the
    whole catalogue, without what its window holds.

    Events of items that the version does not know are left out, and users with such an event last; with --as-known-by also those of items
    that another version does not know (DIRECTORY: its own, or its model's, for the current one), so that both are measured on the same.
    """
    from_end = VALIDATION if validation else TEST
    bundle, data = open_with_dataset(dataset, model_dir, version, from_end, known_by=other)
    if not (users := measured_users(data.interactions, from_end)):
        raise DataError(f"no user of {data.source} has {from_end + 1} events, so there is nothing to measure")
    strategies = measure_strategies(bundle, data, from_end)
    shown = as_json or not strategies
    quality = rank_all(load_model(bundle), data.interactions, from_end) if shown else {}
    title = measured_on(bundle, data, from_end, drawn=bool(strategies))
    if as_json:
        typer.echo(json.dumps({"model": bundle.version, "users": users, **quality, "strategies": strategies or None}))
    elif strategies:
        print_strategies(strategies, title)
    else:
        print_quality(quality, title)


def rank_all(model: TrainableModel, interactions: Interactions, from_end: int = TEST) -> Mapping[str, float]:
    """The metrics over all users; on stderr, how many are done: a bar on a terminal, elsewhere a line every `TOLD_USERS` users."""
    users, console, done = measured_users(interactions, from_end), Console(stderr=True), 0
    with Progress(*Progress.get_default_columns(), console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("users ranked", total=users)

        def after_batch(ranked: int) -> None:
            nonlocal done
            before, done = done, done + ranked
            progress.update(task, completed=done)
            if progress.disable and done // TOLD_USERS > before // TOLD_USERS:
                console.print(f"{done:,} of {users:,} users ranked", highlight=False)

        return evaluate_model(model, interactions, from_end=from_end, after_batch=after_batch)


def open_with_dataset(
    asked: DatasetOptions,
    model_dir: Path | None,
    version: int | None = None,
    from_end: int = TEST,
    *,
    known_by: Path | None = None,
    without_added: bool = False,
) -> tuple[Bundle, Dataset]:
    """A version of a model, and a data set of its items: the one asked for, else what it was trained on; without what `as_known_by` leaves
    out, also for the version in `known_by`. `without_added`: of the items of the training alone.

    Raises ConfigError where neither a data set nor a model is named, DataError where they do not belong together.
    """
    if asked.name:
        data = open_dataset(asked)
        bundle = BundleStore(model_dir or Path("models") / data.name).open(version)
    elif model_dir:
        bundle = BundleStore(model_dir).open(version)
        data = open_dataset(as_trained(asked, bundle))
    else:
        raise ConfigError("say which model, --model-dir MODEL_DIR, or which DATASET, for the model in models/DATASET")
    data = as_known_by(version_in(known_by), data, from_end) if known_by else data
    return bundle, with_items_of(bundle, data, from_end, without_added=without_added)


def measured_on(bundle: Bundle, dataset: Dataset, from_end: int = TEST, *, drawn: bool = False) -> str:
    """The title of a table of metrics, which says so where the version has learnt what it is measured on. `drawn`: where there are more
    users than a training ranks items for, as many were drawn.
    """
    users = measured_users(dataset.interactions, from_end)
    counted = min(users, MOST_USERS) if drawn else users
    if from_end != VALIDATION:
        return f"{bundle.version}, {counted} users' last events"
    known = "" if was_validated(bundle) else ", which it has learnt"
    return f"{bundle.version}, {counted} users' second-last events{known}"


def print_strategies(quality: Mapping[str, Mapping[str, float]], title: str) -> None:
    """A table of the metrics, those that the first strategy has, a row a strategy."""
    table, names = Table("strategy", title=title), list(next(iter(quality.values())))
    for name in names:
        table.add_column(name.upper(), justify="right")
    for strategy, figures in quality.items():
        table.add_row(strategy, *(f"{figures[name]:.4f}" if name in figures else "-" for name in names))
    Console(markup=False).print(table)


def print_quality(quality: Mapping[str, float], title: str) -> None:
    """A table of the metrics."""
    table = Table(title=title)
    for name in quality:
        table.add_column(name.upper(), justify="right")
    table.add_row(*(f"{value:.4f}" for value in quality.values()))
    Console(markup=False).print(table)
