"""How a dataset is to be read: the cache, the columns' roles, and the treatment of bad rows."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Self

from cluster.errors import DataError
from cluster.values import Action

GROUPLENS = "https://files.grouplens.org/datasets/movielens"
SHOWN_BAD_ROWS = 5
NO_COLUMN = "none"
"""In the place of the name of an optional column: the table has none, whatever its columns are called."""


class TimestampUnit(StrEnum):
    """The unit of a timestamp that is a number. A timestamp that is not one is read as ISO-8601, with any unit."""

    microseconds: int
    per_microsecond: int  # 1 unless the unit is smaller than a microsecond

    def __new__(cls, name: str, microseconds: int, per_microsecond: int = 1) -> Self:
        unit = str.__new__(cls, name)
        unit._value_, unit.microseconds, unit.per_microsecond = name, microseconds, per_microsecond
        return unit

    SECONDS = "s", 1_000_000
    MILLISECONDS = "ms", 1_000
    MICROSECONDS = "us", 1
    NANOSECONDS = "ns", 1, 1_000


@dataclass
class BadRows:
    """Treats bad rows: either the first one ends the reading, or all are counted, and the first few kept to be shown."""

    skip: bool = False
    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, place: str, line: int, cause: str) -> None:
        """Count a bad row. Raises DataError with file, line and cause unless bad rows are skipped."""
        self.count += 1
        if len(self.first) < SHOWN_BAD_ROWS:
            self.first.append(f"{place}:{line}: {cause}")
        if not self.skip:
            raise DataError(f"{place}:{line}: {cause} (--skip-bad-rows reads on without such rows)")


@dataclass(frozen=True)
class Columns:
    """Which column of a table with a header is what. None: the usual names are tried; `action` and `value` may be absent, and
    NO_COLUMN has a column of such a name left out.
    """

    user: str | None = None
    item: str | None = None
    timestamp: str | None = None
    action: str | None = None
    value: str | None = None


@dataclass(frozen=True)
class ItemColumns:
    """Which column of an item table is what; all others become attributes. None: the usual names are tried."""

    id: str | None = None
    title: str | None = None


def default_cache() -> Path:
    """Where fetched datasets are kept: $GENREC_CACHE, or ~/.cache/genrec. Raises DataError for a user without a home directory."""
    try:
        return Path(os.environ.get("GENREC_CACHE") or Path.home() / ".cache" / "genrec")
    except RuntimeError as error:
        raise DataError("this user has no home directory to keep fetched datasets in; name a directory as GENREC_CACHE") from error


@dataclass(frozen=True)
class ReadOptions:
    """Everything about the reading that is not the path. MovieLens has its own columns, units and items.

    `progress` None: a bar is drawn only where stderr is a terminal. `action_names` maps a file's own names to ours, as ``buy: purchase``;
    `default_action` is that of the events of a table without an action column; None: `view`, with a warning where the table has other
    columns than a user, an item and a time. `cache` None: `default_cache`.
    """

    items: Path | None = None
    columns: Columns = Columns()
    item_columns: ItemColumns = ItemColumns()
    delimiter: str | None = None
    timestamp_unit: TimestampUnit = TimestampUnit.SECONDS
    action_names: Mapping[str, Action] = field(default_factory=dict)
    default_action: Action | None = None
    on_bad_row: BadRows = field(default_factory=BadRows)
    progress: bool | None = None
    cache: Path | None = None
    mirror: str = GROUPLENS
