"""A bare Ray of the tests whose first node takes longer to start than Ray waits."""

import subprocess
import sys

import psutil
import pytest
import ray

from deployments.cli.local_cluster import TOO_SLOW
from tests.bare_ray import BareRay
from tests.waiting import eventually


@pytest.mark.parametrize("cyclic", [False, True], ids=["freed with the error", "freed by the collector"])
def test_a_node_that_was_too_slow_is_ended_without_a_warning_and_another_one_is_started(monkeypatch: pytest.MonkeyPatch, cyclic: bool):
    started = []

    def init(**_: object) -> None:
        if not started:
            node = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
            started.append(psutil.Process(node.pid))
            error = Exception(f"The current node {TOO_SLOW}.")
            error.node = [node, error] if cyclic else [node]
            try:
                raise error
            finally:
                del error, node

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    BareRay().start()
    eventually(lambda: not started[0].is_running() or started[0].status() == psutil.STATUS_ZOMBIE, "it has ended")
