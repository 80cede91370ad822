"""The options that say which dataset to read and how, for every command that reads one.

    @with_dataset_options
    def train(dataset: DatasetOptions, epochs: int = 10) -> None:
        data = open_dataset(dataset)

gives the command the argument DATASET and all the options below, and hands it one value. A command about a model that is there leaves the
argument open, `@with_dataset_options(optional=True)`, and reads what the model was trained on, `as_trained(dataset, bundle)`.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer
from pydantic import JsonValue, TypeAdapter, ValidationError

from cluster.bundle import Bundle
from cluster.dataset import Dataset
from cluster.errors import ConfigError
from cluster.registry import DATASETS, choose
from cluster.values import Action
from deployments.cli.fields import declare
from deployments.training.provenance import READ_AS
from integrations.datasets.options import GROUPLENS, BadRows, Columns, ItemColumns, ReadOptions, TimestampUnit, default_cache

T = TypeVar("T")
_BY_DEFAULT = "column of a table; by default the usual names are tried"
_OF_ONE_RUN = {"progress", "cache", "mirror"}


@dataclass(frozen=True)
class DatasetOptions:
    """What was asked for on the command line."""

    name: Annotated[str, typer.Argument(metavar="DATASET", help=f"one of {', '.join(DATASETS)}")] = ""
    path: Annotated[Path | None, typer.Option(help="file, directory or zip; without it MovieLens is taken from the cache or fetched")] = (
        None
    )
    items: Annotated[Path | None, typer.Option(help="item table (id, title, any attributes), CSV or Parquet")] = None
    user_column: Annotated[str | None, typer.Option(help=f"user {_BY_DEFAULT}")] = None
    item_column: Annotated[str | None, typer.Option(help=f"item {_BY_DEFAULT}")] = None
    timestamp_column: Annotated[str | None, typer.Option(help=f"timestamp {_BY_DEFAULT}")] = None
    action_column: Annotated[str | None, typer.Option(help=f"action {_BY_DEFAULT}")] = None
    value_column: Annotated[str | None, typer.Option(help=f"value {_BY_DEFAULT}")] = None
    item_id_column: Annotated[str | None, typer.Option(help="id column of the item table")] = None
    item_title_column: Annotated[str | None, typer.Option(help="title column of the item table")] = None
    delimiter: Annotated[str | None, typer.Option(help=r"between the fields of a text table, as ';' or '\t'; guessed by default")] = None
    timestamp_unit: Annotated[TimestampUnit, typer.Option(help="of timestamps that are numbers; ISO-8601 is understood as well")] = (
        TimestampUnit.SECONDS
    )
    action_name: Annotated[
        list[str], typer.Option(metavar="NAME=ACTION", help="what a table calls an action, as buy=purchase; repeatable")
    ] = field(default_factory=list)
    default_action: Annotated[Action, typer.Option(help="of events in a table without an action column")] = Action.VIEW
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="count bad rows and read on, rather than stop at the first")] = (
        False
    )
    progress: Annotated[bool | None, typer.Option(help="draw a progress bar (default: where stderr is a terminal)")] = None
    cache: Annotated[Path | None, typer.Option(help="where fetched datasets are kept (default: $GENREC_CACHE or ~/.cache/genrec)")] = None
    mirror: Annotated[str, typer.Option(help="where MovieLens is fetched from")] = GROUPLENS

    def read_options(self) -> ReadOptions:
        """The same for a reader. Raises ConfigError where an --action-name is not NAME=ACTION."""
        return ReadOptions(
            items=self.items,
            columns=Columns(self.user_column, self.item_column, self.timestamp_column, self.action_column, self.value_column),
            item_columns=ItemColumns(self.item_id_column, self.item_title_column),
            delimiter=self.delimiter.replace("\\t", "\t") if self.delimiter else None,
            timestamp_unit=self.timestamp_unit,
            action_names=_action_names(self.action_name),
            default_action=self.default_action,
            on_bad_row=BadRows(skip=self.skip_bad_rows),
            progress=self.progress,
            cache=self.cache or default_cache(),
            mirror=self.mirror,
        )


_AS_JSON = TypeAdapter(DatasetOptions)


def described(asked: DatasetOptions) -> dict[str, JsonValue]:
    """Which data set it is and how it is read, for the manifest of what learns from it: `as_trained` reads it again."""
    absolute = replace(asked, path=asked.path and asked.path.absolute(), items=asked.items and asked.items.absolute())
    said: dict[str, JsonValue] = _AS_JSON.dump_python(absolute, mode="json", exclude_defaults=True, exclude=_OF_ONE_RUN)
    return said


def as_trained(asked: DatasetOptions, bundle: Bundle) -> DatasetOptions:
    """The data set that a model was trained on, read by the same options, except for what was asked for otherwise.

    Raises ConfigError where the model does not say how that was.
    """
    recorded = bundle.manifest.training.get(READ_AS)
    try:
        return _AS_JSON.validate_python({**cast("dict[str, Any]", recorded), **_AS_JSON.dump_python(asked, exclude_defaults=True)})
    except (TypeError, ValidationError) as error:
        cure = f"name the DATASET, one of {', '.join(DATASETS)}, with the options it was trained with"
        raise ConfigError(f"{bundle.version} does not say which data set it was trained on and how that was read; {cure}") from error


def open_dataset(asked: DatasetOptions) -> Dataset:
    """Read a dataset; how many bad rows were skipped, and the first few, are told on stderr.

    Raises ConfigError where none is named, UnknownChoice for an unknown name, DataError where it cannot be read.
    """
    if not asked.name:
        raise ConfigError(f"say which DATASET to read, one of {', '.join(DATASETS)}")
    options = asked.read_options()
    dataset: Dataset = choose("dataset", DATASETS, asked.name)(asked.path, options)
    tell_skipped(options.on_bad_row, dataset.source)
    return dataset


def tell_skipped(bad_rows: BadRows, source: str) -> None:
    """On stderr: how many rows of `source` were passed over, and the first few of them; nothing where there were none."""
    if bad_rows.count:
        typer.secho(f"skipped {bad_rows.count} bad rows of {source}, the first of them:", fg="yellow", err=True)
        for problem in bad_rows.first:
            typer.echo(f"  {problem}", err=True)


def with_dataset_options(command: Callable[..., T] | None = None, *, optional: bool = False) -> Callable[..., Any]:
    """A command whose first parameter is a DatasetOptions, with that parameter spread out into one option a field.

    `optional`: DATASET may be left out; its name is "" then.
    """
    if command is None:
        return functools.partial(with_dataset_options, optional=optional)
    spread = _parameters(optional=optional)
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]

    @functools.wraps(command)
    def spread_command(**given: Any) -> T:
        dataset = DatasetOptions(**{parameter.name: given.pop(parameter.name) for parameter in spread})
        return command(dataset, **given)

    declare(spread_command, [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in [*spread, *own]])
    return spread_command


def _parameters(*, optional: bool) -> list[inspect.Parameter]:
    hints = get_type_hints(DatasetOptions, include_extras=True)
    signature = dict(inspect.signature(DatasetOptions).parameters)
    if not optional:
        signature["name"] = signature["name"].replace(default=inspect.Parameter.empty)
    return [
        signature[part.name].replace(annotation=hints[part.name], default=_default(signature[part.name])) for part in fields(DatasetOptions)
    ]


def _default(parameter: inspect.Parameter) -> Any:
    return [] if parameter.name == "action_name" else parameter.default


def _action_names(pairs: list[str]) -> Mapping[str, Action]:
    names = {}
    for pair in pairs:
        name, _, action = pair.partition("=")
        if not name.strip() or action not in list(Action):
            raise ConfigError(f"--action-name {pair!r} is not NAME=ACTION with an action out of {', '.join(Action)}")
        names[name.strip().lower()] = Action(action)
    return names
