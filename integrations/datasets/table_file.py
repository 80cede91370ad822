"""Files with named columns, text or Parquet, opened for reading in blocks."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.errors import DataError
from integrations.datasets.events import Block
from integrations.datasets.files import ARCHIVES, File
from integrations.datasets.parquet import BLOCK_ROWS, parquet_blocks
from integrations.datasets.text import TextFormat, TextReader, listed, refuse_twice

PARQUET = (".parquet", ".pq")
ATOMIC = (".inter", ".item")  # tab-separated, and quotation marks mean nothing there
PACKED = (*ARCHIVES, ".tar", ".tar.gz", ".tgz", ".7z", ".rar", ".bz2", ".xz", ".zst", ".lz4", ".snappy")  # only .gz is read as it is
TEXT = (".csv", ".tsv", ".txt", ".dat", *ATOMIC)
BESIDE = (".", "_")  # what the names of files that Spark and others write beside the parts begin with, as _SUCCESS
OTHER_ROWS = re.compile(r"(^[^.]+|\.(\d+|\w*json\w*|xl\w+|ods|orc|avro|parq\w*|feather|arrow|tab|psv))$")
"""Names, in small letters and without .gz, of files that may hold rows in a form that is not read: by their endings, or without one."""
NOTES = re.compile(r"(readme|licen[cs]e|copying|notice|authors|changelog|manifest|version|makefile|checksums|(md5|sha\d+)sums?)(\.txt)?$")
"""Names, in small letters, of files about a table that look like a part."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextTable:
    """An open text file behind its header."""

    place: str
    names: list[str]
    reader: TextReader

    def read(self, wanted: Sequence[str]) -> tuple[list[str], Iterator[Block]]:
        """The names of the blocks' columns, and the blocks. They have all columns of the file, as lines are split whole.

        Raises ArrowInvalid where two of the wanted columns have one name.
        """
        refuse_twice([name for name in wanted if name])  # what has no name is in no use
        read = [number for number, name in enumerate(self.names) if name in wanted]
        return self.names, self.reader.blocks(len(self.names), read)


@dataclass(frozen=True)
class ParquetTable:
    """An open Parquet file."""

    place: str
    names: list[str]
    file: pq.ParquetFile
    block_rows: int

    def read(self, wanted: Sequence[str]) -> tuple[list[str], Iterator[Block]]:
        """The names of the wanted columns, and the blocks with them."""
        return list(wanted), parquet_blocks(self.file, wanted, self.block_rows)


Table = TextTable | ParquetTable


def table_files(path: Path) -> list[File]:
    """The file, or the parts in the directory in order of name, without empty text files, which have no rows.

    Raises DataError where there is no table, and where the directory holds what is no part but may hold rows, which would be lost. Other
    files are passed over with a warning.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.name.lower().endswith(PACKED) and path.is_file():
        raise DataError(f"{path} is packed; unpack it first, and pass the table or the directory with its parts")
    if not path.is_dir():  # a file, or a pipe, as of `--path <(zcat events.csv.gz)`
        return [File(path)]
    parts = _parts(path)
    if not (filled := [part for part in parts if part.ends_in(*PARQUET) or _has_bytes(part)]):
        raise DataError(f"{path} holds empty files only: {', '.join(part.path.name for part in parts)}")
    return filled


def _parts(directory: Path) -> list[File]:
    entries = [File(entry) for entry in sorted(directory.iterdir()) if not entry.name.startswith(BESIDE)]
    parts, others, passed_over = list[File](), list[str](), list[str]()
    for entry in entries:
        if entry.path.is_dir():
            others.append(f"{entry.path.name}/")
        elif NOTES.match(entry.path.name.lower()):
            passed_over.append(entry.path.name)
        elif entry.ends_in(*TEXT, *PARQUET) and entry.path.is_file():
            parts.append(entry)
        else:
            (others if _may_hold_rows(entry) else passed_over).append(entry.path.name)
    endings = ", ".join([*TEXT, *PARQUET])
    cure = "unpack or convert such files, or move them out; what is in directories is not read"
    if not parts:
        instead = f"; it holds {listed([*others, *passed_over])}: {cure}" if others or passed_over else ""
        raise DataError(f"{directory} holds no file whose name ends in {endings}{instead}")
    if others:
        raise DataError(f"{directory} holds {listed(others)} beside the parts of a table, with names that end in {endings}: {cure}")
    if passed_over:
        logger.warning("%s: passed over, as no parts of the table: %s", directory, listed(passed_over))
    return parts


def _may_hold_rows(file: File) -> bool:
    name = file.path.name.lower()
    return name.endswith((".gz", *PACKED)) or file.ends_in(*TEXT, *PARQUET) or bool(OTHER_ROWS.search(file.name.lower()))


def _has_bytes(file: File) -> bool:
    with file.open() as stream:
        return bool(stream.read(1))


@contextmanager
def open_table(file: File, delimiter: str | None, progress: bool | None, block_rows: int = BLOCK_ROWS) -> Iterator[Table]:
    """The open file, its header read. `delimiter` None, or one that the header lacks: tab where the file's name says so, else the most
    frequent one in the first line. `block_rows`: how many rows of Parquet are read at a time.
    """
    with file.open(progress=progress) as stream:
        try:
            yield _parquet(file, stream, block_rows) if file.ends_in(*PARQUET) else _text(file, stream, delimiter)
        except (pa.ArrowException, OverflowError, UnicodeDecodeError) as error:  # the latter two at what Python cannot hold
            raise DataError(f"{file} cannot be read: {error}") from error


def _parquet(file: File, stream: BinaryIO, block_rows: int) -> ParquetTable:
    buffered = 0 if file.gzipped else 1 << 20  # 0: Arrow holds a row group, but does not go back, to inflate anew each time
    opened = pq.ParquetFile(stream, buffer_size=buffered, pre_buffer=False)
    return ParquetTable(str(file), opened.schema_arrow.names, opened, block_rows)


def _text(file: File, stream: BinaryIO, delimiter: str | None) -> TextTable:
    atomic = file.ends_in(*ATOMIC)
    reader = TextReader(stream, str(file), TextFormat(","))
    reader.choose_delimiter(delimiter, "\t" if atomic or file.ends_in(".tsv") else ",\t;|", quoted=not atomic)
    return TextTable(str(file), reader.header(), reader)
