"""A process of tests that hangs where no timeout of pytest reaches it."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import hangs
from tests.clusters import READY_WITHIN_S

ROOT = Path(__file__).resolve().parents[2]
RUN = "import pytest, tests.hangs; tests.hangs.LATER_S = 1; pytest.main(['-p', 'tests.hangs', '-o', 'timeout=1', '-q', '.'])"
TIMEOUT = re.compile(r"mark\.timeout\((.*?)\)")
STARTS_S = 100
"""Of a limit, for the start of Ray before that, and for the test after it."""
FOR_EVER = "threading.Event().wait()"
IN_C = f"import signal, threading\n\ndef test_hangs():\n    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])\n    {FOR_EVER}\n"
AT_THE_END = f"import threading\n\ndef pytest_sessionfinish():\n    {FOR_EVER}\n"


@pytest.mark.parametrize(("name", "code"), [("test_it.py", IN_C), ("conftest.py", AT_THE_END)])
def test_it_ends_and_says_what_it_was_doing(tmp_path, name, code):
    (tmp_path / "test_none.py").write_text("def test_none():\n    pass\n")
    (tmp_path / name).write_text(code)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {RUN}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "(most recent call first)" in done.stderr


def test_the_document_says_after_how_many_minutes_a_test_and_its_process_end(pytestconfig):
    told = re.search(r"A test ends after (\d+) minutes\..*? its process ends (\d+) minutes later", (ROOT / "CONTRIBUTING.md").read_text())
    assert [60 * int(minutes) for minutes in told.groups()] == [int(pytestconfig.getini("timeout")), hangs.LATER_S]


def test_no_test_has_less_time_than_a_shared_cluster_may_take_to_be_ready(pytestconfig):
    """A test's timeout counts the fixtures that it is the first to ask for."""
    least = READY_WITHIN_S + STARTS_S
    limits = {
        f"{file.relative_to(ROOT)}: {factors}": math.prod(map(int, factors.split("*")))
        for file in (ROOT / "tests").rglob("test_*.py")
        for factors in TIMEOUT.findall(file.read_text())
    }
    assert int(pytestconfig.getini("timeout")) >= least
    assert limits
    assert {mark: seconds for mark, seconds in limits.items() if seconds < least} == {}
