"""Compiled models for tests that serve one, kept from run to run and shared by processes. A test of the compiler itself compiles.

What is kept is found by a digest of all that it was made of: the model, the options, the code of the compilers and the packages it uses. It
lies below the system's directory for temporary files; what no test has asked for in a day goes.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib.metadata import distributions
from pathlib import Path

from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from cluster.bundle import Artifact, Bundle
from cluster.bundle_store import BundleStore
from cluster.compilation import CompileOptions
from cluster.errors import BackendUnavailable
from integrations.tensorrt.device import gpu_architecture
from pipelines.compile import compile_bundle

DIRECTORY = Path(tempfile.gettempdir()) / f"genrec-tests-{os.getuid()}" / "compiled"
ROOT = Path(__file__).resolve().parents[1]
CODE = ("cluster", "integrations/decoder", "integrations/hstu", "integrations/onnx", "integrations/tensorrt", "pipelines/compile.py")
PACKAGES = ("torch", "onnx", "tensorrt", "numpy")
"""What the names of the packages begin with that graphs and engines are made and checked with."""
_A_DAY_S = 24 * 3600
_ARTIFACTS = TypeAdapter(list[Artifact])


def compiled(root: Path, options: CompileOptions | None = None, only: Sequence[str] = ()) -> Bundle:
    """The next version of the model in `root`, with the artifacts that `compile_bundle` makes for these options."""
    options, store = options or CompileOptions(), BundleStore(root)
    DIRECTORY.mkdir(parents=True, exist_ok=True, mode=0o700)
    kept = DIRECTORY / digest(store.open(), options, only)
    with FileLock(f"{kept}.lock"):
        if kept.is_dir():
            os.utime(kept)
            return _taken(store, kept)
        bundle = compile_bundle(store, options, only=only)
        if not bundle.manifest.failed_steps:
            _keep(bundle, kept)
    _forget_old(time.time() - _A_DAY_S)
    return bundle


def digest(bundle: Bundle, options: CompileOptions, only: Sequence[str] = ()) -> str:
    """Of all that the artifacts of this bundle depend on."""
    made_of = {
        "model": bundle.manifest.model_dump(mode="json", include={"model", "decoder", "ranker", "files"}),
        "options": [repr(options), list(only), _gpu()],
        "code": code_digest(ROOT, CODE),
        "packages": _packages(),
    }
    return sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest()


def code_digest(root: Path, paths: Iterable[str]) -> str:
    """Of the Python files at and below these paths: their names and what they hold."""
    whole = sha256()
    for file in sorted(file for path in paths for file in ((root / path).rglob("*.py") if (root / path).is_dir() else [root / path])):
        text = file.read_bytes()
        whole.update(f"{file.relative_to(root)} {len(text)}\n".encode() + text)
    return whole.hexdigest()


def _keep(bundle: Bundle, kept: Path) -> None:
    """Put a bundle's artifacts into `kept`, all of them at once."""
    draft = Path(tempfile.mkdtemp(dir=DIRECTORY))
    for artifact in bundle.manifest.artifacts:
        (draft / artifact.file).parent.mkdir(exist_ok=True)
        shutil.copyfile(bundle.verified(artifact.file), draft / artifact.file)
    (draft / "artifacts.json").write_bytes(_ARTIFACTS.dump_json(bundle.manifest.artifacts))
    draft.rename(kept)


def _taken(store: BundleStore, kept: Path) -> Bundle:
    artifacts = _ARTIFACTS.validate_json((kept / "artifacts.json").read_bytes())
    with store.recompile(store.open()) as draft:
        for artifact in artifacts:
            (draft.path / artifact.file).parent.mkdir(exist_ok=True)
            shutil.copyfile(kept / artifact.file, draft.path / artifact.file)
        draft.artifacts += artifacts
    return store.open()


def _forget_old(since: float) -> None:
    """Drop what was last asked for before that time, and is not being read."""
    for kept in DIRECTORY.iterdir():
        with suppress(FileNotFoundError, Timeout):  # another process has put a draft in its place
            if kept.is_dir() and kept.stat().st_mtime < since:
                with FileLock(f"{kept}.lock", timeout=0):
                    shutil.rmtree(kept, ignore_errors=True)


@cache
def _packages() -> list[str]:
    return sorted(f"{d.name} {d.version}" for d in distributions() if d.name.lower().startswith(PACKAGES))


@cache
def _gpu() -> str:
    try:
        return gpu_architecture()
    except BackendUnavailable:
        return ""
