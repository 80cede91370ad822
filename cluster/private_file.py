"""Files that only the user that runs genrec may read and write."""

import os


def private(path: str, flags: int) -> int:
    """An `opener` for `open`: a file that it makes has mode 0600; one that is there keeps its own."""
    return os.open(path, flags, 0o600)
