"""Bring a MovieLens dataset into the cache: from GroupLens, or MovieLens-100K from a package that carries it."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from cluster.errors import DataError
from integrations.datasets.options import GROUPLENS, default_cache

# The package's example data are MovieLens-100K, whole, with timestamps and titles.
WHEEL = "recbole-1.2.1-py3-none-any.whl"
WHEEL_REQUIREMENT = "recbole==1.2.1"
WHEEL_SHA256 = "9c9948202011f37eb0a7c6768129313f00d6403ad221ec940d5e2d5d5f33a407"
PIP_TIMEOUT_S = 120.0
TIMEOUT_S = 5.0
"""For the connection and for each wait for more bytes, not for the whole download."""


def fetch_movielens(name: str, cache: Path | None = None, mirror: str = GROUPLENS) -> Path:
    """The dataset's zip file in the cache, downloaded where it is missing. Raises DataError with the reason of every source that failed.

    `cache` None: `default_cache`.
    """
    cache = cache or default_cache()
    cache.mkdir(parents=True, exist_ok=True)
    files = [cache / f"{name}.zip"] + ([cache / WHEEL] if name == "ml-100k" else [])
    for file in files:
        if file.is_file() and zipfile.is_zipfile(file):
            return file
    sources: list[Callable[[], Path]] = [lambda: _download(f"{mirror.rstrip('/')}/{name}.zip", files[0])]
    sources += [lambda: _wheel(files[1])] if name == "ml-100k" else []
    return _first(name, cache, sources)


def _first(name: str, cache: Path, sources: list[Callable[[], Path]]) -> Path:
    reasons = []
    for source in sources:
        try:
            return source()
        except (OSError, httpx.HTTPError, subprocess.SubprocessError, DataError) as error:
            reasons.append(str(error) or type(error).__name__)
    cure = f"put {name}.zip into {cache}, or pass its directory or zip with --path to a command that has that option"
    raise DataError(f"{name} is not in {cache} and could not be brought there: {'; '.join(reasons)}; {cure}")


def _download(url: str, target: Path) -> Path:
    """A file over HTTP."""
    with _temporary(target) as draft:
        try:
            with httpx.stream("GET", url, timeout=TIMEOUT_S, follow_redirects=True) as answer, draft.open("wb") as file:
                if not answer.is_success:
                    raise DataError(f"{url}: status {answer.status_code} {answer.reason_phrase}")
                for chunk in answer.iter_bytes(1 << 20):
                    file.write(chunk)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise DataError(f"{url}: {error or type(error).__name__}") from error
        _check_zip(draft, url)
        return draft.replace(target)


def _wheel(target: Path) -> Path:
    """The wheel, downloaded by pip. Raises DataError where its digest is not WHEEL_SHA256."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--dest", folder, WHEEL_REQUIREMENT]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_TIMEOUT_S, check=False)
        wheel = Path(folder) / WHEEL
        if done.returncode or not wheel.is_file():
            raise DataError(f"pip download {WHEEL_REQUIREMENT}: {_last_line(done.stderr) or f'exit status {done.returncode}'}")
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if digest != WHEEL_SHA256:
            raise DataError(f"pip download {WHEEL_REQUIREMENT}: the wheel's sha256 is {digest}, not {WHEEL_SHA256}")
        return wheel.replace(target)


def _check_zip(file: Path, source: str) -> None:
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except zipfile.BadZipFile as error:
        raise DataError(f"{source}: what came is not a zip file ({error})") from error
    if damaged:
        raise DataError(f"{source}: {damaged} arrived damaged")


@contextmanager
def _temporary(target: Path) -> Iterator[Path]:
    """A place beside the target to write to, so that the cache never holds half a file."""
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-{os.getpid()}-", dir=target.parent))
    try:
        yield folder / target.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
