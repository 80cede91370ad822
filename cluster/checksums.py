"""sha256 of files, read again only when a file has changed: backends verify their artifacts at every probe, every few seconds."""

import hashlib
import time
import zipfile
from functools import lru_cache
from pathlib import Path

SETTLED_S = 2.0
"""A file younger than this may change once more within the resolution of its modification time, so its checksum is not remembered."""


def sha256(path: Path) -> str:
    """The hex digest of the file's content. Remembered by path, size, times of change and inode."""
    stat = path.stat()
    if abs(time.time() - stat.st_mtime) < SETTLED_S:
        return _read(path)
    return _remembered(path, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)


def require_intact(path: Path) -> None:
    """Raises ValueError where a member of a zip archive, as `torch.save` writes, was altered: `torch.load` checks no checksums. A file that
    is no archive passes.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        altered = archive.testzip()
    if altered is not None:
        raise ValueError(f"{altered} in it does not match its checksum: it was altered after it was written")


@lru_cache(maxsize=256)
def _remembered(path: Path, *_state: int) -> str:
    return _read(path)


def _read(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
