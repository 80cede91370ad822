"""The Makefile's recipe of .venv, with scripts in the place of Python and pip."""

import shutil
import subprocess

import pytest

from tests.documents import ROOT

PYTHON = """#!/bin/sh
mkdir .venv .venv/bin && ln -s /bin/true .venv/bin/python && ln -s /bin/true .venv/bin/pip
"""


@pytest.mark.parametrize(
    ("there", "pip", "made"),
    [
        ("", "/bin/true", True),
        ("/bin/false", "/bin/true", True),
        ("/bin/true", "", True),
        ("/bin/true", "/bin/false", True),
        ("/bin/true", "/bin/true", False),
    ],
)
@pytest.mark.parametrize("linked", [False, True])
def test_a_venv_that_is_half_made_is_made_anew_and_another_stays(tmp_path, there, pip, made, linked):
    (work := tmp_path / "work").mkdir()
    shutil.copy(ROOT / "Makefile", work)
    (work / "pyproject.toml").touch()
    (python := work / "python").write_text(PYTHON)
    python.chmod(0o755)
    (venv := tmp_path / "elsewhere" if linked else work / ".venv").mkdir()
    (venv / "kept").touch()
    (venv / "bin").mkdir()
    (venv / "pyvenv.cfg").write_text("home = /usr/bin\n")
    if linked:
        (work / ".venv").symlink_to(venv)
    for name, program in (("python", there), ("pip", pip)):
        if program:
            (venv / "bin" / name).symlink_to(program)
    subprocess.run(["make", "--silent", ".venv/cpu", f"PYTHON={python}"], cwd=work, check=True, capture_output=True)
    assert (work / ".venv" / "cpu").is_file()
    assert (work / ".venv" / "kept").exists() is not made
    assert (venv / "kept").exists() is (linked or not made)


@pytest.mark.parametrize("pip", [False, True])
def test_a_venv_of_uv_is_refused_without_pip_and_is_never_removed(tmp_path, pip):
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "pyproject.toml").touch()
    (programs := tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.9.1\n")
    (programs / "python").symlink_to("/bin/true")
    if pip:
        (programs / "pip").symlink_to("/bin/true")
    made = subprocess.run(["make", "--silent", ".venv/cpu", "PYTHON=false"], cwd=tmp_path, check=False, capture_output=True, text=True)
    assert (made.returncode == 0) is pip
    assert ("make it by `uv venv --seed`, or remove it" in made.stderr) is not pip
    assert (programs / "python").exists()
