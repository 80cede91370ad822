import gzip
import zipfile

import numpy as np
import pytest

from cluster.errors import DataError
from cluster.registry import DATASETS, choose
from cluster.values import Action, Item
from integrations.datasets.movielens import read_ml_1m, read_ml_20m, read_ml_100k
from integrations.datasets.options import BadRows, ReadOptions
from tests.conftest import shared_data

FLAGS = "|".join("1" if number in (3, 4, 5) else "0" for number in range(19))
FILES = {
    "ml-1m": {
        "ratings.dat": "2::10::5::978300760\n1::20::3::978302109\n1::10::4::978300000\n",
        "movies.dat": "10::Les Misérables (1995)::Drama|Musical\n20::Nameless::Comedy\n30::Unseen (2000)::War\n",
    },
    "ml-10m": {
        "ratings.dat": "2::10::5::978300760\n1::20::3::978302109\n1::10::4::978300000\n",
        "movies.dat": "10::Les Misérables (1995)::Drama|Musical\n20::Nameless::Comedy\n30::Unseen (2000)::War\n",
    },
    "ml-20m": {
        "ratings.csv": "userId,movieId,rating,timestamp\n2,10,5.0,978300760\n1,20,3.0,978302109\n1,10,4.0,978300000\n",
        "movies.csv": "movieId,title,genres\n10,Les Misérables (1995),Drama|Musical\n"
        '20,"Nameless, The",(no genres listed)\n30,Unseen (2000),War\n',
    },
    "ml-100k": {
        "u.data": "2\t10\t5\t978300760\n1\t20\t3\t978302109\n1\t10\t4\t978300000\n",
        "u.item": f"10|Les Misérables (1995)|01-Jan-1995||http://x|{FLAGS}\n20|Nameless||||{FLAGS}\n30|Unseen (2000)||||{FLAGS}\n",
    },
    "wheel": {
        "ml-100k.inter": "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
        "2\t10\t5\t978300760\n1\t20\t3\t978302109\n1\t10\t4\t978300000\n",
        "ml-100k.item": "item_id:token\tmovie_title:token_seq\trelease_year:token\tclass:token_seq\n"
        "10\tLes Misérables\t1995\tDrama Musical\n20\tNameless\t\tComedy\n30\tUnseen\t2000\tWar\n",
    },
}
ENCODING = {("ml-1m", "movies.dat"): "latin-1", ("ml-100k", "u.item"): "latin-1"}
LAYOUTS = list(FILES)


def reader_of(layout):
    return choose("dataset", DATASETS, "ml-100k" if layout == "wheel" else layout)


def write(folder, layout):
    for name, text in FILES[layout].items():
        (folder / name).write_bytes(text.encode(ENCODING.get((layout, name), "utf-8")))
    return folder


def ratings_name(layout):
    return next(iter(FILES[layout]))


def with_ratings(folder, layout, edit):
    """The layout's files with the ratings' text changed."""
    write(folder, layout)
    file = folder / ratings_name(layout)
    file.write_bytes(edit(file.read_bytes()))
    return folder


def skipping():
    return ReadOptions(on_bad_row=BadRows(skip=True))


def assert_is_the_example(dataset):
    events = dataset.interactions
    assert list(events.user_ids) == ["2", "1"]
    assert events.offsets.tolist() == [0, 1, 3]
    assert events.items.tolist() == [1, 1, 2]
    assert events.timestamps.tolist() == [978300760, 978300000, 978302109]
    assert events.values.tolist() == [5, 4, 3]
    assert set(events.actions.tolist()) == {Action.RATING.code}
    assert [item.item_id for item in dataset.catalogue.items] == ["10", "20", "30"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_events_and_catalogue(tmp_path, layout):
    assert_is_the_example(reader_of(layout)(write(tmp_path, layout)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_line_ends_and_a_missing_last_one_make_no_difference(tmp_path, layout):
    assert_is_the_example(
        reader_of(layout)(with_ratings(tmp_path, layout, lambda text: text.replace(b"\n", b"\r\n").removesuffix(b"\r\n")))
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_titles_genres_and_years_come_from_the_item_table(tmp_path, layout):
    genres = "Animation|Children's|Comedy" if layout == "ml-100k" else "Drama|Musical"
    catalogue = reader_of(layout)(write(tmp_path, layout)).catalogue
    assert catalogue[1] == Item("10", "Les Misérables (1995)", {"genres": genres, "year": "1995"})
    assert "year" not in catalogue[2].attributes


def test_a_movie_without_genres_has_no_such_attribute(tmp_path):
    assert read_ml_20m(write(tmp_path, "ml-20m")).catalogue[2] == Item("20", "Nameless, The", {})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_a_zip_and_gzipped_ratings_as_it_reads_a_directory(tmp_path, layout):
    write(tmp_path, layout)
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        for name in FILES[layout]:
            archive.write(tmp_path / name, f"folder/{name}")
    ratings = tmp_path / ratings_name(layout)
    ratings.with_name(f"{ratings.name}.gz").write_bytes(gzip.compress(ratings.read_bytes()))
    ratings.unlink()
    assert_is_the_example(reader_of(layout)(tmp_path))
    assert_is_the_example(reader_of(layout)(tmp_path / "all.zip"))


def test_a_movie_only_ratings_name_is_appended_with_its_id_for_a_title(tmp_path):
    dataset = read_ml_1m(with_ratings(tmp_path, "ml-1m", lambda text: text + b"2::77::1::978300761\n"))
    assert dataset.catalogue[4] == Item("77", "77", {})
    assert dataset.interactions.sequence(0).items.tolist() == [1, 4]


BAD = [  # a row's user, item, rating, timestamp; and what the message must say
    (("1", "10", "4", "abc"), "timestamp 'abc' is neither a number nor an ISO-8601 time"),
    (("1", "10", "4", ""), "timestamp '' is neither"),
    (("1", "10", "4", "nan"), "timestamp 'nan' is not a time since 1970"),
    (("1", "10", "4", "inf"), "timestamp 'inf'"),
    (("1", "10", "4", "-1"), "timestamp '-1' is not a time since 1970"),
    (("1", "10", "4", "978300760000"), "--timestamp-unit"),
    (("1", "10", "nan", "978300760"), "value 'nan' is not a finite number"),
    (("1", "10", "1e40", "978300760"), "value '1e40' is of a larger amount than 1e+12"),
    (("1", "10", "good", "978300760"), "value 'good' is not a number"),
    (("", "10", "4", "978300760"), "the user id is empty"),
    (("1", "  ", "4", "978300760"), "the item id is empty"),
    (("", "", "", ""), "the user id is empty"),
    (("1\r", "10", "4", "9", "1\r", "10", "4", "9"), "8 fields where there should be 4"),
    (("1", "10", "4"), "3 fields where there should be 4"),
    (("1", "10", "4", "978300760", "9"), "5 fields where there should be 4"),
    (("1", "1\udcff0", "4", "978300760"), "0xff, is not utf-8"),
]
DELIMITER = {"ml-1m": "::", "ml-10m": "::", "ml-20m": ",", "ml-100k": "\t", "wheel": "\t"}


def bad_line(layout, fields):
    return DELIMITER[layout].join(fields).encode("utf-8", "surrogateescape") + b"\n"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("fields", "cause"), BAD)
def test_a_bad_rating_names_its_file_line_and_cause_and_can_be_skipped(tmp_path, layout, fields, cause):
    with_ratings(tmp_path, layout, lambda text: text + bad_line(layout, fields))
    line = 5 if layout in {"ml-20m", "wheel"} else 4
    with pytest.raises(DataError) as caught:
        reader_of(layout)(tmp_path)
    assert f"{ratings_name(layout)}:{line}: " in str(caught.value)
    assert cause in str(caught.value)
    options = skipping()
    dataset = reader_of(layout)(tmp_path, options)
    assert_is_the_example(dataset)
    assert dataset.skipped_rows == 1
    assert cause in options.on_bad_row.first[0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("edit", "cause"),
    [
        (lambda line: line[:4], "fields where there should be"),
        (lambda line: b"  " + line[2:], "the item id is empty"),
        (lambda line: b"10" + line[2:], "item '10' is listed a second time"),
    ],
)
def test_a_bad_movie_names_its_file_line_and_cause_and_can_be_skipped(tmp_path, layout, edit, cause):
    write(tmp_path, layout)
    movies = tmp_path / list(FILES[layout])[1]
    lines = movies.read_bytes().splitlines()
    movies.write_bytes(b"\n".join([*lines[:-1], edit(lines[-1])]))
    with pytest.raises(DataError, match=rf"{movies.name}:{len(lines)}: {cause if 'fields' not in cause else ''}") as caught:
        reader_of(layout)(tmp_path)
    assert cause in str(caught.value)
    dataset = reader_of(layout)(tmp_path, skipping())
    assert (len(dataset.catalogue), dataset.skipped_rows) == (2, 1)


@pytest.mark.parametrize("layout", ["ml-20m", "wheel"])
def test_a_file_with_another_header_is_refused(tmp_path, layout):
    with_ratings(tmp_path, layout, lambda text: text.split(b"\n", 1)[1])
    with pytest.raises(DataError, match=r":1: the columns are 2, 10, .* but should be \w+, \w+, rating, timestamp"):
        reader_of(layout)(tmp_path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_file_without_ratings_is_refused_and_so_is_one_with_only_bad_ones(tmp_path, layout):
    header = FILES[layout][ratings_name(layout)].split("\n")[0].encode() + b"\n" if layout in {"ml-20m", "wheel"} else b""
    with pytest.raises(DataError, match="holds no events"):
        reader_of(layout)(with_ratings(tmp_path, layout, lambda _: header))
    with pytest.raises(DataError, match=r"holds no events: all rows are bad, the first being .*1 fields"):
        reader_of(layout)(with_ratings(tmp_path, layout, lambda _: header + b"x\n"), skipping())


def test_a_directory_without_the_files_says_which_ones_are_missing(tmp_path):
    with pytest.raises(DataError, match=r"it should hold u\.data and u\.item or ml-100k\.inter and ml-100k\.item"):
        read_ml_100k(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        read_ml_100k(tmp_path / "nowhere")


def test_damaged_archives_are_refused(tmp_path):
    (tmp_path / "ml.zip").write_bytes(b"PK no zip")
    with pytest.raises(DataError, match="not a whole zip"):
        read_ml_1m(tmp_path / "ml.zip")
    write(tmp_path, "ml-1m")
    packed = gzip.compress((tmp_path / "ratings.dat").read_bytes())
    (tmp_path / "ratings.dat").unlink()
    for damaged in (packed[:-12], packed[:12] + b"\xff\xff\xff" + packed[15:], b"not gzip"):
        (tmp_path / "ratings.dat.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"ratings\.dat\.gz"):
            read_ml_1m(tmp_path)


def test_reads_the_real_movielens_1m():
    dataset = read_ml_1m(shared_data() / "ml-1m")
    events = dataset.interactions
    assert (events.users, len(events), len(dataset.catalogue), dataset.skipped_rows) == (2999, 487_650, 3883, 0)
    assert dataset.catalogue[1].title == "Toy Story (1995)"
    assert events.items.min() >= 1
    assert events.items.max() <= 3883
    within = np.diff(events.timestamps)
    within[events.offsets[1:-1] - 1] = 0  # from one user to the next, time may go back
    assert within.min() >= 0
