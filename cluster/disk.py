"""What outlives a failure of the power."""

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Have a file's content, or a directory's entries, on the disk before anything that relies on them."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
