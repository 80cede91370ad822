"""Broken files: a bundle's manifest and pointers, tables of events and of items. Each is read, or refused by what names the place."""

import json
import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, reject
from hypothesis import strategies as st

from cluster.bundle import MANIFEST, REQUIRED, Bundle, Manifest
from cluster.bundle_store import BundleStore
from cluster.errors import BundleError, DataError
from integrations.datasets.options import BadRows, ReadOptions
from integrations.datasets.table import read_table
from tests.bundles import make_generative_bundle
from tests.mutations import JSON, mutated
from tests.repetitions import fuzzed
from tests.unit.test_datasets_movielens import FILES, LAYOUTS, reader_of
from tests.unit.test_datasets_table import CSV


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_generative_bundle(tmp_path_factory.mktemp("models") / "tiny", items=20)


@pytest.fixture(scope="module")
def manifest(bundle):
    return (bundle.path / MANIFEST).read_bytes()


NAMES = st.sampled_from(
    ["../current", "/etc/passwd", "a/../../b", "..", ".", "", "a//b", "a\\b", "a\0b", "\ud800", "x" * 5_000, "manifest.json", "decoder"]
)


def tried(does, kind: type[Exception]):
    """What it gives, or None and what it says where it raises an error of this kind. Every other error fails the test."""
    try:
        return does(), ""
    except kind as error:
        return None, str(error)


def opened(bundle, content) -> Bundle | None:
    """What a store makes of a version with this manifest; None where it refuses it."""
    (bundle.path / MANIFEST).write_bytes(content)
    found, refused = tried(lambda: BundleStore(bundle.path.parent).open(bundle.manifest.version), BundleError)
    assert found or str(bundle.path) in refused
    return found


def look_at_every_file(found: Bundle) -> None:
    """Raises where a file that verifies lies elsewhere."""
    for file in found.manifest.files:
        try:
            verified = found.verified(file)
        except BundleError:
            continue
        assert Path(os.path.realpath(verified)).is_relative_to(os.path.realpath(found.path)), file


@fuzzed()
@given(data=st.data())
def test_a_broken_manifest_is_a_manifest_or_refused_and_names_no_file_elsewhere(bundle, manifest, data):
    found = opened(bundle, data.draw(mutated(manifest) | JSON.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=200)))
    if found is not None:
        look_at_every_file(found)
        written = found.manifest.model_dump_json()
        again = Manifest.model_validate_json(written)
        assert again == found.manifest or "NaN" in written
        assert again.model_dump_json() == written


@fuzzed()
@given(data=st.data())
@example(data=None)
def test_a_manifest_with_odd_values_is_a_manifest_or_refused(bundle, manifest, data):
    tree = json.loads(manifest)
    if data is None:
        tree["training"] = {"deep": json.loads("[" * 900 + "]" * 900)}
    else:
        name = data.draw(st.sampled_from([*tree, "other"]))
        tree[name] = data.draw(JSON)
        if data.draw(st.booleans()):
            tree["files"] = json.loads(manifest)["files"] | {
                data.draw(NAMES): {"size": data.draw(st.integers()), "sha256": data.draw(st.text(max_size=5))}
            }
    found = opened(bundle, json.dumps(tree).encode())
    if found is not None:
        look_at_every_file(found)
        assert found.digest


@fuzzed()
@given(name=NAMES | st.text(max_size=30))
def test_no_name_in_a_manifest_leads_out_of_the_version(bundle, manifest, name):
    tree = json.loads(manifest)
    tree["files"][name] = tree["files"][REQUIRED[0]]
    found = opened(bundle, json.dumps(tree).encode())
    if found is not None:
        look_at_every_file(found)


@fuzzed()
@given(content=mutated(b"1\n", b"12\n3\n") | st.binary(max_size=40))
@example(content=b"1\n3\n")
def test_broken_pointers_are_versions_or_refused(bundle, manifest, content):
    (bundle.path / MANIFEST).write_bytes(manifest)
    store = BundleStore(bundle.path.parent)
    for pointer in ("current", "previous"):
        (store.root / pointer).write_bytes(content)
    try:
        assert store.current() is None or store.open().manifest.version == store.current()
    except BundleError:
        found, refused = store.open_last_good()
        assert found.manifest.version in store.versions()
        assert refused
    assert all(version > 0 for version in store.previous())


# Tables

PLACE = re.compile(r":\d+: ")


def read_both_ways(read, path):
    """As it is, and without its bad rows: a fault names the file and, where it is of one row, the line."""
    whole, refused = tried(lambda: read(path, ReadOptions(progress=False)), DataError)
    assert len(whole.interactions) if whole else str(path) in refused
    assert "--skip-bad-rows" not in refused or PLACE.search(refused)
    rows = BadRows(skip=True)
    kept, refused = tried(lambda: read(path, ReadOptions(progress=False, on_bad_row=rows)), DataError)
    assert kept.skipped_rows == rows.count if kept else str(path) in refused
    assert all(PLACE.search(shown) for shown in rows.first)


@fuzzed()
@given(content=mutated(CSV.encode(), CSV.replace(",", "\t").encode(), b'user,item,timestamp\n"a,\nb","x""y",2020-01-01T00:00:00+02:00\n'))
@example(b"user,item,timestamp\n" + b'"' * 5_000)
@example(b"user,item,timestamp\na,x,9999-12-31T23:59:59-23:59\n")
@example(b"user,item,timestamp\na,x,0001-01-01T00:00:00+14:00\n")
@example(b"user,item,timestamp\na,x," + b"9" * 5_000 + b"\n")
def test_a_broken_text_table_is_read_or_refused_by_file_and_line(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "events.csv"
    path.write_bytes(content)
    read_both_ways(read_table, path)


@fuzzed()
@given(content=mutated(b'item_id,title,year\nx,Film,1999\ny,"Film, too",\n'))
def test_a_broken_item_table_is_read_or_refused_by_file_and_line(tmp_path_factory, content):
    folder = tmp_path_factory.getbasetemp()
    (folder / "seen.csv").write_text(CSV)
    items = folder / "items.csv"
    items.write_bytes(content)
    dataset, refused = tried(lambda: read_table(folder / "seen.csv", ReadOptions(items=items, progress=False)), DataError)
    assert len(dataset.catalogue) if dataset else str(items) in refused


def _parquet(**columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


PARQUET = (
    _parquet(user=["a", "b"], item=[1, 2], timestamp=[100, 200], value=[1.5, None]),
    _parquet(
        user=[1, 2],
        item=["x", "y"],
        timestamp=pa.array([1, 2], pa.timestamp("ns", "UTC")),
        action=pa.array(["view", "click"]).dictionary_encode(),
    ),
)
CELLS = {
    "user": st.text(max_size=4) | st.none(),
    "item": st.integers(-(2**63), 2**63 - 1) | st.none(),
    "timestamp": st.integers(-(2**63), 2**63 - 1) | st.floats() | st.none() | st.text(max_size=8),
    "value": st.floats() | st.none(),
    "action": st.sampled_from(["view", "odd", "", None]),
}
KINDS = {
    "user": [pa.string(), pa.large_string(), pa.binary()],
    "item": [pa.int64()],
    "timestamp": [
        pa.int64(),
        pa.float64(),
        pa.timestamp("s"),
        pa.timestamp("ns", "UTC"),
        pa.string(),
        pa.date32(),
        pa.time64("us"),
        pa.duration("s"),
    ],
    "value": [pa.float64(), pa.float32(), pa.string(), pa.bool_(), pa.decimal128(10, 2)],
    "action": [pa.string(), pa.dictionary(pa.int32(), pa.string())],
}


@st.composite
def tables(draw):
    rows, columns = draw(st.integers(0, 4)), {}
    for name, cells in CELLS.items():
        kind, values = draw(st.sampled_from(KINDS[name])), [draw(cells) for _ in range(rows)]
        try:
            columns[name] = pa.array(values).cast(kind)
        except (pa.ArrowException, OverflowError, ValueError):
            columns[name] = pa.nulls(rows, kind)
    try:
        return _parquet(**columns)
    except pa.ArrowInvalid:  # seconds that Parquet cannot write
        reject()


@fuzzed()
@given(content=mutated(*PARQUET))
def test_a_damaged_parquet_file_is_read_or_refused_by_its_name(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "events.parquet"
    path.write_bytes(content)
    read_both_ways(read_table, path)


@pytest.mark.parametrize("whole", PARQUET)
def test_a_parquet_file_of_which_any_byte_has_its_first_bit_flipped_is_read_or_refused_by_its_name(tmp_path, whole):
    path = tmp_path / "events.parquet"
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x80]) + whole[place + 1 :])
        read_both_ways(read_table, path)


@fuzzed()
@given(content=tables())
@example(_parquet(user=["a"], item=[1], timestamp=pa.array([2**62]).cast(pa.time64("us"))))
@example(_parquet(user=["a"], item=[1], timestamp=pa.array([2**30], pa.int32()).cast(pa.date32())))
@example(_parquet(user=["a"], item=[1], timestamp=pa.array([2**62]).cast(pa.duration("s"))))
def test_a_parquet_file_of_odd_types_and_values_is_read_or_refused_by_file_and_row(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "odd.parquet"
    path.write_bytes(content)
    read_both_ways(read_table, path)


@pytest.mark.parametrize("layout", LAYOUTS)
@fuzzed()
@given(data=st.data())
def test_broken_movielens_files_are_read_or_refused_by_file_and_line(tmp_path_factory, layout, data):
    folder = tmp_path_factory.getbasetemp() / layout
    folder.mkdir(exist_ok=True)
    for name, text in FILES[layout].items():
        whole = text.encode()
        (folder / name).write_bytes(data.draw(st.just(whole) | mutated(whole)))
    read_both_ways(reader_of(layout), folder)
