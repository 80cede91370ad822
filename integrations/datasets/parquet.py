"""Parquet files in blocks of rows, readable as Arrow columns or row by row."""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.errors import DataError
from integrations.datasets.text import PIECES, Row, refuse_twice

logger = logging.getLogger(__name__)
BLOCK_ROWS = 1 << 18
ITEM_ROWS = 1 << 13
"""How many rows of an item table are read at a time: with descriptions or lists of images, a row can take 10 KB and more."""
SMALL_ROWS = 256


@dataclass(frozen=True)
class ParquetBlock:
    """Consecutive rows; the first is row `first_row` of the file, counted from 1. `told`: the columns of the file that were warned of."""

    batch: pa.RecordBatch
    first_row: int
    told: set[str] = field(default_factory=set)

    def columns(self, wanted: Sequence[int]) -> list[pa.Array]:
        """The wanted columns, in the types that the file has."""
        return [self.batch.column(number) for number in wanted]

    def pieces(self) -> "Iterator[ParquetBlock]":
        """The block in smaller ones; a small block as it is."""
        step = max(self.batch.num_rows // PIECES, SMALL_ROWS)
        for start in range(0, self.batch.num_rows, step):
            yield ParquetBlock(self.batch.slice(start, step), self.first_row + start, self.told)

    def rows(self) -> Iterator[Row]:
        """Every row, its values as text; a null, NaN and, in a column of bytes, what is no UTF-8 are empty fields. A row has a fault where
        a column of text holds what is no UTF-8.
        """
        faults: dict[int, str] = {}
        columns = [self._texts(name, column, faults) for name, column in zip(self.batch.schema.names, self.batch.columns, strict=True)]
        for number in range(self.batch.num_rows):
            fault = faults.get(number, "")
            yield Row(self.first_row + number, () if fault else [column[number] for column in columns], fault)

    def _texts(self, name: str, column: pa.Array, faults: dict[int, str]) -> list[str]:
        """The column's values as text. Where Arrow takes for text what is no UTF-8, `faults` gets the row's number, and what is wrong."""
        values = _values(name, _readable(column), faults)
        try:
            return [_text(value) for value in values]
        except UnicodeDecodeError as error:
            if name not in self.told:
                self.told.add(name)
                logger.warning("column %r holds bytes that are no UTF-8 text, and are read as empty: %s", name, error)
            return [_text_or_empty(value) for value in values]


def parquet_blocks(file: pq.ParquetFile, columns: Sequence[str], rows: int = BLOCK_ROWS) -> Iterator[ParquetBlock]:
    """The file's rows with only these columns, in this order: so many of a row group at a time. A batch of several groups would be read
    column by column, each a step back in the file, which inflates a gzipped one from its beginning.

    Raises ArrowInvalid where a damaged file refers to words that it lacks, or two of the columns have one name.
    """
    refuse_twice(columns)
    row, told = 1, set[str]()
    groups = (file.iter_batches(batch_size=rows, row_groups=[group], columns=list(columns)) for group in range(file.num_row_groups))
    for batch in chain.from_iterable(groups):
        for column in batch.columns:
            if pa.types.is_dictionary(column.type):  # Arrow reads their indices as they are
                column.validate(full=True)
        yield ParquetBlock(_plain(batch.select(list(columns))), row, told)
        row += batch.num_rows


def refuse_as_id(file: str, schema: pa.Schema, column: str) -> None:
    """Ids must be text or integers: 1.0 in a float column would not be found again as 1. Raises DataError otherwise."""
    kind = schema.field(column).type
    inner = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (pa.types.is_integer(inner) or pa.types.is_string(inner) or pa.types.is_large_string(inner) or pa.types.is_string_view(inner)):
        raise DataError(f"{file}: column {column!r} holds {kind}, but ids must be strings or integers; cast it when the file is written")


def refuse_as_time(file: str, schema: pa.Schema, column: str) -> None:
    """Raises DataError where times are numbers of too few digits: events of the same minutes would be in no order."""
    kind = schema.field(column).type
    if pa.types.is_float32(kind) or pa.types.is_float16(kind):
        raise DataError(f"{file}: column {column!r} holds {kind}, in which a time of today is up to 64 s off; write it as int64 or double")


def _plain(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The batch with views of text turned into text, as Arrow cannot compute everything with views yet."""
    for number, column in enumerate(batch.schema):
        if pa.types.is_string_view(column.type):
            batch = batch.set_column(number, column.name, batch.column(number).cast(pa.large_string()))
    return batch


def _readable(column: pa.Array) -> pa.Array:
    """The column with times and dates as ISO-8601 text, in UTC: Python's own types hold neither nanoseconds nor years beyond 9999.

    At a time out of range Arrow raises an error if it has no zone; if it has one, it writes the year modulo 65,536.
    """
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64()).cast(pa.timestamp(column.type.unit))
        return (column.cast(pa.timestamp("us"), safe=False) if column.type.unit == "ns" else column).cast(pa.string())
    if pa.types.is_date(column.type) or pa.types.is_time(column.type):
        return column.cast(pa.string())
    return column


def _values(name: str, column: pa.Array, faults: dict[int, str]) -> list[Any]:
    with suppress(UnicodeDecodeError):
        whole: list[Any] = column.to_pylist()
        return whole
    values = []
    for number, value in enumerate(column):
        try:
            values.append(value.as_py())
        except UnicodeDecodeError as error:
            values.append(None)
            faults[number] = f"byte {error.start + 1} in column {name!r}, 0x{error.object[error.start]:02x}, is not utf-8"
    return values


def _text_or_empty(value: Any) -> str:
    try:
        return _text(value)
    except UnicodeDecodeError:
        return ""


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bytes):
        return value.decode()
    return "|".join(map(_text, value)) if isinstance(value, list) else str(value)
