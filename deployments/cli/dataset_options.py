"""The options that say which dataset to read and how, for every command that reads one.

    @with_fields
    def inspect(dataset: Annotated[DatasetOptions, DATASET]) -> None:
        data = open_dataset(dataset)

A command about an existing model takes OPTIONAL_DATASET: where no data set is named, it reads the one that the model was trained on.
"""

from dataclasses import replace

import typer

from cluster.dataset import Dataset
from deployments.cli.fields import Fields
from deployments.training.dataset_options import DatasetOptions
from integrations.datasets.options import BadRows

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
    """Read a dataset, and print to stderr how many bad rows were skipped, and the first few of them."""
    options = asked.read_options()
    dataset = asked.read(options)
    tell_skipped(options.on_bad_row, dataset.source)
    return dataset


def tell_skipped(bad_rows: BadRows, source: str) -> None:
    """Print to stderr how many rows of `source` were skipped, and the first few of them; nothing where there were none."""
    if bad_rows.count:
        typer.secho(f"skipped {bad_rows.count} bad rows of {source}, the first of them:", fg="yellow", err=True)
        for problem in bad_rows.first:
            typer.echo(f"  {problem}", err=True)
