"""The programs of examples/, as modules for tests to call, and as programs."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "examples"


def example(name: str) -> ModuleType:
    """The module of that file; the same one each time."""
    known = f"genrec_example_{name}"
    if known not in sys.modules:
        spec = importlib.util.spec_from_file_location(known, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[known] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[known]


def run(*command: object, **environment: str) -> str:
    """What a program prints; it ends well. It imports from where this process does."""
    own = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), **environment}
    done = subprocess.run([str(part) for part in command], env=own, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
