"""Files that only the user that runs genrec may read and write."""

import errno
import os
from contextlib import suppress
from pathlib import Path


def private(path: str, flags: int) -> int:
    """An `opener` for `open`: a file that it makes has mode 0600, an existing file keeps its mode."""
    return os.open(path, flags, 0o600)


def append(file: Path, line: bytes, *, durable: bool = False) -> None:
    """Add a line at the end of a file, in one write; `durable`: it is on the disk when this returns. Where a full disk has left a part of a
    line there, that line is ended first. Raises OSError, also where the file is a pipe that is full or has no reader.
    """
    line = b"\n" + line if line and _is_cut_off(file) else line
    descriptor = private(os.fspath(file), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        if durable:
            _sync(descriptor)
    finally:
        os.close(descriptor)


def _sync(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a pipe, or a device that has no disk: what is written has left
            raise


def _is_cut_off(file: Path) -> bool:
    """Whether the file's last line has no line break."""
    if not file.is_file():  # a pipe would wait to be read
        return False
    with suppress(OSError), file.open("rb") as opened:  # one that is empty, or may be written alone
        opened.seek(-1, os.SEEK_END)
        return opened.read() != b"\n"
    return False
