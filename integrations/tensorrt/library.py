"""Which TensorRT is installed. Two libraries share one API:

tensorrt               the full library: builds and runs engines for the GPU of this machine, needs one to build
tensorrt_rtx_bindings  TensorRT for RTX: builds for a list of architectures on any machine, no GPU needed; not for Hopper
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from cluster.distributions import version_of
from cluster.errors import GenrecError

FULL, RTX = "tensorrt", "tensorrt_rtx_bindings"
PACKAGES = {FULL: ("tensorrt",), RTX: ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu13-libs")}
"""The distributions that a library is installed by, of one version, which is the library's."""
CURE = "install genrec with its extra gpu on a GPU machine, or with cpu to build engines anywhere"


def installed() -> list[str]:
    """The installed libraries, the full one first."""
    return [name for name in (FULL, RTX) if find_spec(name) is not None]


def installed_version(name: str) -> str:
    """A library's version by its packages' metadata, without importing it; "" where none of them is installed."""
    return next(filter(None, map(version_of, PACKAGES[name])), "")


def how_to_install(name: str, wanted: str) -> str:
    """The command that installs this version of a library."""
    return "run: pip install " + " ".join(f"{package}=={wanted}" for package in PACKAGES.get(name, (name,)))


def load_library(name: str) -> Any:
    """The library as a module. Raises ImportError, also where its shared objects are missing."""
    try:
        return importlib.import_module(name)
    except OSError as error:
        raise ImportError(f"{name} is installed but does not load: {error}") from error


def title(library: Any) -> str:
    """The library's name in manifests, as ``tensorrt_rtx_bindings 1.7.1.116``: the module, a blank, the version."""
    return f"{library.__name__} {library.__version__}"


@contextmanager
def broken_as(error_type: type[GenrecError], doing: str) -> Iterator[None]:
    """Turns any error of the library into an `error_type`: a null pointer within it, as for a lack of memory, is a TypeError here."""
    try:
        yield
    except GenrecError:
        raise
    except Exception as error:
        raise error_type(f"{doing} broke: {type(error).__name__}: {error}") from error


def make_logger(library: Any) -> Any:
    """A logger that keeps errors in `errors` in place of printing them: TensorRT returns None and says why only here."""

    class Logger(library.ILogger):  # type: ignore[misc]  # the base class is known at run time only
        def __init__(self) -> None:
            super().__init__()
            self.errors: list[str] = []

        def log(self, severity: Any, message: str) -> None:
            if severity in (library.ILogger.ERROR, library.ILogger.INTERNAL_ERROR):
                self.errors.append(message)

    return Logger()
