"""What pydantic refuses, told in the names of the command line."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from pydantic import ValidationError

from cluster.errors import ConfigError

CALLED: Mapping[str, str] = {"batch_windows": "batch"}
"""Field -> the option's name, where they differ."""


@contextmanager
def as_options(prefix: str = "") -> Iterator[None]:
    """Raises ConfigError where a value is refused."""
    try:
        yield
    except ValidationError as error:
        refused = ((str(problem["loc"][0]), problem["msg"]) for problem in error.errors())
        raise ConfigError("; ".join(f"--{prefix}{CALLED.get(name, name).replace('_', '-')}: {why}" for name, why in refused)) from error
