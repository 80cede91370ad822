"""What outlives a failure of the power, what readers see whole, and how a full disk is told."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex


def flush(path: Path) -> None:
    """Have a file's content, or a directory's entries, on the disk before anything that relies on them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Within the block, an error of the system that names no file, as where the disk is full, names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def give_to(directory: Path, descriptor: int, *, shared: bool = False) -> None:
    """Give an open file to the directory's owner, and let all read it that can reach the directory, under any umask and also where root
    makes it; as far as the file system has owners and modes. `shared`: all may write it in place that may write the directory, also where
    that is sticky and they may replace no file of another user.
    """
    of = directory.stat()
    for owner, group in ((-1, of.st_gid), (of.st_uid, -1)):
        with suppress(OSError):  # a file is for root to give away, and a group is for its members to set
            os.fchown(descriptor, owner, group)
    with suppress(OSError):
        os.fchmod(descriptor, 0o644 | (of.st_mode & 0o222 if shared else 0))


def write_whole(path: Path, text: str, opener: Callable[[str, int], int] | None = None) -> None:
    """Write a small file so that readers see the old text or the new. `opener`: that of `open`, such as `private`; without one, all may
    read the file that reach its directory.
    """
    draft = path.with_name(f".{path.name}-{token_hex(8)}")  # of machines that share the directory, two may have a process of one number
    try:
        with naming(path):
            with open(draft, "x", opener=opener) as file:
                if opener is None:
                    give_to(path.parent, file.fileno())
                file.write(text)
            flush(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    flush(path.parent)


def remove_whole(path: Path) -> None:
    """Remove what `write_whole` has written, if it is there, and what processes that were killed while they wrote it have left."""
    for file in (path, *path.parent.glob(f".{path.name}-*")):
        file.unlink(missing_ok=True)
