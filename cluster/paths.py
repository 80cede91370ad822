"""What a path is called, whatever way it is given."""

from pathlib import Path


def own_path(path: Path) -> Path:
    """The path; for `.` and `..` that of the directory that they stand for."""
    return path if path.name not in ("", "..") else path.resolve()


def own_name(path: Path) -> str:
    """The last part of `own_path`."""
    return own_path(path).name


def is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8. The name of a file may be any bytes: Python reads some as halves of surrogate pairs."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
