"""Files to read, whether they lie in a directory, in a zip or wheel, or gzipped."""

import gzip
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from cluster.errors import DataError

ARCHIVES = {".zip", ".whl"}


@dataclass(frozen=True)
class File:
    """A file on disk or a member of an archive; `str()` is how messages name it."""

    path: Path
    member: str | None = None

    def __str__(self) -> str:
        return f"{self.path}/{self.member}" if self.member else str(self.path)

    @property
    def name(self) -> str:
        """The file's own name, without folders and without .gz."""
        return without_gz(Path(self.member or self.path).name)

    @property
    def gzipped(self) -> bool:
        """Whether it is unpacked as it is read, so that each step back reads it from its beginning."""
        return str(self).lower().endswith(".gz")

    def ends_in(self, *endings: str) -> bool:
        """Whether its name ends in one of these, which are in small letters, be it written in capitals."""
        return self.name.lower().endswith(endings)

    @contextmanager
    def open(self, *, progress: bool | None = False) -> Iterator[BinaryIO]:
        """The content, unpacked, with a progress bar on stderr while it is read (None: where stderr is a terminal).

        Raises DataError where the file cannot be opened or a packed file turns out to be damaged.
        """
        try:
            with self._stored() as (stored, size), _bar(progress) as bar:
                counted = bar.wrap_file(cast(BinaryIO, stored), total=size, description=self.name)
                if self.gzipped:
                    with gzip.open(counted) as unpacked:
                        yield cast(BinaryIO, unpacked)
                else:
                    yield counted
        except (OSError, EOFError, zlib.error, zipfile.BadZipFile) as error:
            raise DataError(f"{self} cannot be read: {error}") from error

    @contextmanager
    def _stored(self) -> Iterator[tuple[IO[bytes], int]]:
        if self.member is None:
            with self.path.open("rb") as file:
                yield file, os.fstat(file.fileno()).st_size
        else:
            with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as file:
                yield file, archive.getinfo(self.member).file_size


def without_gz(name: str) -> str:
    """A file's name without .gz at its end, be it written in capitals."""
    return name[:-3] if name.lower().endswith(".gz") else name


def find_file(path: Path, name: str) -> File | None:
    """The file of this name (or with .gz after it) in a directory, the folders in it, or an archive; the uppermost wins."""
    found = [file for file in _files_under(path) if file.name == name]
    return min(found, key=lambda file: (str(file).count("/"), str(file)), default=None)


def _files_under(path: Path) -> Iterator[File]:
    if not path.exists():
        raise DataError(f"{path} does not exist")
    if path.is_dir():
        folders = (path, *sorted(entry for entry in path.iterdir() if entry.is_dir()))
        yield from (File(entry) for folder in folders for entry in folder.iterdir() if entry.is_file())
    elif path.suffix.lower() in ARCHIVES:
        try:
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
        except zipfile.BadZipFile as error:
            raise DataError(f"{path} is not a whole zip file: {error}") from error
        yield from (File(path, name) for name in names)


def _bar(progress: bool | None) -> Progress:
    console = Console(stderr=True)
    shown = console.is_terminal if progress is None else progress
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=console.is_terminal, disable=not shown)
