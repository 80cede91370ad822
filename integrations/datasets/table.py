"""Any table of events, CSV or Parquet: user, item, timestamp and, where there are such columns, action and value; with an item table.

A directory is read as the parts of one table, in order of name. Without an item table the catalogue is the items of the events, in order
of appearance, with their id for a title; with one, items that only events name follow in that way.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from cluster.dataset import Dataset, Interactions
from cluster.errors import DataError
from cluster.paths import own_name
from cluster.values import Action, Item
from integrations.datasets.events import Block, EventCollector, EventFormat
from integrations.datasets.files import File, without_gz
from integrations.datasets.ids import tell_doubtful_ids
from integrations.datasets.items import collect_items, extend
from integrations.datasets.options import NO_COLUMN, Columns, ItemColumns, ReadOptions
from integrations.datasets.parquet import ITEM_ROWS, refuse_as_id, refuse_as_time
from integrations.datasets.table_file import ParquetTable, Table, TextTable, open_table, table_files
from integrations.datasets.text import listed

USUAL_NAMES = {
    "user": ("user_id", "user", "userId"),
    "item": ("item_id", "item", "itemId", "movieId"),
    "timestamp": ("timestamp", "time", "ts", "datetime"),
    "action": ("action", "event", "event_type"),
    "value": ("value", "rating"),
    "id": ("item_id", "id", "item", "itemId", "movieId"),
    "title": ("title", "name", "movie_title"),
}

UNNAMED = re.compile(r"(__index_level_\d+__)?")
"""A column without a name: in CSV an empty one, in Parquet what pandas calls an index that has none. Row numbers are no attribute."""
logger = logging.getLogger(__name__)


def read_table(path: Path | None = None, options: ReadOptions | None = None) -> Dataset:
    """The dataset of a file or directory. Raises DataError where a column is not found or, unless bad rows are skipped, a row is bad;
    where some parts lack the column of actions that others have; and where no event is of an item of the item table.
    """
    if path is None:
        raise DataError("a table is read from a file: pass it with --path")
    options = options or ReadOptions()
    bad_before = options.on_bad_row.count
    items = [] if options.items is None else read_items(options.items, options)
    collector: EventCollector | None = None
    first: dict[str, str] = {}
    files = table_files(path)
    valued_elsewhere = len(files) > 1 and _some_has_values(files, options)
    for file in files:
        with open_table(file, options.delimiter, options.progress) as table:
            chosen = _event_columns(table, options.columns, elsewhere=valued_elsewhere)
            if collector is not None:
                _require_like(first, chosen, table)
            if not first:
                _tell_missing_action(table, chosen, options)
                first = {**chosen, "file": str(file)}
            event_format, blocks = _events(table, chosen, options)
            collector = collector or EventCollector(event_format, [item.item_id for item in items], options.on_bad_row)
            collector.format = event_format  # the parts of a table may order their columns differently
            for block in blocks:
                collector.add(block, str(file))
    if collector is None:
        raise DataError(f"{path} holds no table")
    interactions = collector.interactions(str(path))
    if options.items is not None:
        _require_match(options.items, items, interactions, collector.unlisted_items(), path)
    return Dataset(_name(path), interactions, extend(items, collector.unlisted_items()), str(path), options.on_bad_row.count - bad_before)


def _name(path: Path) -> str:
    """The name of the data set, by default of its model too: that of the file or directory, without its ending."""
    return Path(without_gz(own_name(path))).stem


def _some_has_values(files: Sequence[File], options: ReadOptions) -> bool:
    """Whether a part has the column of values that is named. Headers alone are read: a wrong name is told before any row is."""
    if options.columns.value in {None, NO_COLUMN}:
        return False
    for file in files:
        with open_table(file, options.delimiter, progress=False) as table:
            if options.columns.value in table.names:
                return True
    return False


def _require_like(first: Mapping[str, str], chosen: Mapping[str, str], table: Table) -> None:
    """Raises DataError where a part has a column of actions that the first part lacks, or the reverse: its events would not be alike. A
    part without values is one of empty values.
    """
    if ("action" in first) != ("action" in chosen):
        of_first = "action" in first
        name, has, lacks = (first["action"], first["file"], table.place) if of_first else (chosen["action"], table.place, first["file"])
        cure = f"give all parts one, name it with --action-column, or leave it out with --action-column {NO_COLUMN}"
        raise DataError(f"{has} has a column {name!r} for the action, and {lacks}, a part of the same table, has none; {cure}")


def _events(table: Table, chosen: Mapping[str, str], options: ReadOptions) -> tuple[EventFormat, Iterator[Block]]:
    if isinstance(table, ParquetTable):
        for role in ("user", "item"):
            refuse_as_id(table.place, table.file.schema_arrow, chosen[role])
        refuse_as_time(table.place, table.file.schema_arrow, chosen["timestamp"])
    names, blocks = table.read(sorted(set(chosen.values()), key=table.names.index))
    at = {role: names.index(name) for role, name in chosen.items()}
    event_format = EventFormat(
        width=len(names),
        user=at["user"],
        item=at["item"],
        timestamp=at["timestamp"],
        action=at.get("action"),
        value=at.get("value"),
        unit=options.timestamp_unit,
        default_action=options.default_action or Action.VIEW,
        action_names=options.action_names,
        optional_columns=True,
    )
    return event_format, blocks


def _require_match(place: Path, items: Sequence[Item], events: Interactions, unlisted: Sequence[str], path: Path) -> None:
    """Raises DataError where no event is of an item of the table; where most are of others, it is warned of."""
    foreign = int(np.count_nonzero(events.items > len(items)))
    listed_ids, others = (", ".join(map(repr, ids[:3])) for ids in ([item.item_id for item in items[:3]], unlisted))
    told = f"{foreign:,} of {len(events):,} events of {path} are of items that {place} does not list, such as {others}"
    if foreign == len(events):
        cure = "ids are compared as text; name their columns with --item-column and --item-id-column, or leave --items out"
        raise DataError(f"{told}; it lists {listed_ids}: {cure}")
    if foreign > len(events) / 2:
        logger.warning("%s; it lists %s", told, listed_ids)


def _event_columns(table: Table, columns: Columns, *, elsewhere: bool) -> dict[str, str]:
    """Role -> column name; `action` and `value` only where there is such a column. `elsewhere`: a column of values that is named is in
    another part, if not here. Raises DataError where a column is not found.
    """
    required = {role: _column(table, role, given) for role, given in (("user", columns.user), ("item", columns.item))}
    required["timestamp"] = _column(table, "timestamp", columns.timestamp)
    optional = {"action": columns.action, "value": columns.value}
    there = {role: given for role, given in optional.items() if given != NO_COLUMN}
    if columns.value and columns.value not in table.names and elsewhere:
        there.pop("value", None)
    wanted = {role: given for role, given in there.items() if given or set(USUAL_NAMES[role]) & set(table.names)}
    return required | {role: _column(table, role, given) for role, given in wanted.items()}


def _tell_missing_action(table: Table, chosen: Mapping[str, str], options: ReadOptions) -> None:
    """Warns that every event is a view where no column of actions was found or named, no action was either, and there are values or
    columns that are not read.
    """
    unread = [name for name in table.names if name not in chosen.values() and not UNNAMED.fullmatch(name)]
    if "action" in chosen or options.columns.action or options.default_action or not (unread or "value" in chosen):
        return
    cures = ["name the column with --action-column"] if unread else []
    if value := chosen.get("value"):
        cures.append(f"give --default-action rating where {value!r} has ratings, of which the ranker learns nothing otherwise")
    told = f"{_none_found('action')}; it has {listed(table.names)}"
    logger.warning("%s has %s: every event is a view; %s, or give --default-action view", table.place, told, ", or ".join(cures))


def _column(table: Table, role: str, given: str | None) -> str:
    found = [name for name in ([given] if given else USUAL_NAMES[role]) if name in table.names]
    option = f"--item-{role}-column" if role in ("id", "title") else f"--{role}-column"
    if not found:
        lacking = f"no column {given!r} for the {role}" if given else _none_found(role)
        undivided = isinstance(table, TextTable) and len(table.names) == 1
        cure = f"Name it with {option}" + (", or say with --delimiter what stands between the columns" if undivided else "")
        raise DataError(f"{table.place} has {lacking}; it has {listed(table.names)}. {cure}")
    if table.names.count(found[0]) > 1:
        raise DataError(f"{table.place} has several columns {found[0]!r}; name another one with {option}")
    return found[0]


def _none_found(role: str) -> str:
    return f"no column for the {role}: looked for {', '.join(USUAL_NAMES[role])}"


def read_items(path: Path, options: ReadOptions) -> list[Item]:
    """The items of a file or directory, in its order. An item without a title has its id for one; where a part has no column of titles but
    others that may be it, that is warned of once. Raises DataError as `read_table`.
    """
    items: list[Item] = []
    untitled = ""
    for file in table_files(path):
        with open_table(file, options.delimiter, progress=False, block_rows=ITEM_ROWS) as table:
            id_column, title_column = _item_columns(table, options.item_columns)
            if title_column is None and len(table.names) > 1:
                untitled = untitled or f"{table.place} has {_none_found('title')}; it has {listed(table.names)}"
            if isinstance(table, ParquetTable):
                refuse_as_id(table.place, table.file.schema_arrow, id_column)
            names, blocks = table.read(table.names)
            item_of = _ItemOf(names, names.index(id_column), None if title_column is None else names.index(title_column))
            rows = (row for block in blocks for row in block.rows())
            taken = {item.item_id for item in items}
            items += collect_items(str(file), rows, width=len(names), item_of=item_of, bad_rows=options.on_bad_row, taken=taken)

    if not items:
        raise DataError(f"{path} holds no items")
    tell_doubtful_ids(str(path), [item.item_id for item in items])
    if untitled:
        logger.warning("%s: ids are the titles; name the column with --item-title-column", untitled)
    return items


def _item_columns(table: Table, columns: ItemColumns) -> tuple[str, str | None]:
    titled = columns.title or set(USUAL_NAMES["title"]) & set(table.names)
    return _column(table, "id", columns.id), _column(table, "title", columns.title) if titled else None


@dataclass(frozen=True)
class _ItemOf:
    """Turns a row into an item: the columns with a name that are neither id nor title become attributes, where they are not empty."""

    names: Sequence[str]
    id: int
    title: int | None

    def __call__(self, fields: Sequence[str]) -> Item:
        item_id = fields[self.id]
        title = "" if self.title is None else fields[self.title].strip()
        attributes = {self.names[number]: fields[number] for number in self._attributes if fields[number].strip()}
        return Item(item_id, title or item_id, attributes)

    @cached_property
    def _attributes(self) -> Sequence[int]:
        return [number for number, name in enumerate(self.names) if number not in (self.id, self.title) and not UNNAMED.fullmatch(name)]
