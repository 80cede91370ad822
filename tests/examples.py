"""What stands in examples/, for tests: its programs to call and to run, and its packages of backends as if they were installed."""

import importlib.util
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

from deployments.cli.local_cluster import START_TRIES, TOO_SLOW

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"
BACKENDS = EXAMPLES / "backends"


def example(name: str) -> ModuleType:
    """The program of that file, as a module; the same one each time."""
    known = f"genrec_example_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[known]


def make_importable() -> None:
    """Put every package of backends on the path, behind everything else."""
    for directory in sorted(BACKENDS.iterdir()):
        if directory.is_dir() and str(directory) not in sys.path:
            sys.path.append(str(directory))


def installed(site: Path, name: str, entry_point: str) -> None:
    """Lay out in `site` what pip leaves of a distribution that registers this backend; its modules are not among it."""
    metadata = site / f"{name}-1.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[genrec.backends]\n{entry_point}\n")


def entry_points(name: str) -> dict[str, str]:
    """What the pyproject.toml of a package of backends registers: stage.name -> import string."""
    project = tomllib.loads((BACKENDS / name / "pyproject.toml").read_text())
    return project["project"]["entry-points"]["genrec.backends"]


def run(*command: object, **environment: str) -> str:
    """What a program prints; it ends well. It imports from where this process does. Where a Ray of its own does not start within the half
    minute that Ray waits for one, it is run again.
    """
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), **environment}
    for _ in range(START_TRIES):
        done = subprocess.run([str(part) for part in command], env=own, capture_output=True, text=True, check=False)
        if TOO_SLOW not in done.stderr:
            break
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
