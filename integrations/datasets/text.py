"""Delimited text in blocks of whole lines, each readable as Arrow columns (fast) or line by line (to say which line is bad)."""

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv as arrow_csv

from cluster.errors import DataError

BLOCK_BYTES = 8 << 20
SMALL_BYTES = 16 << 10
WORTH_THREADS_BYTES = 1 << 20
PIECES = 32  # parts of a block with a bad row, of which only those that have one are read line by line
LONGEST_RECORD = 200  # lines that a quoted field may run over; a quotation mark open for longer is a stray one
MOST_TOLD = 1000
"""The most characters that an error quotes of a file's columns."""
_UNIT_SEPARATOR = b"\x1f"
csv.field_size_limit(BLOCK_BYTES)  # Arrow has no limit, and Python's default of 131,072 would make the two disagree
TOO_LONG = f"a field is longer than {BLOCK_BYTES >> 20} MiB; cut it"
_LAST_ROW = "\x1e"
GZIPPED = "the file is gzipped: give it a name that ends in .gz, or unpack it"
JSON = "the file is JSON: convert it to CSV or Parquet"
NO_TEXT = {
    b"PAR1": "the file is Parquet: give it a name that ends in .parquet",
    b"{": JSON,
    b"[": JSON,
    b"PK\x03\x04": "the file is a zip or a workbook: unpack it, or save the sheet as CSV",
}
"""The beginning of a file that is no delimited text, though its first line may pass for such -> the cure."""
_UNDECODED = re.compile(r"[\udc80-\udcff]")
"""What Python makes, where asked to go on, of a byte that is not of the encoding."""
_COLUMN_TYPE = re.compile(r":(token|float)(_seq)?$")


@dataclass(frozen=True)
class TextFormat:
    """How lines become fields. `delimiter` may be several characters long where `quoted` is False."""

    delimiter: str
    quoted: bool = False
    encoding: str = "utf-8"

    def split(self, line: str) -> list[str]:
        """The fields of a line. Raises csv.Error where a quoted field goes on after it."""
        if not self.quoted or '"' not in line:
            return line.split(self.delimiter)
        try:
            return next(csv.reader([line], delimiter=self.delimiter, strict=True))
        except csv.Error as error:
            if "unexpected end of data" in str(error):
                raise
            return next(csv.reader([line], delimiter=self.delimiter))


@dataclass(frozen=True)
class Row:
    """A record as it stands in the file: its fields, or why it has none. `line` counts from 1."""

    line: int
    fields: Sequence[str]
    fault: str = ""


@dataclass(frozen=True)
class TextBlock:
    """Whole lines of a file, the first of which is line `first_line`, with `width` fields each. `read`: the numbers of the fields that are
    read; None: all.
    """

    content: bytes
    first_line: int
    width: int
    format: TextFormat
    read: Sequence[int] | None = None

    def columns(self, wanted: Sequence[int]) -> list[pa.Array]:
        """The wanted columns as strings. Raises pa.ArrowInvalid where a line has too few or too many fields, or one of these columns is not
        UTF-8, and where a record runs over more lines than `rows` takes for one.
        """
        content, delimiter = self._for_arrow()
        if self.format.quoted:
            content += b"\n" + delimiter.join([_LAST_ROW] * self.width).encode()
        table = self._table(content, delimiter, wanted, pa.string())
        columns = [column.combine_chunks() for column in table.columns]
        if not self.format.quoted:
            return columns
        if content.count(b"\n") + 1 - len(columns[0]) >= LONGEST_RECORD:  # so many lines are within a record, or empty
            _refuse_long_records(self._table(content, delimiter, range(self.width), pa.binary()))
        return [_without_last_row(column) for column in columns]

    def _table(self, content: bytes, delimiter: str, wanted: Sequence[int], kind: pa.DataType) -> pa.Table:
        names = [str(number) for number in range(self.width)]
        return arrow_csv.read_csv(
            pa.BufferReader(content),
            read_options=arrow_csv.ReadOptions(
                column_names=names,
                block_size=len(content) + 1,
                use_threads=len(content) > WORTH_THREADS_BYTES,
            ),
            parse_options=arrow_csv.ParseOptions(
                delimiter=delimiter, quote_char='"' if self.format.quoted else False, newlines_in_values=self.format.quoted
            ),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=[names[number] for number in wanted], column_types=dict.fromkeys(names, kind)
            ),
        )

    def rows(self) -> Iterator[Row]:
        """Every record that is not an empty line. In fields that are not read, what is not of the encoding is no fault."""
        lines = self.content.split(b"\n")
        number = 0
        while number < len(lines):
            if not lines[number].strip(b" \r"):
                number += 1
                continue
            row, taken = self._record(lines, number)
            yield row
            number += taken

    def pieces(self) -> "Iterator[TextBlock]":
        """The block in smaller ones; as it is, where it is small, or a quotation mark stays open, so that no cut is safe."""
        start, line = 0, self.first_line
        while start < len(self.content):
            end = self._piece_end(start)
            yield replace(self, content=self.content[start:end], first_line=line)
            line += self.content.count(b"\n", start, end)
            start = end

    def _piece_end(self, start: int) -> int:
        stop = start + max(len(self.content) // PIECES, SMALL_BYTES)
        if stop >= len(self.content):
            return len(self.content)
        whole_records = last_record_end(self.content[start:stop], self.format)
        return start + whole_records if whole_records else len(self.content)

    def _record(self, lines: Sequence[bytes], number: int) -> tuple[Row, int]:
        """The record that starts at line `number`, and how many lines it takes."""
        line, fault = self.first_line + number, ""
        for taken in range(1, min(LONGEST_RECORD, len(lines) - number) + 1):
            raw = b"\n".join(lines[number : number + taken]).rstrip(b"\r")
            text, not_decoded = self._decoded(raw)
            try:
                fields = self.format.split(text)
            except csv.Error as error:
                open_quote = f"a quotation mark is opened and never closed ({error})"
                fault = fault or not_decoded or (TOO_LONG if "field limit" in str(error) else open_quote)
            else:
                if taken == 1 or len(fields) == self.width:
                    spoilt = not_decoded and self._reads_undecoded(fields)
                    return Row(line, (), not_decoded) if spoilt else Row(line, fields), taken
        return Row(line, (), fault), 1

    def _decoded(self, line: bytes) -> tuple[str, str]:
        """The text of a line, and "" or which byte is not of the encoding. Such bytes are lone surrogates in the text."""
        try:
            return line.decode(self.format.encoding), ""
        except UnicodeDecodeError as error:
            place = f"byte {error.start + 1} of the line, 0x{line[error.start]:02x}"
            cure = GZIPPED if line.startswith(b"\x1f\x8b") else f"save the file as {self.format.encoding}"
            text = line.decode(self.format.encoding, "surrogateescape")
            return text, f"{place}, is not {self.format.encoding}; {cure}"

    def _reads_undecoded(self, fields: Sequence[str]) -> bool:
        read = fields if self.read is None else [fields[number] for number in self.read if number < len(fields)]
        return any(_UNDECODED.search(text) for text in read)

    def _for_arrow(self) -> tuple[bytes, str]:
        """Content and delimiter for Arrow, which splits at one byte: a longer delimiter is replaced by a byte that the content lacks.

        Raises pa.ArrowInvalid where that is not possible.
        """
        if self.content.count(b"\r") != self.content.count(b"\r\n"):
            raise pa.ArrowInvalid("the block holds a carriage return, which ends a line for Arrow, inside a line")
        if len(self.format.delimiter.encode()) == 1:
            return self.content, self.format.delimiter
        if self.format.quoted and b'"' in self.content:
            raise pa.ArrowInvalid("the block has quotation marks, inside which the delimiter must stay as it is")
        if _UNIT_SEPARATOR in self.content:
            raise pa.ArrowInvalid("the block holds the byte that should stand for the delimiter")
        return self.content.replace(self.format.delimiter.encode(), _UNIT_SEPARATOR), _UNIT_SEPARATOR.decode()


def _refuse_long_records(table: pa.Table) -> None:
    """Raises pa.ArrowInvalid where a record of these columns, all that there are, runs over more than LONGEST_RECORD lines: its quotation
    marks may be two stray ones, and what lies between them many records.
    """
    line_ends = sum(pc.count_substring(column, "\n").to_numpy() for column in table.columns)
    if np.max(line_ends) >= LONGEST_RECORD:
        raise pa.ArrowInvalid(f"a record runs over more than {LONGEST_RECORD} lines")


def _without_last_row(column: pa.Array) -> pa.Array:
    """The column less the row put behind it. Raises pa.ArrowInvalid where an open quotation mark, which Arrow forgives, swallowed it."""
    if column[-1].as_py() != _LAST_ROW:
        raise pa.ArrowInvalid("the block ends within a quotation mark that is never closed")
    return column[:-1]


class TextReader:
    """Reads a file block by block, never more than a few blocks at once in memory. `place` is how messages name the file."""

    def __init__(self, stream: IO[bytes], place: str, text_format: TextFormat, block_bytes: int = BLOCK_BYTES) -> None:
        self._stream, self._place, self._format, self._block_bytes = stream, place, text_format, block_bytes
        self._rest = stream.read(block_bytes).removeprefix(b"\xef\xbb\xbf")
        self._line = 1

    def choose_delimiter(self, given: str | None, usual: str, *, quoted: bool) -> None:
        """Take the given delimiter, unless the first line lacks it and has a usual one; then, or where none is given, the usual one that
        occurs there most often; of equals, the earlier one. `quoted`: whether fields may be, which a delimiter of several characters rules
        out.
        """
        first_line = self._rest.split(b"\n", 1)[0]
        guessed = max(usual, key=lambda candidate: first_line.count(candidate.encode()))
        delimiter = given or guessed
        if delimiter.encode() not in first_line and guessed.encode() in first_line:
            delimiter = guessed
        self._format = replace(self._format, delimiter=delimiter, quoted=quoted and len(delimiter) == 1)

    def header(self, expected: Sequence[str] = ()) -> list[str]:
        """The column names of the first line, less a type after a colon, as ``user_id:token`` has.

        Raises DataError where the file is empty, the line is not text, or the names are not the expected ones.
        """
        if cure := next((cure for magic, cure in NO_TEXT.items() if self._rest.startswith(magic)), ""):
            raise DataError(f"{self._place}:1: {cure}")
        line, _, self._rest = self._rest.partition(b"\n")
        self._line = 2
        row = next(TextBlock(line, 1, 0, self._format).rows(), Row(1, (), "the first line is empty and should name the columns"))
        if b"\r" in line.removesuffix(b"\r") and _is_utf_8(line):
            raise DataError(f"{self._place}:1: lines end in a carriage return alone; save the file with the line ends of Unix or Windows")
        if row.fault:
            raise DataError(f"{self._place}:1: {row.fault}")
        names = [_COLUMN_TYPE.sub("", name.strip()) for name in row.fields]
        if expected and names != list(expected):
            raise DataError(f"{self._place}:1: the columns are {listed(names)}, but should be {', '.join(expected)}")
        return names

    def blocks(self, width: int, read: Sequence[int] | None = None) -> Iterator[TextBlock]:
        """The rest of the file, in blocks of whole lines. `read`: the numbers of the fields that are read; None: all."""
        while True:
            more = self._stream.read(self._block_bytes)
            content = self._rest + more if more else self._rest
            end = self._whole_lines(content) if more else len(content)
            if end:
                yield TextBlock(content[:end], self._line, width, self._format, read)
                self._line += content.count(b"\n", 0, end)
            self._rest = content[end:]
            if not more:
                return

    def _whole_lines(self, content: bytes) -> int:
        """Where the last record ends, 0 where none does yet. Where a quotation mark stays open for too long, it is taken for a stray one,
        and the last line's end counts.
        """
        end = last_record_end(content, self._format)
        return end if end or content.count(b"\n") < LONGEST_RECORD else content.rfind(b"\n") + 1


def _is_utf_8(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def listed(names: Sequence[str]) -> str:
    """The columns for an error message; only the beginning where they are long, as in a file that is no table."""
    told = ", ".join(names)
    return told if len(told) <= MOST_TOLD else f"{told[:MOST_TOLD]}..."


def refuse_twice(names: Sequence[str]) -> None:
    """Raises pa.ArrowInvalid where two of the columns have one name, of which one would be lost."""
    if twice := [name for name in names if names.count(name) > 1]:
        raise pa.ArrowInvalid(f"it has several columns {twice[0]!r}; give each a name of its own")


def last_record_end(content: bytes, text_format: TextFormat) -> int:
    """Where the last whole record ends: at the last line end that is not inside quotation marks; 0 where there is none."""
    end = content.rfind(b"\n") + 1
    quotes = content.count(b'"', 0, end) if text_format.quoted else 0
    if not quotes:
        return end
    delimiter = text_format.delimiter.encode()
    if _has_stray_quote(content[:end], delimiter):
        return _last_end_between_quotes(content[:end], delimiter)
    while quotes % 2 and end:
        before = content.rfind(b"\n", 0, end - 1) + 1
        quotes -= content.count(b'"', before, end)
        end = before
    return end


def _has_stray_quote(lines: bytes, delimiter: bytes) -> bool:
    """Whether a quotation mark stands inside an unquoted field, as in ``a 27" screen``, so that counting the marks says nothing.

    Without such a mark, every other one begins a field, or is the second of two that stand for one.
    """
    text = np.frombuffer(b"\n" + lines, np.uint8)
    before = text[np.flatnonzero(text == ord('"'))[::2] - 1]
    return not np.isin(before, np.frombuffer(b'\n"' + delimiter[-1:], np.uint8)).all()


def _last_end_between_quotes(lines: bytes, delimiter: bytes) -> int:
    """The last line end outside of quoted fields. A quotation mark that is open for more than LONGEST_RECORD lines begins no field."""
    field = re.compile(rb"(?:\A|(?<=\n)|(?<=" + re.escape(delimiter) + rb'))"[^"]*+(?:""[^"]*+)*+("?)')
    end = outside = 0
    while found := field.search(lines, outside):
        end = max(end, lines.rfind(b"\n", outside, found.start()) + 1)
        stray = lines.count(b"\n", *found.span()) >= LONGEST_RECORD
        if not stray and not found[1]:
            return end
        outside = found.start() + 1 if stray else found.end()
    return max(end, lines.rfind(b"\n", outside) + 1)
