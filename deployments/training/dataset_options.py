"""Which dataset to read and how: a value that a manifest keeps, so that the data a model learnt from can be read again.

asked = DatasetOptions(name="table", path=Path("events.csv"), user_column="customer")
data = asked.read()
again = as_trained(DatasetOptions(), bundle)     # the options of the data that this model was trained on
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, field_validator

from cluster.bundle import Bundle
from cluster.dataset import Dataset
from cluster.errors import ConfigError
from cluster.paths import is_unicode
from cluster.registry import DATASETS, choose
from cluster.values import Action
from deployments.training.provenance import READ_AS
from integrations.datasets.options import GROUPLENS, NO_COLUMN, BadRows, Columns, ItemColumns, ReadOptions, TimestampUnit

_BY_DEFAULT = "column of a table; by default the usual names are tried"
_OF_ONE_RUN = {"progress", "cache", "mirror"}
_OF_ANY = {"name", "path", "skip_bad_rows", *_OF_ONE_RUN}
"""The options of every dataset; those of a table are all others."""


class DatasetOptions(BaseModel):
    """Which dataset, and how it is read. `name`: one of DATASETS."""

    model_config = ConfigDict(frozen=True)

    name: str = Field(default="", description=f"one of {', '.join(DATASETS)}")
    path: Path | None = Field(default=None, description="file, directory or zip; without it MovieLens is taken from the cache or fetched")
    items: Path | None = Field(default=None, description="item table (id, title, any attributes), CSV or Parquet")
    user_column: str | None = Field(default=None, description=f"user {_BY_DEFAULT}")
    item_column: str | None = Field(default=None, description=f"item {_BY_DEFAULT}")
    timestamp_column: str | None = Field(default=None, description=f"timestamp {_BY_DEFAULT}")
    action_column: str | None = Field(default=None, description=f"action {_BY_DEFAULT}; {NO_COLUMN}: it has none")
    value_column: str | None = Field(default=None, description=f"value {_BY_DEFAULT}; {NO_COLUMN}: it has none")
    item_id_column: str | None = Field(default=None, description="id column of the item table")
    item_title_column: str | None = Field(default=None, description="title column of the item table")
    delimiter: str | None = Field(default=None, description=r"between the fields of a text table, as ';' or '\t'; guessed by default")
    timestamp_unit: TimestampUnit | None = Field(
        default=None, description="of timestamps that are numbers (default: s); ISO-8601 is understood as well"
    )
    action_name: list[str] = Field(
        default=[], description="what a table calls an action, as buy=purchase, or =view where it says nothing; repeatable"
    )
    default_action: Action | None = Field(default=None, description="of events in a table without an action column (default: view)")
    skip_bad_rows: bool = Field(default=False, description="count bad rows and read on, rather than stop at the first")
    progress: bool | None = Field(default=None, description="draw a progress bar (default: where stderr is a terminal)")
    cache: Path | None = Field(default=None, description="where fetched datasets are kept (default: $GENREC_CACHE or ~/.cache/genrec)")
    mirror: str = Field(default=GROUPLENS, description="where MovieLens is fetched from")

    @field_validator("path", "items")
    @classmethod
    def _can_be_recorded(cls, path: Path | None) -> Path | None:
        """Raises ValueError where a manifest, which is JSON, could not hold the path: after hours of training it could not be written."""
        if path and not is_unicode(whole := str(path.absolute())):
            raise ValueError(f"{whole!a} is no Unicode text, and a model's manifest could not name it; rename it")
        return path

    def read_options(self) -> ReadOptions:
        """The options for a reader. Raises ConfigError where an `action_name` is not NAME=ACTION."""
        return ReadOptions(
            items=self.items,
            columns=Columns(self.user_column, self.item_column, self.timestamp_column, self.action_column, self.value_column),
            item_columns=ItemColumns(self.item_id_column, self.item_title_column),
            delimiter=self.delimiter.replace("\\t", "\t") if self.delimiter else None,
            timestamp_unit=self.timestamp_unit or TimestampUnit.SECONDS,
            action_names=_action_names(self.action_name),
            default_action=self.default_action,
            on_bad_row=BadRows(skip=self.skip_bad_rows),
            progress=self.progress,
            cache=self.cache,
            mirror=self.mirror,
        )

    def read(self, options: ReadOptions | None = None) -> Dataset:
        """The dataset. `options`: those of `read_options`, where the caller wants to look at the bad rows afterwards.

        Raises ConfigError where none is named, UnknownChoice for an unknown name, DataError where it cannot be read.
        """
        if not self.name:
            raise ConfigError(f"say which DATASET to read, one of {', '.join(DATASETS)}")
        if self.name not in DATASETS and ((file := Path(self.name)).suffix or file.exists()):
            raise ConfigError(f"{self.name!r} is no dataset but a file of yours; say: table --path {self.name}")
        if self.name in DATASETS and self.name != "table" and (given := self.model_dump(exclude_defaults=True).keys() - _OF_ANY):
            told = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
            raise ConfigError(f"{told}: of a table only, and {self.name} is none; leave them out, or say: table --path PATH")
        dataset: Dataset = choose("dataset", DATASETS, self.name)(self.path, options or self.read_options())
        return dataset

    def described(self) -> dict[str, JsonValue]:
        """The options as JSON, for the manifest of a model that learns from the dataset; `as_trained` reads them."""
        absolute = self.model_copy(update={"path": self.path and self.path.absolute(), "items": self.items and self.items.absolute()})
        return absolute.model_dump(mode="json", exclude_defaults=True, exclude=_OF_ONE_RUN)


def as_trained(asked: DatasetOptions, bundle: Bundle, option: str = "") -> DatasetOptions:
    """The options of the data set that a model was trained on, with those that `asked` sets in their place. `option`: of the command line,
    to be left out where they are not known.

    Raises ConfigError where the model does not record them.
    """
    recorded, given = bundle.manifest.training.get(READ_AS), asked.model_dump(exclude_defaults=True)
    try:
        options = {**cast("dict[str, Any]", recorded), **given}
        if options.get("name", "table") != "table":  # earlier releases recorded a table's options that MovieLens ignored
            options = {name: value for name, value in options.items() if name in _OF_ANY or name in given}
        return DatasetOptions.model_validate(options)
    except (TypeError, ValidationError) as error:
        left_out = f"leave {option} out, and " if option else ""
        cure = f"{left_out}name the DATASET, one of {', '.join(DATASETS)}, with the options it was trained with"
        raise ConfigError(f"{bundle.version} does not say which data set it was trained on and how that was read; {cure}") from error


def _action_names(pairs: list[str]) -> Mapping[str, Action]:
    names = {}
    for pair in pairs:
        name, _, action = pair.partition("=")
        if "=" not in pair or action not in list(Action):
            raise ConfigError(f"--action-name {pair!r} is not NAME=ACTION with an action out of {', '.join(Action)}")
        names[name.strip().lower()] = Action(action)
    return names
