"""The packages under examples/backends, importable as if they were installed."""

import sys
import tomllib
from pathlib import Path

BACKENDS = Path(__file__).resolve().parents[1] / "examples" / "backends"


def make_importable() -> None:
    """Put every package on the path, behind everything else."""
    for directory in sorted(BACKENDS.iterdir()):
        if directory.is_dir() and str(directory) not in sys.path:
            sys.path.append(str(directory))


def entry_points(name: str) -> dict[str, str]:
    """What the pyproject.toml of an example registers: stage.name -> import string."""
    project = tomllib.loads((BACKENDS / name / "pyproject.toml").read_text())
    return project["project"]["entry-points"]["genrec.backends"]
