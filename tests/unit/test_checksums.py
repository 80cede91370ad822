"""Checksums are remembered for files that stay, and only for those."""

import hashlib
import os
import time
from pathlib import Path

import pytest

from cluster import checksums


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    digest, paths = hashlib.file_digest, []
    monkeypatch.setattr(hashlib, "file_digest", lambda file, kind: paths.append(Path(file.name)) or digest(file, kind))
    return paths


def written(path: Path, content: bytes, age_s: float) -> Path:
    path.write_bytes(content)
    os.utime(path, (time.time() - age_s, time.time() - age_s))
    return path


def test_a_settled_file_is_read_once(tmp_path: Path, reads: list[Path]):
    file = written(tmp_path / "engine", b"one", age_s=60)
    assert checksums.sha256(file) == checksums.sha256(file) == hashlib.sha256(b"one").hexdigest()
    assert reads == [file]


def test_an_altered_file_of_the_same_size_is_read_again(tmp_path: Path):
    file = written(tmp_path / "engine", b"one", age_s=60)
    checksums.sha256(file)
    written(file, b"two", age_s=50)
    assert checksums.sha256(file) == hashlib.sha256(b"two").hexdigest()


def test_an_alteration_that_keeps_the_modification_time_is_noticed(tmp_path: Path):
    file = written(tmp_path / "engine", b"one", age_s=60)
    stat = file.stat()
    checksums.sha256(file)
    time.sleep(0.02)
    file.write_bytes(b"two")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert checksums.sha256(file) == hashlib.sha256(b"two").hexdigest()


def test_a_file_just_written_is_not_remembered(tmp_path: Path, reads: list[Path]):
    file = tmp_path / "engine"
    file.write_bytes(b"one")
    checksums.sha256(file)
    checksums.sha256(file)
    assert reads == [file, file]
