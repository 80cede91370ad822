"""The Makefile's recipe of .venv, with scripts in the place of Python and pip."""

import shutil
import subprocess

import pytest

from tests.documents import ROOT

PYTHON = """#!/bin/sh
mkdir .venv .venv/bin && ln -s /bin/true .venv/bin/python && ln -s /bin/true .venv/bin/pip
"""


@pytest.mark.parametrize(("there", "made"), [("", True), ("/bin/false", True), ("/bin/true", False)])
@pytest.mark.parametrize("linked", [False, True])
def test_a_venv_that_is_half_made_is_made_anew_and_another_stays(tmp_path, there, made, linked):
    (work := tmp_path / "work").mkdir()
    shutil.copy(ROOT / "Makefile", work)
    (work / "pyproject.toml").touch()
    (python := work / "python").write_text(PYTHON)
    python.chmod(0o755)
    (venv := tmp_path / "elsewhere" if linked else work / ".venv").mkdir()
    (venv / "kept").touch()
    (venv / "bin").mkdir()
    (venv / "bin" / "pip").symlink_to("/bin/true")
    if linked:
        (work / ".venv").symlink_to(venv)
    if there:
        (venv / "bin" / "python").symlink_to(there)
    subprocess.run(["make", "--silent", ".venv/cpu", f"PYTHON={python}"], cwd=work, check=True, capture_output=True)
    assert (work / ".venv" / "cpu").is_file()
    assert (work / ".venv" / "kept").exists() is not made
    assert (venv / "kept").exists() is (linked or not made)
