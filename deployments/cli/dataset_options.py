"""The options that say which dataset to read and how, for every command that reads one.

    @with_fields
    def inspect(dataset: Annotated[DatasetOptions, DATASET]) -> None:
        data = open_dataset(dataset)

A command about an existing model takes OPTIONAL_DATASET: where no data set is named, it reads the one that the model was trained on.
"""

import time
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import typer

from cluster.dataset import Dataset
from deployments.cli.fields import Fields
from deployments.http.event_messages import LATEST_S
from deployments.training.dataset_options import DatasetOptions
from integrations.datasets.events import END_OF_1970_S
from integrations.datasets.options import BadRows
from pipelines.splits import Window, learnt_items

_HELP = {name: field.description for name, field in DatasetOptions.model_fields.items()}
OPTIONAL_DATASET = Fields(
    tuple(_HELP),
    declared={
        "name": typer.Argument(metavar="DATASET", help=_HELP["name"]),
        "action_name": typer.Option(metavar="NAME=ACTION", help=_HELP["action_name"]),
        "skip_bad_rows": typer.Option("--skip-bad-rows", help=_HELP["skip_bad_rows"]),
    },
)
DATASET = replace(OPTIONAL_DATASET, required=("name",))


def open_dataset(asked: DatasetOptions) -> Dataset:
    """Read a dataset, and print to stderr how many bad rows were skipped, the first few of them, and what is doubtful about its times."""
    options = asked.read_options()
    dataset = asked.read(options)
    tell_skipped(options.on_bad_row, dataset.source)
    tell_doubtful_times(dataset)
    return dataset


def tell_doubtful_times(dataset: Dataset) -> None:
    """Print to stderr how many events lie more than a day ahead of this machine's clock, or that all of them lie in 1970."""
    times = dataset.interactions.timestamps
    if ahead := int(np.count_nonzero(times > time.time() + LATEST_S)):
        told = f"{ahead:,} events of {dataset.source} lie more than a day ahead of this machine's clock; is another --timestamp-unit meant?"
        typer.secho(told, fg="yellow", err=True)
    if times.size and times.max() < END_OF_1970_S:
        latest = datetime.fromtimestamp(int(times.max()), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        told = f"all events of {dataset.source} lie in 1970, the latest at {latest}; a number is read as seconds since 1970"
        typer.secho(f"{told}: where they are days, write ISO dates", fg="yellow", err=True)


def tell_without_events(dataset: Dataset, *, held_out_events: int, max_history: int, window: Window) -> None:
    """Print to stderr how many items of the catalogue have no event that a training with these options learns, if any: it teaches only not
    to recommend them.
    """
    items = len(dataset.catalogue)
    learnt = learnt_items(dataset.interactions, items, held_out_events=held_out_events, max_history=max_history, window=window)
    if without := items - int(np.count_nonzero(learnt)):
        told = f"{without:,} of the {items:,} items of {dataset.source} have no event to learn from, and will hardly ever be recommended"
        typer.secho(f"{told}: train without those that are new, then add them by genrec add-items", fg="yellow", err=True)


def tell_skipped(bad_rows: BadRows, source: str) -> None:
    """Print to stderr how many rows of `source` were skipped, and the first few of them; nothing where there were none."""
    if bad_rows.count:
        typer.secho(f"skipped {bad_rows.count} bad rows of {source}, the first of them:", fg="yellow", err=True)
        for problem in bad_rows.first:
            typer.echo(f"  {problem}", err=True)
