"""Which distributions are installed, by their metadata: nothing is imported."""

from importlib.metadata import PackageNotFoundError, version


def version_of(distribution: str) -> str:
    """The distribution's version; "" where it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
