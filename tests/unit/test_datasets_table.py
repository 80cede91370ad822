import csv
import gzip
import io
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cluster.errors import DataError
from cluster.values import LARGEST_VALUE, Action, Item
from deployments.training.dataset_options import DatasetOptions
from integrations.datasets.events import EventCollector, EventFormat
from integrations.datasets.files import File
from integrations.datasets.options import BadRows, Columns, ItemColumns, ReadOptions, TimestampUnit
from integrations.datasets.parquet import ParquetBlock, parquet_blocks
from integrations.datasets.table import read_items, read_table
from integrations.datasets.table_file import table_files
from integrations.datasets.text import TextFormat, TextReader

CSV = "user,item,timestamp,action,value\nb,x,200,purchase,9.5\na,y,300,view,\na,x,100,click,\nb,z,200,like,\n"


def skipping(**more):
    return ReadOptions(on_bad_row=BadRows(skip=True), **more)


def written(tmp_path, text, name="events.csv"):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def as_parquet(tmp_path, name="events.parquet", **columns):
    pq.write_table(pa.table(columns), tmp_path / name)
    return tmp_path / name


def rows_of(dataset):
    """The events as (user, item, timestamp, action, value or None), grouped and sorted as the dataset has them."""
    events = dataset.interactions
    users = np.repeat(np.arange(events.users), events.lengths)
    return [
        (
            events.user_ids[user],
            dataset.catalogue[int(events.items[row])].item_id,
            int(events.timestamps[row]),
            list(Action)[events.actions[row]],
            None if np.isnan(events.values[row]) else float(events.values[row]),
        )
        for row, user in enumerate(users)
    ]


EXPECTED = [
    ("b", "x", 200, Action.PURCHASE, 9.5),
    ("b", "z", 200, Action.LIKE, None),
    ("a", "x", 100, Action.CLICK, None),
    ("a", "y", 300, Action.VIEW, None),
]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("events.csv", CSV),
        ("events.tsv", CSV.replace(",", "\t")),
        ("events.csv", CSV.replace(",", ";")),
        ("events.txt", CSV.replace(",", "|")),
        ("events.csv", "\ufeff" + CSV.replace("\n", "\r\n")),
        ("events.csv", "\n".join(",".join(f'"{part}"' for part in line.split(",")) for line in CSV.splitlines())),
        ("events.csv", CSV.replace("\n", "\n\n")),
    ],
)
def test_reads_text_whatever_its_delimiter_quotes_and_line_ends(tmp_path, name, text):
    assert rows_of(read_table(written(tmp_path, text, name))) == EXPECTED


def test_a_user_without_a_home_directory_reads_tables_and_is_told_where_to_have_fetched_datasets(tmp_path, monkeypatch):
    def unknown(_):
        raise KeyError("uid not found")

    for name in ("HOME", "GENREC_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert rows_of(DatasetOptions(name="table", path=written(tmp_path, CSV)).read()) == EXPECTED
    with pytest.raises(DataError, match=r"no home directory .*; name a directory as GENREC_CACHE"):
        DatasetOptions(name="ml-100k").read()


@pytest.mark.parametrize("delimiter", ["§", "¦", "\x01", "::", " | "])
@pytest.mark.parametrize("quoted", [False, True])
def test_any_delimiter_may_be_named_also_one_of_several_bytes(tmp_path, delimiter, quoted):
    user = f'"a{delimiter}b"' if quoted and len(delimiter) == 1 else "a"
    lines = ["user,item,timestamp", f"{user},x,5", "c,y,6"]
    path = written(tmp_path, "\n".join(line.replace(",", delimiter) for line in lines))
    events = read_table(path, ReadOptions(delimiter=delimiter)).interactions
    assert (list(events.user_ids), events.timestamps.tolist()) == ([user.strip('"'), "c"], [5, 6])


def test_a_delimiter_that_the_header_of_one_table_lacks_is_guessed_for_that_table(tmp_path):
    path = written(tmp_path, "user::item::timestamp\na::x::5\n", "events.dat")
    items = written(tmp_path, 'item_id,title,colour\nx,"red, ripe",a::b\n', "items.csv")
    read = read_table(path, ReadOptions(delimiter="::", items=items))
    assert rows_of(read) == [("a", "x", 5, Action.VIEW, None)]
    assert list(read.catalogue.items) == [Item("x", "red, ripe", {"colour": "a::b"})]


@pytest.mark.parametrize("delimiter", [";", "::"])
def test_a_table_of_one_column_has_no_other_delimiter_than_the_given_one(tmp_path, delimiter):
    items = written(tmp_path, "item_id\nx,1\n", "items.csv")
    assert [item.item_id for item in read_items(items, ReadOptions(delimiter=delimiter))] == ["x,1"]


def test_reads_parquet(tmp_path):
    path = as_parquet(
        tmp_path,
        unused=[1, 2, 3, 4],
        value=[9.5, None, None, None],
        item=pa.array(["x", "y", "x", "z"]).dictionary_encode(),
        timestamp=[200, 300, 100, 200],
        user=["b", "a", "a", "b"],
        action=["purchase", "view", "click", "like"],
    )
    assert rows_of(read_table(path)) == EXPECTED


@pytest.mark.parametrize(
    "users", [pa.array([1, 2]), pa.array(["1", "2"]), pa.array(["1", "2"], pa.string_view()), pa.array([1, 2]).dictionary_encode()]
)
@pytest.mark.parametrize("kind", [pa.timestamp("ns"), pa.timestamp("ms", tz="Europe/Berlin"), pa.int32(), pa.float64(), pa.string()])
def test_parquet_columns_may_have_any_sensible_type(tmp_path, users, kind):
    path = as_parquet(tmp_path, user=users, item=[7, 8], timestamp=pa.array([10, 20], pa.int64()).cast(kind))
    unit = {pa.timestamp("ns"): 10**9, pa.timestamp("ms", tz="Europe/Berlin"): 10**3}.get(kind, 1)
    path = as_parquet(tmp_path, user=users, item=[7, 8], timestamp=pa.array([10 * unit, 20 * unit]).cast(kind))
    assert rows_of(read_table(path)) == [("1", "7", 10, Action.VIEW, None), ("2", "8", 20, Action.VIEW, None)]


def test_a_parquet_item_table_with_two_columns_of_one_name_is_refused_and_events_do_without_such_columns(tmp_path):
    names = ["user", "item", "timestamp", "note", "note"]
    pq.write_table(pa.Table.from_arrays([pa.array([5])] * 5, names), tmp_path / "both.parquet")
    assert rows_of(read_table(tmp_path / "both.parquet")) == [("5", "5", 5, Action.VIEW, None)]
    with pytest.raises(DataError, match=r"both\.parquet cannot be read: it has several columns 'note'; give each a name of its own"):
        read_table(tmp_path / "both.parquet", ReadOptions(items=tmp_path / "both.parquet"))


def test_a_csv_item_table_with_two_columns_of_one_name_is_refused_and_events_do_without_such_columns(tmp_path):
    both = written(tmp_path, "user,item,timestamp,note,note\n5,5,5,5,5\n", "both.csv")
    assert rows_of(read_table(both)) == [("5", "5", 5, Action.VIEW, None)]
    with pytest.raises(DataError, match=r"both\.csv cannot be read: it has several columns 'note'; give each a name of its own"):
        read_table(both, ReadOptions(items=both))
    nameless = written(tmp_path, "id,title,,\n5,Five,1,2\n", "nameless.csv")
    assert read_items(nameless, ReadOptions()) == [Item("5", "Five", {})]


def test_of_a_parquet_item_table_few_rows_are_read_at_a_time(tmp_path, monkeypatch):
    count, taken, rows = 20_000, [], ParquetBlock.rows
    path = as_parquet(tmp_path, id=list(range(count)), title=[f"Item {number}" for number in range(count)])

    def counted(block):
        taken.append(block.batch.num_rows)
        return rows(block)

    monkeypatch.setattr(ParquetBlock, "rows", counted)
    assert read_items(path, ReadOptions()) == [Item(str(number), f"Item {number}") for number in range(count)]
    assert (sum(taken), max(taken) <= 10_000) == (count, True), "a row with a description and images is 10 KB and more"


@pytest.mark.parametrize("group_rows", [600_000, 122_880])
def test_a_gzipped_parquet_file_is_not_inflated_from_its_beginning_again_and_again(tmp_path, monkeypatch, group_rows):
    count, back, seek = 600_000, [], gzip.GzipFile.seek
    numbers = np.random.default_rng(0).integers(0, 2**40, count)
    columns = {"user": numbers % 1000, "item": numbers % 999, "timestamp": numbers % 10**9, "value": numbers / 7}
    packed = tmp_path / "events.parquet.gz"
    with gzip.open(packed, "wb", compresslevel=1) as file:
        pq.write_table(pa.table(columns), file, use_dictionary=False, row_group_size=group_rows)  # 4.8 MB a column

    def counted(file, offset, whence=io.SEEK_SET):
        before = seek(file, 0, io.SEEK_CUR)
        after = seek(file, offset, whence)
        back.extend([after] * (after < before))
        return after

    monkeypatch.setattr(gzip.GzipFile, "seek", counted)
    assert len(read_table(packed).interactions) == count
    assert len(back) <= 2, "from the end to the footer, and to the rows"


def test_a_parquet_file_may_hold_views_of_text(tmp_path):
    written_so = {"user": ["b", "a"], "item": ["x", "y"], "timestamp": ["5", "2020-01-01"], "action": ["view", "like"], "value": ["", "2"]}
    path = as_parquet(tmp_path, **{name: pa.array(column, pa.string_view()) for name, column in written_so.items()})
    items = as_parquet(tmp_path, "items.parquet", **{name: pa.array(["x", None], pa.string_view()) for name in ("id", "title", "shelf")})
    dataset = read_table(path, skipping(items=items))
    assert rows_of(dataset) == [("b", "x", 5, Action.VIEW, None), ("a", "y", 1_577_836_800, Action.LIKE, 2)]
    assert dataset.catalogue[1].attributes == {"shelf": "x"}


def test_ids_in_a_float_column_are_refused_with_the_cure(tmp_path):
    path = as_parquet(tmp_path, user=[1.0, 2.0], item=[7, 8], timestamp=[1, 2])
    with pytest.raises(DataError, match="column 'user' holds double, but ids must be strings or integers"):
        read_table(path)


def test_times_in_a_column_of_single_precision_are_refused_with_the_cure(tmp_path):
    path = as_parquet(tmp_path, user=[1, 2], item=[7, 8], timestamp=pa.array(np.float32([1_700_000_000, 1_700_000_050])))
    with pytest.raises(DataError, match="column 'timestamp' holds float, in which a time of today is up to 64 s off; write it as int64"):
        read_table(path)


def test_ids_in_a_float_column_of_an_item_table_are_refused_as_they_would_lose_the_titles(tmp_path):
    items = as_parquet(tmp_path, "items.parquet", id=[1.0, 2.0], title=["One", "Two"])
    with pytest.raises(DataError, match=r"items\.parquet: column 'id' holds double, but ids must be strings or integers"):
        read_table(written(tmp_path, "user,item,timestamp\nu,1,5\n"), ReadOptions(items=items))


def test_a_table_with_the_line_ends_of_old_macintoshes_is_refused_with_the_cure(tmp_path):
    with pytest.raises(DataError, match=r"events\.csv:1: lines end in a carriage return alone; save the file with the line ends of Unix"):
        read_table(written(tmp_path, CSV.replace("\n", "\r").encode()))
    assert rows_of(read_table(written(tmp_path, CSV.replace("\n", "\r\n").encode()))) == EXPECTED


@pytest.mark.parametrize(
    ("name", "begins", "cure"),
    [
        ("events.pqt", b"PAR1\x15\x04\n", "the file is Parquet: give it a name that ends in .parquet"),
        ("events.jsonl", b'{"user": "a", "item": "x"}\n', "the file is JSON: convert it to CSV or Parquet"),
        ("events.json", b'[{"user": "a", "item": "x"}]', "the file is JSON: convert it to CSV or Parquet"),
        ("events.xlsx", b"PK\x03\x04\x14\n", "the file is a zip or a workbook: unpack it, or save the sheet as CSV"),
    ],
)
def test_a_file_that_is_no_text_and_named_as_one_is_refused_with_the_cure(tmp_path, name, begins, cure):
    with pytest.raises(DataError) as refused:
        read_table(written(tmp_path, begins, name))
    assert str(refused.value) == f"{tmp_path / name}:1: {cure}"


@pytest.mark.parametrize("name", ["events.zip", "events.tar.gz", "events.csv.zst", "EVENTS.CSV.BZ2"])
def test_a_packed_file_is_refused_with_the_cure(tmp_path, name):
    path, events_file = written(tmp_path, b"PK\x03\x04\xbb", name), written(tmp_path, CSV)
    with pytest.raises(DataError, match=rf"{name} is packed; unpack it first"):
        read_table(path)
    with pytest.raises(DataError, match=rf"{name} is packed; unpack it first"):
        read_table(events_file, ReadOptions(items=path))


def test_a_file_of_one_long_line_that_is_no_table_is_refused_with_its_beginning(tmp_path):
    path = written(tmp_path, f"events = {[{'user': number, 'item': 'x'} for number in range(10_000)]}")
    with pytest.raises(DataError, match=r"it has events = \[\{'user': 0, 'item': 'x'\}, .*\.\.\. Name it with --user-column") as refused:
        read_table(path)
    assert len(str(refused.value)) < 2000


def test_a_table_may_come_out_of_a_pipe():
    reads, writes = os.pipe()
    os.write(writes, CSV.encode())
    os.close(writes)
    assert rows_of(read_table(Path(f"/dev/fd/{reads}"))) == EXPECTED
    os.close(reads)


def test_a_directory_is_read_as_parts_in_order_of_name(tmp_path):
    lines = CSV.splitlines()
    written(tmp_path, "\n".join([lines[0], *lines[1:3]]), "part-0.csv")
    written(tmp_path, "timestamp,user,item,action,value\n100,a,x,click,\n200,b,z,like,\n", "part-1.csv")
    for beside in ("_SUCCESS", ".part-0.csv.crc", ".hidden.csv"):
        written(tmp_path, "not a table", beside)
    (tmp_path / "_temporary").mkdir()
    assert rows_of(read_table(tmp_path)) == EXPECTED


def test_a_part_may_be_named_in_capitals(tmp_path):
    header, *lines = CSV.splitlines()
    for name, line in zip(("A.CSV", "b.csv", "c.CSV.GZ"), lines, strict=False):
        text = f"{header}\n{line}\n".encode()
        written(tmp_path, gzip.compress(text) if name.endswith("GZ") else text, name)
    as_parquet(tmp_path, "D.PARQUET", user=["b"], item=["z"], timestamp=[200], action=["like"], value=pa.array([None], pa.float64()))
    assert rows_of(read_table(tmp_path)) == EXPECTED


@pytest.mark.parametrize("name", [
    "b.csv.zip", "b.csv.bz2", "b.csv.lz4", "b.gz", "b.sql.gz", "b.jsonl", "b.ndjson", "b.JSON", "b.xlsx", "b.orc", "b.avro", "b.parq",
    "b.parquet.001", "events.csv.1", "part-00001", "part-00001.gz", "gone.csv",
])  # fmt: skip
def test_a_directory_with_what_is_no_part_is_refused_by_its_name_rather_than_read_in_part(tmp_path, name):
    written(tmp_path, CSV, "a.csv")
    (tmp_path / name).symlink_to("nowhere") if name == "gone.csv" else written(tmp_path, CSV, name)
    with pytest.raises(DataError, match=rf"{tmp_path} holds {re.escape(name)} beside the parts of a table, .*: unpack or convert"):
        read_table(tmp_path)


def test_files_about_a_table_are_passed_over_with_a_warning_that_names_them(tmp_path, caplog):
    written(tmp_path, CSV, "events.csv")
    beside = ["LICENSE", "README.md", "README.txt", "SHA256SUMS", "Thumbs.db", "events.csv.sha256", "events.csv~", "part-0.csv.crc"]
    for name in (*beside, ".DS_Store", "_SUCCESS"):
        written(tmp_path, "no rows", name)
    assert rows_of(read_table(tmp_path)) == EXPECTED
    assert caplog.messages == [f"{tmp_path}: passed over, as no parts of the table: {', '.join(beside)}"]


def test_a_directory_of_thousands_of_parts_is_gone_through_once(tmp_path, monkeypatch):
    """Were each name compared with each, it would be millions of comparisons."""
    for number in range(300):
        written(tmp_path, CSV, f"part-{number:03}.csv")
    compared = []
    monkeypatch.setattr(File, "__eq__", lambda one, other: compared.append(other) or str(one) == str(other))
    assert len(table_files(tmp_path)) == 300
    assert not compared


def test_a_table_s_directory_with_directories_is_refused_with_their_names(tmp_path):
    for day in ("day=1", "day=2"):
        (tmp_path / day).mkdir()
        written(tmp_path / day, CSV, "part-0.csv")
    with pytest.raises(DataError, match=r"holds no file whose .*; it holds day=1/, day=2/: .*; what is in directories is not read"):
        read_table(tmp_path)
    written(tmp_path, CSV, "a.csv")
    with pytest.raises(DataError, match=r"holds day=1/, day=2/ beside the parts of a table"):
        read_table(tmp_path)


@pytest.mark.parametrize("name", ["part-0.csv", "part-2.csv", "part-0.csv.gz"])
def test_a_part_without_a_byte_is_one_without_rows(tmp_path, name):
    written(tmp_path, CSV, "part-1.csv")
    written(tmp_path, gzip.compress(b"") if name.endswith(".gz") else b"", name)
    assert rows_of(read_table(tmp_path)) == EXPECTED


def test_a_directory_of_empty_files_is_refused_with_their_names(tmp_path):
    written(tmp_path, b"", "part-0.csv")
    written(tmp_path, gzip.compress(b""), "part-1.csv.gz")
    with pytest.raises(DataError, match=r"holds empty files only: part-0\.csv, part-1\.csv\.gz"):
        read_table(tmp_path)


def test_a_table_is_called_as_its_file_or_directory_however_that_is_written(tmp_path, monkeypatch):
    text = b"user_id,item_id,timestamp\nada,1,5\n"
    (tmp_path / "clicks" / ".older").mkdir(parents=True)
    (tmp_path / "clicks" / "part.csv").write_bytes(text)
    (tmp_path / "events.csv.gz").write_bytes(gzip.compress(text))
    monkeypatch.chdir(tmp_path / "clicks")
    paths = [tmp_path / "clicks", Path(), tmp_path / "clicks" / "part.csv", tmp_path / "events.csv.gz"]
    assert [read_table(path).name for path in paths] == ["clicks", "clicks", "part", "events"]
    monkeypatch.chdir(".older")
    assert read_table(Path("..")).name == "clicks"


def test_columns_and_actions_can_be_named(tmp_path):
    path = written(tmp_path, "who,what,when,how,user\na,x,5,buy,7\n")
    options = ReadOptions(columns=Columns(user="who", item="what", timestamp="when", action="how"), action_names={"buy": Action.PURCHASE})
    assert rows_of(read_table(path, options)) == [("a", "x", 5, Action.PURCHASE, None)]


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path):
    path = written(tmp_path, "who,item,timestamp\na,x,5\n")
    with pytest.raises(
        DataError, match=r"no column for the user: looked for user_id, user, userId; it has who, item, timestamp\. Name it with --user"
    ):
        read_table(path)
    with pytest.raises(DataError, match="no column 'sort' for the action"):
        read_table(path, ReadOptions(columns=Columns(user="who", action="sort")))
    with pytest.raises(DataError, match="several columns 'user'"):
        read_table(written(tmp_path, "user,user,item,timestamp\na,a,x,5\n"))
    with pytest.raises(DataError, match=r"it has user\^item\^timestamp\. Name it with --user-column, or say with --delimiter what"):
        read_table(written(tmp_path, "user^item^timestamp\na^x^5\n"))


@pytest.mark.parametrize(
    ("unit", "stamp", "expected"),
    [
        ("s", "1700000000", 1700000000),
        ("s", "1700000000.75", 1700000000),
        ("ms", "1700000000999", 1700000000),
        ("us", "1700000000999999", 1700000000),
        ("ns", "1700000000999999000", 1700000000),
        ("ns", "1700000000000000000", 1700000000),
        ("ns", "2023-11-14T22:13:20Z", 1700000000),
        ("s", " 1700000000 ", 1700000000),
        ("s", "2023-11-14T22:13:20Z", 1700000000),
        ("s", "2023-11-14 22:13:20", 1700000000),
        ("ms", "2023-11-14T23:13:20.5+01:00", 1700000000),
        ("s", "2023-11-14", 1699920000),
    ],
)
def test_timestamps_are_numbers_in_the_given_unit_or_iso_8601(tmp_path, unit, stamp, expected):
    path = written(tmp_path, f"user,item,timestamp\na,x,{stamp}\n")
    assert read_table(path, ReadOptions(timestamp_unit=TimestampUnit(unit))).interactions.timestamps.tolist() == [expected]


def test_nanoseconds_in_an_integer_column_of_parquet_are_those_of_text(tmp_path):
    stamps = [1_700_000_000_999_999_000, 1_700_000_000_123_456_789, 5]
    options = ReadOptions(timestamp_unit=TimestampUnit.NANOSECONDS)
    text = "user,item,timestamp\n" + "".join(f"a,i{stamp},{stamp}\n" for stamp in stamps)
    from_text = read_table(written(tmp_path, text), options)
    from_parquet = read_table(as_parquet(tmp_path, user=["a"] * 3, item=[f"i{stamp}" for stamp in stamps], timestamp=stamps), options)
    assert rows_of(from_text) == rows_of(from_parquet)
    assert from_text.interactions.timestamps.tolist() == [0, 1_700_000_000, 1_700_000_000]


@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_dates_written_as_numbers_are_refused_with_the_cure(tmp_path, kind):
    stamps = pa.array([20231114, 19991231, 20240229]).cast(kind)
    with pytest.raises(DataError, match=r"look like dates written as numbers, such as 20231114; write them as ISO dates, 2023-11-14"):
        read_table(as_parquet(tmp_path, user=["a", "b", "c"], item=["x"] * 3, timestamp=stamps))


@pytest.mark.parametrize(
    ("unit", "stamps", "iso"),
    [
        ("s", [202311142213, 199912310000], "2023-11-14T22:13:00"),
        ("s", [20231114221305, 19991231000000], "2023-11-14T22:13:05"),
        ("ms", [20231114, 19991231], "2023-11-14"),
        ("ms", [202311142213, 199912310000], "2023-11-14T22:13:00"),
        ("ms", [20231114221305, 19991231000000], "2023-11-14T22:13:05"),
        ("us", [20231114221305, 19991231000000], "2023-11-14T22:13:05"),
    ],
)
@pytest.mark.parametrize("kind", [pa.int64(), pa.string()])
def test_dates_with_a_time_and_of_other_units_are_refused_too(tmp_path, unit, stamps, iso, kind):
    path = as_parquet(tmp_path, user=["a", "b"], item=["x", "x"], timestamp=pa.array(stamps).cast(kind))
    with pytest.raises(DataError, match=rf"looks? like .*dates? written as .*number.*; write .* as .*ISO dates?, {iso}( |$)"):
        read_table(path, ReadOptions(timestamp_unit=TimestampUnit(unit)))


@pytest.mark.parametrize(("unit", "stamp"), [("ms", 1_700_000_000), ("us", 1_700_000_000_000), ("ns", 1_700_000_000_000_000)])
def test_timestamps_of_another_unit_than_the_one_said_are_refused_where_all_lie_in_1970(tmp_path, unit, stamp):
    path = written(tmp_path, f"user,item,timestamp\na,x,{stamp}\na,y,5\n")
    with pytest.raises(DataError, match=rf"in unit '{unit}' all timestamps lie in 1970, the latest on 1970-01-20; is another"):
        read_table(path, ReadOptions(timestamp_unit=TimestampUnit(unit)))


@pytest.mark.parametrize("stamps", [[20231114, 20231399], [20231114, 1_700_000_000], [20231114, 5], [202311142213, 202311142460]])
def test_seconds_that_only_look_like_dates_now_and_then_are_read(tmp_path, stamps):
    path = as_parquet(tmp_path, user=["a", "b"], item=["x", "x"], timestamp=stamps)
    assert read_table(path).interactions.timestamps.tolist() == stamps


def test_a_file_may_mix_ways_to_write_a_time(tmp_path):
    path = written(tmp_path, "user,item,timestamp\na,x,1700000003\na,y,2023-11-14T22:13:21Z\na,z,2023-11-14 22:13:22\n")
    assert read_table(path).interactions.timestamps.tolist() == [1700000001, 1700000002, 1700000003]


@pytest.mark.parametrize(
    ("unit", "stamp", "whole"),
    [
        ("s", "1.767232750E+09", True),
        ("s", "1.76723275E+09", True),
        ("s", "1.7672E+09", False),
        ("s", "2E+09", False),
        ("s", "1.76723275E9", True),  # of Java, which writes all digits that there are
        ("s", "1.76723275e+09", True),  # of R, which does so too
        ("ms", "1.76723E+12", False),
        ("ms", " 1.767232750E+12 ", True),
        ("ms", "1.76723275E+12", True),
        ("us", "1.76723275E+15", True),  # of .NET, which leaves zeros out at the end
        ("us", "1.76723E+15", False),
        ("ns", "1.767232750E+18", True),
        ("ns", "1.76723275E+18", True),
        ("ns", "1.76723E+18", False),
    ],
)
@pytest.mark.parametrize("how", ["csv", "parquet", "words"])
def test_a_time_that_a_spreadsheet_has_saved_must_have_its_digits_down_to_the_second(tmp_path, unit, stamp, whole, how):
    stamps = pa.array([stamp, stamp])
    if how == "csv":
        path = written(tmp_path, f"user,item,timestamp\na,x,{stamp}\na,y,{stamp}\n")
    else:
        path = as_parquet(tmp_path, user=["a", "a"], item=["x", "y"], timestamp=stamps if how == "parquet" else stamps.dictionary_encode())
    options = skipping(timestamp_unit=TimestampUnit(unit))
    if whole:
        assert read_table(path, options).interactions.timestamps.tolist() == [1767232750] * 2
        return
    written_out = f"{float(stamp):.0f}"
    told = rf"all rows are bad, .*timestamp '{re.escape(stamp)}' is written with an exponent .* if the time is exact, write {written_out}"
    with pytest.raises(DataError, match=told):
        read_table(path, options)
    path = written(tmp_path, f"user,item,timestamp\na,x,{written_out}\n")
    assert len(read_table(path, options).interactions) == 1


def test_times_that_are_floats_in_a_parquet_file_have_all_their_digits(tmp_path):
    path = as_parquet(tmp_path, user=["a", "", "b"], item=["x"] * 3, timestamp=[1.7e18, 1.7e18, 1.7e18])
    assert len(read_table(path, skipping(timestamp_unit=TimestampUnit.NANOSECONDS)).interactions) == 2


def test_ids_that_a_spreadsheet_has_saved_are_warned_of(tmp_path, caplog):
    items = written(tmp_path, "item,title\n4.00629E+12,Tea\nE+12,Milk\n", "items.csv")
    read_table(written(tmp_path, "user,item,timestamp\n1E+15,4.00629E+12,5\n1e5,E+12,6\n"), ReadOptions(items=items))
    told = "has ids as spreadsheets save long numbers, such as {!r}; if digits are lost, format the column as a number without decimals"
    assert [told.format(text) in message for message, text in zip(caplog.messages, ["4.00629E+12", "1E+15"], strict=True)] == [True, True]


def test_events_within_a_second_keep_the_order_of_their_fractions(tmp_path):
    path = written(
        tmp_path, "user,item,timestamp\na,late,1700000005900\na,early,1700000005100\na,tie1,1700000005500\na,tie2,1700000005500\n"
    )
    dataset = read_table(path, ReadOptions(timestamp_unit=TimestampUnit.MILLISECONDS))
    assert [item for _, item, *_ in rows_of(dataset)] == ["early", "tie1", "tie2", "late"]


BAD = [
    ("a,x,abc,view,", "timestamp 'abc' is neither a number nor an ISO-8601 time"),
    ("a,x,,view,", "timestamp ''"),
    ("a,x,nan,view,", "timestamp 'nan'"),
    ("a,x,-5,view,", "timestamp '-5' is not a time since 1970"),
    ("a,x,0x1F,view,", "timestamp '0x1F'"),
    ("a,x,1_000,view,", "timestamp '1_000' is neither a number nor an ISO-8601 time"),
    ("a,x,1960-01-01,view,", "timestamp '1960-01-01' lies before 1970"),
    (
        "a,x,1.76723E+09,view,",
        "timestamp '1.76723E+09' is written with an exponent and few digits, and others may be lost; format the column",
    ),
    ("a,x,1.76723E+12,view,", "timestamp '1.76723E+12' is written with an exponent and few digits"),
    ('a,x,"1,8E+12",view,', "and save it again, or, if the time is exact, write 1800000000000"),
    ("a,x,1700000000000,view,", "lies after the year 9999 in unit 's'"),
    (",x,5,view,", "the user id is empty"),
    ("a, ,5,view,", "the item id is empty but for blanks"),
    ('"\t",x,5,view,', "the user id is empty but for blanks"),
    ("a,x,5,stare,", "unknown action 'stare'; the known ones are view, click"),
    ("a,x,5,,", "unknown action ''"),
    ("a,x,5,view,nan", "value 'nan' is not a finite number"),
    ("a,x,5,view,-inf", "value '-inf' is not a finite number"),
    (
        "a,x,5,view,1000000000001",
        "value '1000000000001' is of a larger amount than 1e+12, the most that a request may carry; give it in a larger unit",
    ),
    ("a,x,5,view,-3.4e38", "value '-3.4e38' is of a larger amount than 1e+12, the most that a request may carry"),
    ("a,x,5,view,much", "value 'much' is not a number"),
    ("a,x,5,view,1_0.5", "value '1_0.5' is not a number"),
    ("a,x,5", "3 fields where there should be 5"),
    ("a,x,5,view,1,2", "6 fields where there should be 5"),
    ("a,\udcff,5,view,", "byte 3 of the line, 0xff, is not utf-8"),
    ('a,"x,5,view,', "a quotation mark is opened and never closed"),
]


@pytest.mark.parametrize(("row", "cause"), BAD)
def test_a_bad_row_of_a_csv_names_its_file_line_and_cause_and_can_be_skipped(tmp_path, row, cause):
    lines = CSV.splitlines()
    path = written(tmp_path, "\n".join([*lines[:3], row, *lines[3:]]).encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError) as caught:
        read_table(path)
    assert str(caught.value).startswith(f"{path}:4: ")
    assert cause in str(caught.value)
    assert "--skip-bad-rows" in str(caught.value)
    dataset = read_table(path, skipping())
    assert rows_of(dataset) == EXPECTED
    assert dataset.skipped_rows == 1


BAD_VALUES = [
    ("timestamp", None, "timestamp ''"),
    ("timestamp", -1.0, "timestamp '-1.0'"),
    ("timestamp", float("nan"), "timestamp ''"),
    ("user", None, "the user id is empty"),
    ("item", "", "the item id is empty"),
    ("action", "stare", "unknown action 'stare'"),
    ("action", None, "unknown action ''"),
    ("value", float("inf"), "value 'inf' is not a finite number"),
    ("value", -1.1e12, "value '-1100000000000.0' is of a larger amount than 1e+12"),
]


@pytest.mark.parametrize(("column", "value", "cause"), BAD_VALUES)
def test_a_bad_row_of_a_parquet_file_names_its_row_and_cause_and_can_be_skipped(tmp_path, column, value, cause):
    row = {"user": "a", "item": "x", "timestamp": 5.0, "action": "view", "value": 1.0}
    table = pa.Table.from_pylist([row, row, row | {column: value}, row])
    pq.write_table(table, tmp_path / "e.parquet")
    with pytest.raises(DataError, match=r"e\.parquet:3: ") as caught:
        read_table(tmp_path / "e.parquet")
    assert cause in str(caught.value)
    dataset = read_table(tmp_path / "e.parquet", skipping())
    assert (len(dataset.interactions), dataset.skipped_rows) == (3, 1)


@pytest.mark.parametrize("column", ["user", "item", "timestamp", "action", "value"])
def test_a_text_of_a_parquet_file_that_is_no_utf_8_makes_a_bad_row(tmp_path, column):
    rows = {"user": ["a", "b"], "item": ["x", "y"], "timestamp": ["5", "6"], "action": ["view", "like"], "value": ["1", "2"]}
    spoilt = pa.array([rows[column][0].encode(), b"a\xff"]).view(pa.string())
    path = as_parquet(tmp_path, **rows | {column: spoilt})
    with pytest.raises(DataError, match=rf"events\.parquet:2: byte 2 in column '{column}', 0xff, is not utf-8 \(--skip-bad-rows"):
        read_table(path)
    dataset = read_table(path, skipping())
    assert (rows_of(dataset), dataset.skipped_rows) == ([("a", "x", 5, Action.VIEW, 1)], 1)


def test_a_title_of_a_parquet_file_that_is_no_utf_8_makes_a_bad_row(tmp_path):
    items = as_parquet(tmp_path, "items.parquet", id=["x", "y"], title=pa.array([b"\xff", b"Y"]).view(pa.string()))
    with pytest.raises(DataError, match=r"items\.parquet:1: byte 1 in column 'title', 0xff, is not utf-8"):
        read_items(items, ReadOptions())
    assert read_items(items, skipping()) == [Item("y", "Y", {})]


@pytest.mark.parametrize("column", ["timestamp", "value"])
def test_a_truth_value_in_a_parquet_file_is_no_number_whether_another_row_is_bad_or_not(tmp_path, column):
    table = {"user": ["a", "b"], "item": ["x", "y"], "timestamp": [5, 6], "value": [1, 2]}
    for users in (["a", "b"], ["a", ""]):
        path = as_parquet(tmp_path, **(table | {"user": users, column: [True, False]}))
        with pytest.raises(DataError, match=rf"events\.parquet:1: {column} 'True' is n"):
            read_table(path)


@pytest.mark.parametrize("how", ["csv", "parquet"])
@pytest.mark.parametrize(
    ("wrong", "cause"),
    [("x" * 257, "'xxxxxxxxxxxxxxxxxxxx'... has 257 characters, and a request can name 256 at most"), ("a\0", "'a.x00' holds")],
)
@pytest.mark.parametrize("kind", ["user", "item"])
def test_an_id_that_no_request_could_name_is_a_bad_row(tmp_path, how, kind, wrong, cause):
    table = {"user": ["é" * 256, "b"], "item": ["x", "y" * 256], "timestamp": ["5", "6"]}
    table[kind].append(wrong)
    table = {name: (column * 2)[:3] for name, column in table.items()}
    text = "\n".join(",".join(row) for row in [tuple(table), *zip(*table.values(), strict=True)])
    path = written(tmp_path, text) if how == "csv" else as_parquet(tmp_path, **table)
    with pytest.raises(DataError, match=rf"events\.{how}:{4 if how == 'csv' else 3}: the {kind} id {cause}"):
        read_table(path)
    assert len(read_table(path, skipping()).interactions) == 2


def test_an_item_that_no_request_could_name_is_a_bad_row_of_an_item_table(tmp_path):
    items = written(tmp_path, f"id,title\n{'x' * 257},A\nx,An X\n", "items.csv")
    with pytest.raises(DataError, match=r"items\.csv:2: the item id .* has 257 characters"):
        read_items(items, ReadOptions())
    assert [item.title for item in read_items(items, skipping())] == ["An X"]


def test_parquet_times_python_cannot_hold_are_bad_rows(tmp_path):
    path = as_parquet(tmp_path, user=["a", "a"], item=["x", "x"], timestamp=pa.array([10**18, 5 * 10**6], pa.timestamp("us")))
    with pytest.raises(DataError, match=r"events\.parquet:1: timestamp '.*' is neither"):
        read_table(path)
    assert read_table(path, skipping()).interactions.timestamps.tolist() == [5]


@pytest.mark.parametrize("zone", [None, "UTC", "Europe/Berlin"])
@pytest.mark.parametrize("seconds", [2**64 // 10**6 + 1_700_000_000, 65_536 * 31_556_952 + 1_700_000_000], ids=["wraps", "year"])
@pytest.mark.parametrize("unit", [("s", 1), ("ms", 1000), ("us", 10**6)], ids=lambda unit: unit[0])
def test_a_parquet_time_that_no_64_bits_of_microseconds_or_16_of_years_hold_is_a_bad_row(tmp_path, unit, seconds, zone):
    far = min(seconds * unit[1], 2**63 - 1)
    times = pa.array([far, 5 * unit[1]], pa.timestamp(unit[0], tz=zone))
    options = skipping()
    dataset = read_table(as_parquet(tmp_path, user=["a", "a"], item=["x", "x"], timestamp=times), options)
    assert dataset.interactions.timestamps.tolist() == [5]
    assert re.search("timestamp '.*' is neither a number nor an ISO-8601 time", options.on_bad_row.first[0])


def test_a_parquet_date_hundreds_of_thousands_of_years_away_is_a_bad_row(tmp_path):
    days = pa.array([2**64 // (86_400 * 10**6) + 19_000, 1], pa.int32()).cast(pa.date32())
    path = as_parquet(tmp_path, user=["a", "a"], item=["x", "x"], timestamp=days)
    assert read_table(path, skipping()).interactions.timestamps.tolist() == [86_400]


@pytest.mark.parametrize("how", ["csv", "parquet"])
def test_bad_rows_far_apart_in_a_long_file_keep_their_numbers_and_cost_no_good_row(tmp_path, how):
    bad = {0, 1, 777, 10_000, 49_999}
    rows = [
        ("u" if number in bad else f"u{number % 7}", f"i{number % 11}", "no" if number in bad else str(number)) for number in range(50_000)
    ]
    if how == "csv":
        text = 'note,user,item,timestamp\n"two\nlines, \udcf6",u,i,5\n' + "".join(
            f'"{number} \udcf6",{",".join(row)}\n' for number, row in enumerate(rows)
        )
        path, first = written(tmp_path, text.encode(errors="surrogateescape")), 4
    else:
        path, first = as_parquet(tmp_path, **dict(zip(["user", "item", "timestamp"], zip(*rows, strict=True), strict=True))), 1
    options = skipping()
    dataset = read_table(path, options)
    assert dataset.skipped_rows == 5
    assert [int(problem.split(":")[1]) - first for problem in options.on_bad_row.first] == sorted(bad)
    kept = sorted(int(time) for time in dataset.interactions.timestamps)
    assert kept == sorted([number for number in range(50_000) if number not in bad] + [5] * (how == "csv"))


def test_only_the_first_few_bad_rows_are_kept_but_all_are_counted(tmp_path):
    options = skipping()
    dataset = read_table(written(tmp_path, CSV + "bad\n" * 20), options)
    assert (dataset.skipped_rows, len(options.on_bad_row.first)) == (20, 5)


def test_a_stray_quotation_mark_costs_its_own_line_only(tmp_path):
    path = written(tmp_path, 'user,item,timestamp\na,x,1\n"a,x,2\na,x,3\na,"x",4\n"a,x,5\na,x,6\n')
    dataset = read_table(path, skipping())
    assert dataset.interactions.timestamps.tolist() == [1, 3, 4, 6]
    assert dataset.skipped_rows == 2


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_two_stray_quotation_marks_cost_their_own_lines_only_however_far_apart_they_stand(tmp_path, line_end):
    between, behind = (f"u,i,{time},good" for time in range(2, 252)), (f"u,i,{time},good" for time in range(253, 263))
    lines = ["user,item,timestamp,note", 'a,x,1,"x', *between, 'b,y,252,"y', *behind]
    dataset = read_table(written(tmp_path, line_end.join(lines)), skipping())
    assert (len(dataset.interactions), dataset.skipped_rows) == (260, 2)


def test_a_quoted_field_may_hold_line_ends_and_later_bad_rows_keep_their_line_number(tmp_path):
    path = written(tmp_path, 'user,item,timestamp,review\na,x,1,"fine,\nreally ""fine"""\na,y,2,\na,z,oops,\n')
    with pytest.raises(DataError, match=r"events\.csv:5: timestamp 'oops'"):
        read_table(path)
    assert rows_of(read_table(path, skipping()))[0][1] == "x"


@pytest.mark.parametrize("content", [b"", b"\n", b"user,item,timestamp\n", b"\xff\xfeu\x00"])
def test_a_file_without_a_header_or_events_is_refused(tmp_path, content):
    with pytest.raises(DataError, match=r"events\.csv"):
        read_table(written(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "cure"),
    [
        (CSV.encode("utf-16"), "save the file as utf-8"),
        (CSV.replace("\n", "\r\n").encode("utf-16"), "save the file as utf-8"),
        (gzip.compress(CSV.encode(), mtime=0x0D), "a name that ends in .gz"),
    ],
)
def test_a_file_that_is_no_utf_8_is_refused_with_the_cure(tmp_path, content, cure):
    with pytest.raises(DataError, match=rf"events\.csv:1: byte . of the line, 0x.., is not utf-8; .*{re.escape(cure)}"):
        read_table(written(tmp_path, content))


def test_what_is_not_parquet_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"events\.parquet cannot be read"):
        read_table(written(tmp_path, "user,item", "events.parquet"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no file whose name ends in"):
        read_table(tmp_path / "empty")
    with pytest.raises(DataError, match="--path"):
        read_table()


@pytest.mark.parametrize("bad_row", [False, True])
def test_nan_in_a_column_of_floats_is_a_value_that_is_missing(tmp_path, bad_row):
    values = {
        "user": ["a", "a", "" if bad_row else "b"],
        "item": ["x", "y", "z"],
        "timestamp": [1, 2, 3],
        "value": [float("nan"), 2.5, None],
    }
    for kind in (pa.float64(), pa.float32()):
        rows = rows_of(read_table(as_parquet(tmp_path, **values | {"value": pa.array(values["value"], kind)}), skipping()))
        assert [value for *_, value in rows] == [None, 2.5, *([] if bad_row else [None])]


def test_a_column_with_a_usual_name_can_be_left_out(tmp_path):
    path = written(tmp_path, "user;item;timestamp;event;rating\na;x;5;stare;12,30\na;y;6;;7,5\n")
    with pytest.raises(DataError, match=r"unknown action 'stare'.*--action-column none leaves the column out"):
        read_table(path)
    with pytest.raises(DataError, match=r"value '12,30' is not a number; --value-column none leaves the column out"):
        read_table(path, ReadOptions(columns=Columns(action="none")))
    dataset = read_table(path, ReadOptions(columns=Columns(action="none", value="none")))
    assert rows_of(dataset) == [("a", "x", 5, Action.VIEW, None), ("a", "y", 6, Action.VIEW, None)]


@pytest.mark.parametrize(("first", "second"), [("action", "Action"), ("Action", "event")])
def test_a_part_of_a_table_without_the_actions_of_another_is_refused(tmp_path, first, second):
    for name, column in (("a.csv", first), ("b.csv", second)):
        written(tmp_path, f"user,item,timestamp,{column}\na,x,5,like\n", name)
    with pytest.raises(DataError, match=r"[ab]\.csv has a column '\w+' for the action, and .*[ab]\.csv, a part .*--action-column none"):
        read_table(tmp_path)
    assert len(read_table(tmp_path, ReadOptions(columns=Columns(action="none"))).interactions) == 2


def test_a_part_of_a_table_without_values_is_one_of_empty_values(tmp_path):
    written(tmp_path, "user,item,timestamp\na,x,5\n", "clicks.csv")
    written(tmp_path, "user,item,timestamp,rating\na,y,6,4\n", "ratings.csv")
    assert rows_of(read_table(tmp_path)) == [("a", "x", 5, Action.VIEW, None), ("a", "y", 6, Action.VIEW, 4)]


@pytest.mark.parametrize("names", [("a.csv", "b.csv", "c.csv"), ("c.csv", "a.csv", "b.csv")])
def test_a_column_of_values_that_is_named_is_in_some_part_of_a_table(tmp_path, names):
    options = ReadOptions(columns=Columns(value="stars"))
    for name, column in zip(names, ("stars", "value", "note"), strict=True):
        written(tmp_path, f"user,item,timestamp,{column}\n{name[0]},x,5,4\n", name)
    assert {user: value for user, *_, value in rows_of(read_table(tmp_path, options))} == {
        name[0]: 4 if name == names[0] else None for name in names
    }
    (tmp_path / names[0]).unlink()
    with pytest.raises(
        DataError, match=r"[ab]\.csv has no column 'stars' for the value; it has user, item, timestamp, (value|note)\. Name it"
    ):
        read_table(tmp_path, options)


def test_a_column_of_values_that_no_part_has_is_told_before_a_row_is_read(tmp_path):
    for name in ("a.csv", "b.csv"):
        written(tmp_path, "user,item,timestamp,value\nu,x,no time,4\n", name)
    with pytest.raises(DataError, match=r"a\.csv has no column 'stars' for the value"):
        read_table(tmp_path, ReadOptions(columns=Columns(value="stars")))


def test_an_item_table_of_other_ids_than_the_events_is_refused(tmp_path):
    items = written(tmp_path, "id,title\n50,Fifty\n51,Next\n", "items.csv")
    path = written(tmp_path, "user,item,timestamp\na,50.0,5\na,51.0,6\n")
    with pytest.raises(
        DataError, match=r"2 of 2 events of .* items that .*items\.csv does not list, such as '50\.0', '51\.0'; it lists '50', '51'"
    ):
        read_table(path, ReadOptions(items=items))


def test_events_most_of_which_are_of_items_that_the_table_lacks_are_warned_of(tmp_path, caplog):
    items = written(tmp_path, "id,title\n7,Seven\n8,Eight\n", "items.csv")
    read_table(written(tmp_path, "user,item,timestamp\na,7,5\na,8,6\na,008,7\n"), ReadOptions(items=items))
    assert caplog.text == ""
    read_table(written(tmp_path, "user,item,timestamp\na,7,5\na,007,6\na,008,7\n"), ReadOptions(items=items))
    assert "2 of 3 events of" in caplog.text
    assert "does not list, such as '007', '008'; it lists '7', '8'" in caplog.text


def test_titles_in_bytes_are_text_and_nan_is_nothing(tmp_path, caplog):
    titles, prices = pa.array([b"caf\xc3\xa9", b"", None]), pa.array([1.5, float("nan"), None])
    items = as_parquet(tmp_path, "items.parquet", id=["x", "y", "z"], title=titles, price=prices, tags=[[b"a", b"b"], [], None])
    assert read_items(items, ReadOptions()) == [Item("x", "café", {"price": "1.5", "tags": "a|b"}), Item("y", "y", {}), Item("z", "z", {})]
    assert caplog.text == ""
    pictures = pa.array([b"\xff\xd8", b"good"])
    spoilt = as_parquet(tmp_path, "items.parquet", id=["x", "y"], title=["X", "Y"], picture=pictures)
    assert read_items(spoilt, ReadOptions()) == [Item("x", "X", {}), Item("y", "Y", {"picture": "good"})]
    assert "column 'picture' holds bytes that are no UTF-8 text, and are read as empty" in caplog.text


def test_a_column_of_bytes_that_are_no_text_is_told_once_a_file_and_not_once_a_block(tmp_path, caplog):
    ids = list(map(str, range(20_000)))
    for part in range(2):
        as_parquet(
            tmp_path, f"{part}.parquet", id=[f"{part}-{one}" for one in ids], picture=[b"\xff"] * len(ids), sound=[b"\xfe"] * len(ids)
        )
    assert len(read_items(tmp_path, ReadOptions(item_columns=ItemColumns(title="id")))) == 2 * len(ids)
    told = [re.findall("column '([a-z]+)' holds bytes", record.getMessage()) for record in caplog.records]
    assert told == [["picture"], ["sound"]] * 2


@pytest.mark.parametrize("how", ["csv", "quoted", "careful", "parquet"])
def test_ids_keep_their_blanks_which_are_warned_of(tmp_path, caplog, how):
    times = ["5", "2020-01-01T00:00:00+00:00" if how == "careful" else "6"]
    columns = {"user": ["ada ", "bob"], "timestamp": times, "item": ["P-1   ", " P-2"]}
    quoting = csv.QUOTE_ALL if how == "quoted" else csv.QUOTE_MINIMAL
    text = io.StringIO()
    csv.writer(text, quoting=quoting).writerows([tuple(columns), *zip(*columns.values(), strict=True)])
    path = as_parquet(tmp_path, **columns) if how == "parquet" else written(tmp_path, text.getvalue())
    items = written(tmp_path, "item,title\n P-2, Two\nP-3 ,\n", "items.csv")
    dataset = read_table(path, ReadOptions(items=items))
    assert dataset.interactions.user_ids == ["ada ", "bob"]
    assert list(dataset.catalogue.items) == [Item(" P-2", "Two"), Item("P-3 ", "P-3 "), Item("P-1   ", "P-1   ")]
    told = "{} has ids with blanks around them, such as {!r}, which requests must name with the blanks; or cut them when "
    assert all(message.startswith(told.format(*of)) for message, of in zip(caplog.messages, [(items, " P-2"), (path, "ada ")], strict=True))


@pytest.mark.parametrize("line_end", ["\r\n", "\r\r\n", "\r"])
def test_no_carriage_return_of_a_line_s_end_is_part_of_an_id(tmp_path, line_end):
    path = written(tmp_path, f"user,timestamp,item\r\na,5,x\r\nb,6,y{line_end}")
    assert [item.item_id for item in read_table(path).catalogue.items] == ["x", "y"]


ITEMS = 'sku,name,brand,blurb\ny,Yellow,Acme,"soft,\nwarm"\nx,,,\nq,Unsold,Acme,\n'


def test_the_item_table_gives_order_titles_and_attributes_and_unlisted_items_follow(tmp_path):
    items = written(tmp_path, ITEMS, "items.csv")
    dataset = read_table(written(tmp_path, CSV), ReadOptions(items=items, item_columns=ItemColumns(id="sku")))
    assert list(dataset.catalogue.items) == [
        Item("y", "Yellow", {"brand": "Acme", "blurb": "soft,\nwarm"}),
        Item("x", "x", {}),
        Item("q", "Unsold", {"brand": "Acme"}),
        Item("z", "z", {}),
    ]
    assert rows_of(dataset) == EXPECTED


def test_an_item_table_without_a_column_of_titles_is_warned_of_once_with_its_columns_and_the_option_that_names_one(tmp_path, caplog):
    for name in "ab":
        written(tmp_path, f"sku,label,shelf\n{name},Big {name},tea\n", f"{name}.csv")
    untitled, titled = (ReadOptions(item_columns=ItemColumns(id="sku", title=title)) for title in (None, "label"))
    assert [item.title for item in read_items(tmp_path, titled)] == ["Big a", "Big b"]
    assert caplog.messages == []
    assert [item.title for item in read_items(tmp_path, untitled)] == ["a", "b"]
    looked = "looked for title, name, movie_title; it has sku, label, shelf: ids are the titles; name the column with --item-title-column"
    assert caplog.messages == [f"{tmp_path / 'a.csv'} has no column for the title: {looked}"]


@pytest.mark.parametrize(
    ("header", "cures"),
    [
        ("user_id,item_id,timestamp,rating", "give --default-action rating where 'rating' has ratings"),
        ("user_id,item_id,timestamp,feedback_type", "name the column with --action-column, or give --default-action view"),
        ("user_id,item_id,timestamp,rating,kind", "name the column with --action-column, or give --default-action rating"),
    ],
)
def test_a_table_whose_actions_are_not_found_is_warned_of_once_with_what_to_give(tmp_path, caplog, header, cures):
    row = ",".join(["1", "7", "5", "4", "3"][: header.count(",") + 1])
    for name in ("a.csv", "b.csv"):
        written(tmp_path, f"{header}\n{row}\n", name)
    told = {action for *_, action, _ in rows_of(read_table(tmp_path))}
    assert told == {Action.VIEW}
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path / 'a.csv'} has no column for the action: looked for action, event, event_type; it has user_id")
    assert f"{header.replace(',', ', ')}: every event is a view" in message
    assert cures in message
    last = header.split(",")[-1]
    for options in (ReadOptions(default_action=Action.VIEW), ReadOptions(default_action=Action.RATING),
                    ReadOptions(columns=Columns(action="none")),
                    ReadOptions(columns=Columns(action=last), action_names={row[-1]: Action.CLICK})):  # fmt: skip
        read_table(tmp_path, options)
    assert len(caplog.messages) == 1


def test_a_table_of_users_items_and_times_alone_has_no_action_to_be_named(tmp_path, caplog):
    read_table(written(tmp_path, "user_id,item_id,timestamp,\n1,7,5,0\n"))
    assert caplog.messages == []


def test_an_item_table_of_ids_alone_has_no_title_to_be_named(tmp_path, caplog):
    assert read_items(written(tmp_path, "id\nx\n", "items.csv"), ReadOptions()) == [Item("x", "x", {})]
    assert caplog.messages == []


def test_the_item_table_may_be_parquet_with_numbers_and_lists(tmp_path):
    items = as_parquet(tmp_path, "items.parquet", id=[2, 1], title=["Two", "One"], genres=[["a", "b"], None], price=[1.5, None])
    path = written(tmp_path, "user,item,timestamp\nu,1,5\n")
    catalogue = read_table(path, ReadOptions(items=items)).catalogue
    assert list(catalogue.items) == [Item("2", "Two", {"genres": "a|b", "price": "1.5"}), Item("1", "One", {})]


def test_a_column_without_a_name_is_no_attribute(tmp_path):
    path = written(tmp_path, "user,item,timestamp\nu,1,5\n")
    as_csv = written(tmp_path, ",id,title,brand\n0,1,One,Acme\n", "items.csv")
    as_pandas_writes = as_parquet(tmp_path, "items.parquet", id=["1"], title=["One"], brand=["Acme"], __index_level_0__=[17])
    for items in (as_csv, as_pandas_writes):
        assert list(read_table(path, ReadOptions(items=items)).catalogue.items) == [Item("1", "One", {"brand": "Acme"})]


def test_a_quoted_field_longer_than_is_read_is_told_as_that(tmp_path):
    items = written(tmp_path, f'item_id,title,text\ny,Y,"{"x" * 9_000_000}"\n', "items.csv")
    with pytest.raises(DataError, match=r"items\.csv:2: a field is longer than 8 MiB; cut it \("):
        read_items(items, ReadOptions())


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("y,Again,,", "item 'y' is listed a second time"),
        (" ,Blank,,", "the item id is empty but for blanks"),
        ("w,Short", "2 fields where there should be 4"),
    ],
)
def test_a_bad_row_of_an_item_table_names_its_file_line_and_cause(tmp_path, row, cause):
    items = written(tmp_path, ITEMS + row + "\n", "items.csv")
    path = written(tmp_path, CSV)
    with pytest.raises(DataError, match=rf"items\.csv:6: {cause}"):
        read_table(path, ReadOptions(items=items, item_columns=ItemColumns(id="sku")))
    dataset = read_table(path, skipping(items=items, item_columns=ItemColumns(id="sku")))
    assert (len(dataset.catalogue), dataset.skipped_rows) == (4, 1)


ids = st.text(st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from('",;\n '), min_size=1, max_size=6).filter(str.strip)
events = st.tuples(
    ids,
    ids,
    # between these, alone, they would be taken for dates
    st.integers(0, 19_000_100) | st.integers(21_001_232, 190_001_009_999) | st.integers(210_012_312_360, 253_402_300_799),
    st.sampled_from(Action),
    st.none() | st.floats(-LARGEST_VALUE, LARGEST_VALUE),
)


def in_dataset_order(rows):
    order = {user: number for number, user in reversed(list(enumerate(row[0] for row in rows)))}
    return sorted(rows, key=lambda row: (order[row[0]], row[2]))


@given(st.lists(events, min_size=1, max_size=30), st.sampled_from(["csv", "iso", "parquet"]))
def test_what_is_written_is_read_back(tmp_path_factory, rows, how):
    folder = tmp_path_factory.mktemp("round")
    names = ["user_id", "item_id", "timestamp", "action", "value"]
    if how == "parquet":
        path = as_parquet(folder, **dict(zip(names, zip(*rows, strict=True), strict=True)))
    else:
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(names)
        for user, item, time, action, value in rows:
            stamp = datetime.fromtimestamp(time, UTC).isoformat() if how == "iso" else time
            writer.writerow([user, item, stamp, action, "" if value is None else repr(value)])
        path = written(folder, text.getvalue())
    assert rows_of(read_table(path, ReadOptions(delimiter=None if how == "parquet" else ","))) == in_dataset_order(rows)


@pytest.mark.parametrize(
    "actions",
    [
        pa.array(["like", None, "", "view"]),
        pa.array(["like", None, None, "view"], pa.large_string()),
        pa.DictionaryArray.from_arrays(pa.array([1, None, 0, 0]), pa.array(["view", "like", "stare"])),
    ],
)
def test_actions_that_are_empty_or_have_a_word_that_no_row_has_are_not_read_row_by_row(tmp_path, monkeypatch, actions):
    path = as_parquet(tmp_path, user=["a"] * 4, item=["x"] * 4, timestamp=[1, 2, 3, 4], action=actions)
    with pytest.raises(DataError, match=r"events\.parquet:2: unknown action ''"):
        read_table(path)
    monkeypatch.setattr(EventCollector, "_careful", lambda *_: pytest.fail("read row by row"))
    dataset = read_table(path, ReadOptions(action_names={"": Action.VIEW}))
    assert [action for *_, action, _ in rows_of(dataset)] == [Action.LIKE, Action.VIEW, Action.VIEW, Action.VIEW]


def test_coded_words_that_refer_to_none_are_refused():
    words = pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array([], pa.string()), safe=False)
    damaged = SimpleNamespace(num_row_groups=1, iter_batches=lambda **_: [pa.record_batch({"action": words})])
    with pytest.raises(pa.ArrowInvalid, match="out of bounds"):
        list(parquet_blocks(damaged, ["action"]))


class OnlyRows:
    """A block the fast pass cannot read."""

    def __init__(self, block):
        self.rows = block.rows

    def columns(self, wanted):
        raise pa.ArrowInvalid("not this way")

    def pieces(self):
        return [self]


def collected(text, block_bytes, wrap=lambda block: block, unit=TimestampUnit.SECONDS, value=3):
    bad = BadRows(skip=True)
    collector = EventCollector(EventFormat(4, user=0, item=1, timestamp=2, value=value, unit=unit), [], bad)
    reader = TextReader(io.BytesIO(text), "text", TextFormat(",", quoted=True), block_bytes)
    for block in reader.blocks(4, range(4 if value else 3)):
        collector.add(wrap(block), "text")
    try:
        found = collector.interactions("text")
    except DataError:
        return bad.count, bad.first
    columns = (found.offsets, found.items, found.timestamps, found.values)
    return (
        bad.count,
        bad.first,
        found.user_ids,
        [column.tolist() for column in columns if not np.isnan(column).any()],
        collector.unlisted_items(),
    )


fields = st.sampled_from(
    ["a", "b ", '" c"', '"d" ', " ", '"a,\nb"', '"say ""x"""', 'in"ch', '"', "1", " 2", "3.5", "2020-01-01", "nan", "0x1F", "", "+4", "1e3"]
)
lines = st.lists(fields, min_size=3, max_size=5).map(",".join) | st.tuples(fields, fields, st.just("7"), st.just("1")).map(",".join)


times = st.sampled_from(
    ["1", " 2", "3.5", "4.0 ", "2020-01-01", "2020-01-01 10:00:00.25", "2020-01-01T10:00:00+02:00", "+4", "1e3", " 1E+00", "1.2E+03", "09"]
)
good = st.tuples(
    st.sampled_from(["a", "b ", '" b"', '"b" ', '"a,\nb"', '"a\r\nb"', '"say ""x"""', 'in"ch', "é", "NA", "null", "a\rb"]),
    st.sampled_from(["x", "x ", '"x "']),
    times,
    st.just(""),
).map(",".join)


@given(st.lists(good, max_size=6) | st.lists(lines, max_size=8), st.sampled_from(["\n", "\r\n"]))
@example(['a,a,1,"'], "\n")
@example(['a,in"ch,1,"'], "\n")
def test_the_fast_and_the_careful_pass_agree(rows, line_end):
    text = line_end.join(rows).encode()
    assert collected(text, 1 << 20) == collected(text, 1 << 20, OnlyRows)


notes = st.sampled_from(["", "K\udcf6ln", '"K\udcf6ln,\n\udcff"', "\udcc3", '\udcf6 27" screen', '"\udcf6'])


@given(st.lists(st.tuples(st.sampled_from(["a", "a", "K\udcf6ln"]), st.just("x"), times, notes).map(",".join), max_size=6))
@example(["a,x,1,K\udcf6ln"])
def test_the_fast_and_the_careful_pass_agree_on_bytes_that_are_no_text(rows):
    text = "\n".join(rows).encode(errors="surrogateescape")
    for value in (None, 3):
        assert collected(text, 1 << 20, value=value) == collected(text, 1 << 20, OnlyRows, value=value)


def test_the_fast_and_the_careful_pass_agree_on_a_very_long_field():
    text = f'a,x,"{" " * 200_000}5",1\n'.encode()
    assert collected(text, 1 << 20)[0] == 0
    assert collected(text, 1 << 20) == collected(text, 1 << 20, OnlyRows)


@pytest.mark.parametrize(("lines", "bad"), [(199, 0), (200, 0), (201, 2), (300, 2)])
@pytest.mark.parametrize("good", [0, 500])
def test_the_fast_and_the_careful_pass_agree_on_a_field_of_many_lines(lines, bad, good):
    field, rest = "\n" * (lines - 1), "b,y,6,1\n\n" * good
    text = f'a,"{field}x",5,1\n{rest}c,z,7,1\n'.encode()
    assert collected(text, 1 << 20)[0] == bad
    assert collected(text, 1 << 20) == collected(text, 1 << 20, OnlyRows)


stamps = st.one_of(st.integers(0, 2**64), st.floats(0, 1e22).map(repr), st.integers(10**18, 2 * 10**18).map(lambda n: f" {n}.5"))


@given(st.lists(stamps, min_size=1, max_size=5), st.sampled_from(TimestampUnit))
def test_the_fast_and_the_careful_pass_agree_on_numbers_in_every_unit(numbers, unit):
    text = "".join(f"a,x{row},{number},1\n" for row, number in enumerate([*numbers, "2020-01-01"])).encode()
    assert collected(text, 1 << 20, unit=unit) == collected(text, 1 << 20, OnlyRows, unit=unit)


@given(st.lists(st.tuples(ids, ids, st.integers(0, 9999), st.integers(0, 5)), min_size=1, max_size=20), st.integers(1, 200))
@example([("0", "0\n0", 0, 0)], 1)
def test_the_size_of_a_block_makes_no_difference(rows, block_bytes):
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    content = text.getvalue().encode()
    assert collected(content, block_bytes) == collected(content, 1 << 20)


unquoted = st.sampled_from(["a", 'a 27" screen', '27"', "6' 2\"", 'in"ch,x', '"q"', '"two\nlines"', '"say ""x"", or\n""y"""', '"a,\n""b"'])


@given(st.lists(st.tuples(unquoted, unquoted), min_size=1, max_size=20), st.integers(1, 200))
@example([('a 27" screen', "a"), *[("a", '"two\nlines"')] * 20], 40)
@example([("a", "a"), ('27"', "a"), *[("a", '"two\nlines"')] * 20], 40)
def test_the_size_of_a_block_makes_no_difference_where_quotation_marks_stand_inside_unquoted_fields(rows, block_bytes):
    text = "".join(f"{user},{item},{row},1\n" for row, (user, item) in enumerate(rows)).encode()
    assert collected(text, block_bytes) == collected(text, 1 << 20)


def test_a_quotation_mark_inside_an_unquoted_field_costs_no_later_row_of_several_lines(tmp_path):
    rows = ['u,i,1700000000,a 27" screen\n', *(f'u{row},i{row % 9},{1700000000 + row},"good,\n""{row}"" of them"\n' for row in range(5000))]
    path = written(tmp_path, "user,item,timestamp,review\n" + "".join([*rows, "u,i,oops,\n"]))
    options = skipping()
    assert len(read_table(path, options).interactions) == len(rows)
    assert options.on_bad_row.first == [f"{path}:10003: timestamp 'oops' is neither a number nor an ISO-8601 time"]


def test_a_quotation_mark_that_is_never_closed_costs_no_later_row_whatever_the_size_of_a_block():
    good = "".join(f'u,"i\n{row}",{row},1\n' for row in range(300))
    far = "u,i,5,1\n" * 250
    for text in (f'u,"i,5,1\n{good}', f'u,"i,5,1\n{far}{good}', f'u,in"ch,5,1\nu,"i,5,1\n{far}{good}{far}'):
        assert {collected(text.encode(), block_bytes)[0] for block_bytes in (1 << 12, 1 << 13, 1 << 20)} == {1}


def test_a_large_file_is_never_in_memory_whole():
    line = b"user,item,1700000000,1\n"
    taken = []

    class Endless(io.RawIOBase):
        def read(self, size=-1):
            taken.append(size)
            return line * (size // len(line)) if len(taken) < 50 else b""

    reader = TextReader(Endless(), "endless", TextFormat(","), 1 << 16)
    largest = max(len(block.content) for block in reader.blocks(4))
    assert largest <= 2 << 16
    assert set(taken) == {1 << 16}
