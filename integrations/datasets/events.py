"""Events from rows to `Interactions`: a fast pass over Arrow columns, and a careful one over the rows of a block that the fast one doubts.

What the fast pass accepts, the careful one accepts with the same result; so the fast one may give up on anything unusual.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cluster.dataset import Interactions
from cluster.errors import DataError
from cluster.events.rules import LATEST_TIMESTAMP
from cluster.values import ACTIONS, LARGEST_VALUE, Action, Int8Array, Int64Array
from integrations.datasets.ids import OF_SPREADSHEET, tell_doubtful_ids, wrong_id
from integrations.datasets.options import NO_COLUMN, BadRows, TimestampUnit
from integrations.datasets.text import Row

_MICROSECONDS = 1_000_000
_ZONE = re.compile(r":.*([Zz]|[+-][\d:]+)\s*$")
_LARGEST_INT = float(2**63 - 1024)  # of int64, as a float
_DIGITS_OF_SPREADSHEET = 6  # the most that one shows of a number with an exponent, unless its format asks for more
_EARLIEST_DATE, _LATEST_DATE = 1900_01_01_00_00_00, 2100_12_31_23_59_59
END_OF_1970_S = 365 * 86_400


class Block(Protocol):
    """A stretch of an event file. All three methods give the same rows in the same order; `pieces` in smaller blocks, or in this one."""

    def columns(self, wanted: Sequence[int]) -> list[pa.Array]: ...
    def rows(self) -> Iterable[Row]: ...
    def pieces(self) -> "Iterable[Block]": ...


class _Doubt(Exception):
    """Raised where the fast pass is not sure of a block."""


class _Fault(Exception):
    """Raised where a row is bad; the message says why."""


@dataclass(frozen=True)
class EventFormat:
    """Where the parts of an event stand among a row's `width` fields, and how they are written."""

    width: int
    user: int
    item: int
    timestamp: int
    action: int | None = None
    value: int | None = None
    unit: TimestampUnit = TimestampUnit.SECONDS
    default_action: Action = Action.VIEW
    action_names: Mapping[str, Action] = field(default_factory=dict)
    optional_columns: bool = False
    """Whether the columns of actions and of values may be left out."""

    def action_of(self, text: str) -> Action | None:
        """The action a file's word stands for, its own names first; None for an unknown word."""
        word = text.strip().lower()
        return self.action_names.get(word) or ACTIONS.get(word)

    def or_left_out(self, role: str) -> str:
        """What a message adds of the option by which the column of this role is left out; "" where there is none."""
        return f"; --{role}-column {NO_COLUMN} leaves the column out" if self.optional_columns else ""


@dataclass(frozen=True)
class _Events:
    """A block's events: ids by number in the two indices, `times` in microseconds since 1970."""

    users: Int64Array
    items: Int64Array
    times: Int64Array
    actions: Int8Array
    values: npt.NDArray[np.float64]


class EventCollector:
    """Takes blocks of one or more files of one format and turns them into `Interactions`.

    Items the catalogue lacks are numbered on, in order of appearance.
    """

    def __init__(self, event_format: EventFormat, item_ids: Iterable[str], bad_rows: BadRows) -> None:
        self.format, self._bad_rows = event_format, bad_rows
        self._users: dict[str, int] = {}
        self._items = {item_id: index for index, item_id in enumerate(item_ids, start=1)}
        self._known_items = len(self._items)
        self._parts: list[_Events] = []

    def add(self, block: Block, place: str) -> None:
        """Read a block of the file that messages call `place`. Raises DataError at a bad row, unless bad rows are skipped."""
        try:
            self._parts.append(self._fast(block))
        except (_Doubt, pa.ArrowInvalid, pa.ArrowNotImplementedError, UnicodeDecodeError):
            self._find_fault(block, place)

    def _find_fault(self, block: Block, place: str) -> None:
        """Find the bad rows by reading smaller and smaller parts of a block, so that few rows are looked at one by one."""
        pieces = list(block.pieces())
        if len(pieces) == 1:
            self._parts.append(self._careful(block, place))
            return
        for piece in pieces:
            self.add(piece, place)

    def unlisted_items(self) -> list[str]:
        """Items that have events and no entry in the catalogue, in index order."""
        return list(self._items)[self._known_items :]

    def interactions(self, place: str) -> Interactions:
        """All events, by user in order of appearance, then time. Raises DataError where there is none; doubtful ids are warned of."""
        if not any(len(part.times) for part in self._parts):
            worst = f": all rows are bad, the first being {self._bad_rows.first[0]}" if self._bad_rows.first else ""
            raise DataError(f"{place} holds no events{worst}")
        users = np.concatenate([part.users for part in self._parts])
        times = np.concatenate([part.times for part in self._parts])
        if self.format.unit.per_microsecond == 1:  # else the digits are not known any more; of dates in ns, all lie in 1970
            _refuse_dates(times // self.format.unit.microseconds, place)
        if self.format.unit is not TimestampUnit.SECONDS and times.max() < END_OF_1970_S * _MICROSECONDS:
            latest = datetime.fromtimestamp(int(times.max()) // _MICROSECONDS, UTC).date()
            told = f"in unit {self.format.unit.value!r} all timestamps lie in 1970, the latest on {latest}"
            raise DataError(f"{place}: {told}; is another --timestamp-unit meant?")
        tell_doubtful_ids(place, [*self._users, *self.unlisted_items()])
        order = np.lexsort((times, users))
        return Interactions(
            user_ids=list(self._users),
            offsets=np.concatenate([[0], np.cumsum(np.bincount(users, minlength=len(self._users)))]).astype(np.int64),
            items=np.concatenate([part.items for part in self._parts])[order].astype(np.int32),
            timestamps=times[order] // _MICROSECONDS,
            actions=np.concatenate([part.actions for part in self._parts])[order],
            values=np.concatenate([part.values for part in self._parts])[order],
        )

    def _fast(self, block: Block) -> _Events:
        form = self.format
        wanted = [number for number in (form.user, form.item, form.timestamp, form.action, form.value) if number is not None]
        columns = {number: _plain(column) for number, column in zip(wanted, block.columns(wanted), strict=True)}
        times = _times(columns[form.timestamp], form.unit)
        actions = np.full(len(times), form.default_action.code, np.int8) if form.action is None else self._actions(columns[form.action])
        values = np.full(len(times), np.nan) if form.value is None else _values(columns[form.value])
        users, items = _Ids("user", columns[form.user]), _Ids("item", columns[form.item])
        return _Events(users.numbers(self._users, 0), items.numbers(self._items, 1), times, actions, values)

    def _careful(self, block: Block, place: str) -> _Events:
        rows = []
        for row in block.rows():
            try:
                rows.append(self._event(row))
            except _Fault as fault:
                self._bad_rows.add(place, row.line, str(fault))
        users = np.array([self._users.setdefault(user, len(self._users)) for user, *_ in rows], np.int64)
        items = np.array([self._items.setdefault(item, len(self._items) + 1) for _, item, *_ in rows], np.int64)
        times = np.array([time for _, _, time, _, _ in rows], np.int64)
        actions = np.array([action for _, _, _, action, _ in rows], np.int8)
        return _Events(users, items, times, actions, np.array([value for *_, value in rows], np.float64))

    def _event(self, row: Row) -> tuple[str, str, int, int, float]:
        form, fields = self.format, row.fields
        if row.fault:
            raise _Fault(row.fault)
        if len(fields) != form.width:
            raise _Fault(f"{len(fields)} fields where there should be {form.width}")
        user, item = fields[form.user], fields[form.item]
        if fault := wrong_id("user", user) or wrong_id("item", item):
            raise _Fault(fault)
        action = form.default_action if form.action is None else form.action_of(fields[form.action])
        if action is None:
            known = ", ".join([*form.action_names, *Action])
            cure = f"--action-name NAME=ACTION adds one{form.or_left_out('action')}"
            raise _Fault(f"unknown action {fields[form.action or 0]!r}; the known ones are {known} ({cure})")
        try:
            value = math.nan if form.value is None else _value(fields[form.value].strip())
        except ValueError as error:
            raise _Fault(f"value {error}{form.or_left_out('value')}") from None
        return user, item, _time(fields[form.timestamp].strip(), form.unit), action.code, value

    def _actions(self, column: pa.Array) -> Int8Array:
        words = pc.dictionary_encode(pc.fill_null(column, "") if _is_text(column) else column)
        actions = [self.format.action_of(str(word)) for word in words.dictionary.to_pylist()]
        if words.null_count or None in actions:
            raise _Doubt
        codes: Int8Array = np.array([action.code for action in actions if action is not None], np.int8)
        chosen: Int8Array = codes[words.indices.to_numpy()]
        return chosen


class _Ids:
    """A column of ids, checked before any of them is numbered."""

    def __init__(self, kind: str, column: pa.Array) -> None:
        encoded = pc.dictionary_encode(column)
        self._rows = encoded.indices
        self._ids = [str(name) for name in encoded.dictionary.to_pylist()]
        if encoded.null_count or any(wrong_id(kind, name) for name in self._ids):
            raise _Doubt

    def numbers(self, index: dict[str, int], first: int) -> Int64Array:
        """The number of each row's id; ids new to the index are added at its end. The index counts from `first`."""
        numbers: Int64Array = np.array([index.setdefault(name, len(index) + first) for name in self._ids], np.int64)
        of_rows: Int64Array = numbers[self._rows.to_numpy()]
        return of_rows


def _times(column: pa.Array, unit: TimestampUnit) -> Int64Array:
    """Microseconds since 1970 of a column of numbers, times or text."""
    if _is_text(column):
        if any(_is_cut_off(text.strip(), unit) for text in column.filter(pc.match_substring(column, "E+")).to_pylist()):
            raise _Doubt
        column = column.cast(_kind_of_time(column))
    if column.null_count or pa.types.is_boolean(column.type):
        raise _Doubt
    if pa.types.is_temporal(column.type):
        kind, nanoseconds = pa.timestamp("us", tz=getattr(column.type, "tz", None)), getattr(column.type, "unit", "") == "ns"
        times: Int64Array = column.cast(kind, safe=not nanoseconds).cast(pa.int64()).to_numpy()  # of ns the rest is cut off
    else:
        numbers = column.cast(pa.float64(), safe=not pa.types.is_integer(column.type)).to_numpy()  # rounds nanoseconds, as _time does
        if not np.all((numbers >= 0) & (numbers <= min(_latest(unit), _LARGEST_INT))):
            raise _Doubt
        times = _scaled(numbers, unit)
    if times.size and not (times.min() >= 0 and times.max() <= LATEST_TIMESTAMP * _MICROSECONDS):
        raise _Doubt
    return times


def _refuse_dates(numbers: Int64Array, place: str) -> None:
    """Raises DataError where every time, as the file has it, is a date: YYYYMMDD, YYYYMMDDHHMM or YYYYMMDDHHMMSS. As seconds 20231114 would
    be in August 1970, and 202311142213 in the year 8380.
    """
    for factor in (1_000_000, 100, 1):
        if numbers.min() < _EARLIEST_DATE // factor or numbers.max() > _LATEST_DATE // factor:
            continue
        if np.all(_is_date(numbers * factor)):
            told = f"{place}: all timestamps look like dates written as numbers, such as {numbers[0]}"
            raise DataError(f"{told}; write them as ISO dates, {_iso(int(numbers[0]) * factor, timed=factor < 1_000_000)}")


def _is_date(numbers: Int64Array) -> npt.NDArray[np.bool_]:
    """Which numbers are of the form YYYYMMDDHHMMSS."""
    months, days = numbers // 10**8 % 100, numbers // 10**6 % 100
    hours, minutes, seconds = numbers // 10**4 % 100, numbers // 100 % 100, numbers % 100
    return (months >= 1) & (months <= 12) & (days >= 1) & (days <= 31) & (hours < 24) & (minutes < 60) & (seconds < 60)


def _iso(date: int, *, timed: bool = True) -> str:
    """20231114221305 -> 2023-11-14T22:13:05, or without its time 2023-11-14."""
    text = str(date)
    return f"{text[:4]}-{text[4:6]}-{text[6:8]}" + (f"T{text[8:10]}:{text[10:12]}:{text[12:]}" if timed else "")


def _scaled(numbers: npt.NDArray[np.float64], unit: TimestampUnit) -> Int64Array:
    """The numbers in microseconds. Whole and fractional parts are scaled apart: as one float, the product would not be exact."""
    whole = np.floor(numbers)
    fraction = np.floor((numbers - whole) * unit.microseconds)
    times: Int64Array = (whole.astype(np.int64) * unit.microseconds + fraction.astype(np.int64)) // unit.per_microsecond
    return times


def _latest(unit: TimestampUnit) -> int:
    """LATEST_TIMESTAMP in this unit: a larger number is of another one."""
    return LATEST_TIMESTAMP * _MICROSECONDS * unit.per_microsecond // unit.microseconds


def _values(column: pa.Array) -> npt.NDArray[np.float64]:
    """Numbers that a request may carry; NaN where the field is empty, and where a column of floats has NaN."""
    if pa.types.is_floating(column.type):
        column = pc.if_else(pc.is_nan(column.cast(pa.float64())), pa.scalar(None, pa.float64()), column.cast(pa.float64()))
    if _is_text(column):
        column = pc.if_else(pc.equal(column, ""), pa.scalar(None, column.type), column)
    if pa.types.is_boolean(column.type):  # Arrow makes 1 of true
        raise _Doubt
    column = column.cast(pa.float64())
    given = column.drop_null().to_numpy(zero_copy_only=False)
    if not np.all(np.abs(given) <= LARGEST_VALUE):
        raise _Doubt
    values: npt.NDArray[np.float64] = column.to_numpy(zero_copy_only=False)
    return values


def _plain(column: pa.Array) -> pa.Array:
    """The column without a dictionary, which may hold words that no row has."""
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _is_text(column: pa.Array) -> bool:
    return bool(pa.types.is_string(column.type) or pa.types.is_large_string(column.type))


def _kind_of_time(column: pa.Array) -> pa.DataType:
    """The type of the first timestamp. To try all types one after the other is slow: Arrow makes a message of every value that fails."""
    first = str(column[0].as_py()) if len(column) else "0"
    if "-" not in first[1:]:
        return pa.float64()
    return pa.timestamp("us", tz="UTC" if _ZONE.search(first) else None)


def _time(text: str, unit: TimestampUnit) -> int:
    """Microseconds since 1970; a time without a zone is taken as UTC."""
    if _is_cut_off(text, unit):
        cure = "format the column as a number without decimals in the spreadsheet, and save it again"
        exact = f"if the time is exact, write {Decimal(text.replace(',', '.')):f}"
        raise _Fault(f"timestamp {text!r} is written with an exponent and few digits, and others may be lost; {cure}, or, {exact}")
    try:
        number = _number(text)
    except ValueError:
        return _iso_time(text)
    if not math.isfinite(number) or number < 0:
        raise _Fault(f"timestamp {text!r} is not a time since 1970")
    if number > _latest(unit):
        if _EARLIEST_DATE <= number <= _LATEST_DATE and np.all(_is_date(np.array([number], np.int64))):
            raise _Fault(f"timestamp {text!r} looks like a date written as a number; write it as an ISO date, {_iso(int(number))}")
        raise _Fault(f"timestamp {text!r} lies after the year 9999 in unit {unit.value!r}; is another --timestamp-unit meant?")
    whole = math.floor(number)  # as _scaled does
    return (whole * unit.microseconds + math.floor((number - whole) * unit.microseconds)) // unit.per_microsecond


def _is_cut_off(text: str, unit: TimestampUnit) -> bool:
    """Whether a time is a number as spreadsheets save it, of which the digits do not reach the second. .NET writes a number so too, without
    zeros at its end: it has all digits, and hardly ever so few.
    """
    if not (number := OF_SPREADSHEET.fullmatch(text)) or len(decimals := number[1] or "") >= _DIGITS_OF_SPREADSHEET:
        return False
    last_digit = int(number[2]) - len(decimals)
    return 10.0**last_digit * unit.microseconds > _MICROSECONDS * unit.per_microsecond


def _iso_time(text: str) -> int:
    try:
        moment = datetime.fromisoformat(text)
        since = moment.replace(tzinfo=moment.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)
    except (ValueError, OverflowError):
        raise _Fault(f"timestamp {text!r} is neither a number nor an ISO-8601 time") from None
    microseconds = (since.days * 86_400 + since.seconds) * _MICROSECONDS + since.microseconds
    if microseconds < 0:
        raise _Fault(f"timestamp {text!r} lies before 1970")
    return microseconds


def _number(text: str) -> float:
    """Raises ValueError, also at the digit separators of Python's literals, which Arrow refuses as well."""
    if "_" in text:
        raise ValueError(text)
    return float(text)


def _value(text: str) -> float:
    """Raises ValueError with the text where it is no number that a request may carry."""
    if not text:
        return math.nan
    try:
        number = _number(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is not a finite number")
    if abs(number) > LARGEST_VALUE:
        raise ValueError(
            f"{text!r} is of a larger amount than {LARGEST_VALUE:g}, the most that a request may carry; give it in a larger unit"
        )
    return number
