"""Commands end in order at signals, though their terminal is gone."""

import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.documents import ROOT

RUNS = """
import os, signal, sys, threading
from pathlib import Path
from deployments.cli.signals import end_in_order
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run with `nohup`
end_in_order()
os.open(os.ttyname(0), os.O_RDWR)  # by which it becomes the terminal of this session
try:
    print("runs", flush=True)
    threading.Event().wait()
except KeyboardInterrupt:
    print("ends", flush=True)
    Path(sys.argv[1]).write_text("ended in order")
"""


def test_a_program_whose_terminal_is_closed_ends_in_order_whatever_it_prints(tmp_path: Path):
    ours, its = pty.openpty()
    command = [sys.executable, "-c", RUNS, str(tmp_path / "end")]
    with subprocess.Popen(command, cwd=ROOT, stdin=its, stdout=its, stderr=its, start_new_session=True) as runs:
        os.close(its)
        assert os.read(ours, 4) == b"runs"
        os.close(ours)
    assert runs.returncode == 0
    assert (tmp_path / "end").read_text() == "ended in order"
