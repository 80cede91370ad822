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
from integrations.datasets.repeats import in_one_second, repeated
from pipelines.splits import Window, learnt_items

MOST_REPEATED = 0.02
"""The share of events from which on it is told that they are written more than once."""
MOST_TIED = 0.75
"""The same of events in one second; with the times of MovieLens, of users that rate a page at once, half of them are."""
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


def open_dataset(asked: DatasetOptions, *, learnt: bool = True) -> Dataset:
    """Read a dataset, and print to stderr how many bad rows were skipped, the first few of them, and what is doubtful about its times
    and, where a model is to learn from the rows as they are (`learnt`), its repeats.
    """
    options = asked.read_options()
    dataset = asked.read(options)
    tell_skipped(options.on_bad_row, dataset.source)
    tell_doubtful_times(dataset)
    if learnt:
        tell_repeats(dataset)
    tell_ties(dataset)
    return dataset


def tell_doubtful_times(dataset: Dataset) -> None:
    """Print to stderr how many events lie more than a day ahead of this machine's clock, or that all of them lie in 1970."""
    times = dataset.interactions.timestamps
    if ahead := int(np.count_nonzero(times > time.time() + LATEST_S)):
        told = f"{ahead:,} events of {dataset.source} lie more than a day ahead of this machine's clock; is another --timestamp-unit meant?"
        typer.secho(told, fg="yellow", err=True)
    if times.size and times.max() < END_OF_1970_S:
        latest = _moment(times.max())
        told = f"all events of {dataset.source} lie in 1970, the latest at {latest}; a number is read as seconds since 1970"
        typer.secho(f"{told}: where they are days, write ISO dates", fg="yellow", err=True)


def tell_repeats(dataset: Dataset) -> None:
    """Print to stderr how many events are written more than once, where those are so many that they decide what a model learns."""
    events, source = dataset.interactions, dataset.source
    repeats = repeated(events)
    if len(repeats) > MOST_REPEATED * len(events):
        told = f"{len(repeats):,} of the {len(events):,} events of {source} equal another one in user, item, second, action and value"
        harm = "a model learns to repeat the last event, and its figures count that"
        cure = "write rows that are distinct in the columns that are read, with times in whole seconds"
        typer.secho(f"{told}, as {_event(dataset, repeats.min())}: {harm}; {cure}", fg="yellow", err=True)


def tell_ties(dataset: Dataset) -> None:
    """Print to stderr how many events lie in the same second as their user's event before, where the file's order decides most orders."""
    events, source = dataset.interactions, dataset.source
    tied = np.flatnonzero(in_one_second(events))
    if len(tied) > MOST_TIED * (len(events) - events.users):
        told = f"{len(tied):,} of the {len(events):,} events of {source} lie in the same second as their user's event before"
        harm = "unless the file's times are finer than seconds, the order of the file decides which event is the last"
        cure = "name the column that says when each happened with --timestamp-column"
        typer.secho(f"{told}, as {_event(dataset, tied[0])}: {harm}; {cure}", fg="yellow", err=True)


def _event(dataset: Dataset, row: np.int64) -> str:
    events = dataset.interactions
    user = events.user_ids[int(np.searchsorted(events.offsets, row, side="right")) - 1]
    item = dataset.catalogue[int(events.items[row])].item_id
    return f"that of user {user!r} and item {item!r} at {_moment(events.timestamps[row])}"


def _moment(timestamp: np.int64) -> str:
    return datetime.fromtimestamp(int(timestamp), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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
