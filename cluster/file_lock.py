"""A file as a lock between processes, also of several users on one machine or on a shared file system."""

import errno
import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from cluster.disk import give_to
from cluster.errors import BundleError


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of this file, made where it is missing, for the block. Raises BundleError where its file system, as NFS, locks only
    what the process may write.
    """
    with _opened(path) as file:
        _take(file)
        yield


def _opened(lock: Path) -> IO[bytes]:
    """The file of a lock, made where it is missing; one that only another user may write is opened to be read, which most file systems lock
    as well.
    """
    if not lock.exists():
        _make(lock)
    try:
        return lock.open("ab")
    except PermissionError:
        return lock.open("rb")


def _make(lock: Path) -> None:
    """Make the file of a lock so that all may write it that may write its directory, also where root makes it."""
    with suppress(FileExistsError), lock.open("xb") as made:
        give_to(lock.parent, made.fileno(), shared=True)


def _take(file: IO[bytes]) -> None:
    """Wait until the lock is this process's."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        cure = f"have its owner, or root, run: chmod a+w {file.name}"
        raise BundleError(f"{file.name} is another user's, and its file system locks only files that one may write; {cure}") from error
