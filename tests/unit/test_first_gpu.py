"""The program for a first run on a GPU, on whatever is here: its table is complete, and no case costs another its row."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import first_gpu
from benchmarks.first_gpu_sanitizer import PROGRAM, WATCHED, watched
from benchmarks.guarded import Group, Label, run

ROOT = Path(__file__).resolve().parents[2]
SPOILT = "tests.spoilt_cases:cases"
ABSENT_THERE = ("ray", "onnxruntime", "pyarrow", "typer", "rich", "httpx", "pytest")
BLOCKED = f"""
from importlib.machinery import PathFinder
found = PathFinder.find_spec
PathFinder.find_spec = staticmethod(lambda name, *where: None if name.partition(".")[0] in {ABSENT_THERE} else found(name, *where))
"""
"""As sitecustomize.py it takes these packages away from a process and its children."""


def by_name(rows):
    return {row.label.what: (row.verdict, row.note) for row in rows}


def test_whatever_happens_to_a_case_the_others_have_their_rows():
    found = by_name(run([Group("spoilt", SPOILT), Group("broken", "tests.spoilt_cases:broken"), Group("last", SPOILT, only="still")], 600))
    assert found == {
        "holds": ("ok", ""),
        "is not here": ("not run", "no such device"),
        "is off": ("failed", "largest in out"),
        "is NaN": ("failed", ""),
        "raises": ("failed", "RuntimeError: CUDA error: an illegal memory access"),
        "crashes": ("failed", "the process died of SIGSEGV"),
        "leaves": ("failed", "the process ended with status 7"),
        "still holds": ("ok", "after all"),
        "broken": ("failed", "could not start: ImportError: no module named torch"),
    }


def test_a_case_that_hangs_is_ended():
    found = by_name(run([Group("hanging", SPOILT, {"hang_s": 3600.0}, only="hangs")], 1))
    assert found == {"hangs": ("failed", "took longer than 1 s")}


@pytest.mark.parametrize(("only", "status"), [("holds", 0), ("raises", 1), ("no such case", 1)])
def test_the_exit_status_and_the_table_say_what_failed(monkeypatch, capsys, only, status):
    monkeypatch.setattr(first_gpu, "groups", lambda options: [Group("spoilt", SPOILT, only=options.only)])
    assert first_gpu.main(["--only", only]) == status
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert [line.split(" | ")[8] for line in table] == {"holds": ["ok", "ok"], "raises": ["failed"]}.get(only, [])


@pytest.fixture
def sanitizer(tmp_path, monkeypatch):
    """Puts a program that says this in compute-sanitizer's place; it is given its arguments."""

    def install(script):
        (tmp_path / PROGRAM).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / PROGRAM).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.chdir(ROOT)

    return install


def watched_case(name, limit_s=300):
    return watched("memcheck", SPOILT, {}, Label(name), limit_s)


RUNS_IT = "shift 2; \"$@\"; status=$?; echo '========= ERROR SUMMARY: 0 errors'; exit $status"
FINDS_ERRORS = """echo '========= COMPUTE-SANITIZER'
echo '========= Invalid __global__ write of size 4 bytes'
echo '=========     at append_forward+0x60'
echo '========= ERROR SUMMARY: 3 errors'"""


def test_a_case_that_a_sanitizer_watches_is_right_itself_and_without_errors(sanitizer):
    sanitizer(RUNS_IT)
    assert watched_case("holds").holds
    with pytest.raises(RuntimeError, match="status 1: failed largest in out"):
        watched_case("is off")
    with pytest.raises(RuntimeError, match="has no case 'unheard of'"):
        watched_case("unheard of")


def test_errors_that_a_sanitizer_finds_are_counted_and_the_first_is_told(sanitizer):
    sanitizer(FINDS_ERRORS)
    found = watched_case("holds")
    assert (found.holds, found.error, found.note) == (False, 3, "Invalid __global__ write of size 4 bytes")


def test_a_sanitizer_that_hangs_is_ended_with_all_that_it_started(sanitizer, tmp_path):
    sanitizer(f"mkfifo {tmp_path / 'held'}; cat {tmp_path / 'held'}")
    with pytest.raises(subprocess.TimeoutExpired):
        watched_case("holds", limit_s=1)


@pytest.mark.timeout(900)
def test_the_quick_run_is_green_here_with_what_a_gpu_machine_has(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed (pip install triton)")
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "benchmarks.first_gpu", "--quick", "--limit-s", "800", "--out", str(tmp_path / "found")]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = json.loads((tmp_path / "found.json").read_text())
    table = [line for line in ended.stdout.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(rows)
    assert (tmp_path / "found.md").read_text().strip() == ended.stdout.strip()
    assert {row["verdict"] for row in rows} <= {"ok", "not run"}
    assert all(row["note"] for row in rows if row["verdict"] == "not run")
    labels = [Label(**row["label"]) for row in rows]
    assert all(
        Label(f"{PROGRAM} {tool}: {one.what}", one.sizes, one.dtype) in labels for one in WATCHED for tool in ("memcheck", "racecheck")
    )
    assert set(WATCHED) <= set(labels)
    whats = {row["label"]["what"].partition(",")[0] for row in rows if row["verdict"] == "ok"}
    assert whats >= {
        "device",
        "attention",
        "append",
        "norm_mul_dropout",
        "encoder torch",
        "encoder triton",
        "torch_beam",
        "DeviceTier over paged states",
    }
