"""What LocalServe does around what serves, which is a small server here: it writes the file, says when, waits, and ends all of it."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ray.serve._private import api

from cluster import ports
from cluster.errors import BundleError, ConfigError
from deployments.cli import local_serve
from deployments.cli.local_serve import LocalServe, is_ready
from deployments.cli.processes import kill_session, session_members
from deployments.cli.serve import LATER
from tests.bundles import make_bundle
from tests.ports import free_port
from tests.waiting import eventually, until_right

ROOT = Path(__file__).resolve().parents[2]
SERVER = """
import http.server, sys, yaml
port = yaml.safe_load(open(sys.argv[1]))["http_options"]["port"]
if "later" in sys.argv:
    print("waits", flush=True)
    assert sys.stdin.readline()
    print("serves", yaml.safe_load(open(sys.argv[1]))["applications"][0]["args"]["model_dir"], flush=True)
class Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        broken = "broken" in sys.argv
        body = b'{"applications": {"genrec": {"status": "DEPLOY_FAILED", "message": "No module named tiny"}}}' if broken else b""
        self.send_response(503 if self.path == "/readyz" and broken else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
print(f"View the dashboard at http://127.0.0.1:{port}", flush=True)
http.server.HTTPServer(("127.0.0.1", port), Ready).serve_forever()
"""

RUN = """
import os, sys, threading
from deployments.cli import run
def serve_run(_):
    try:
        print("served by", os.getpid(), flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        print("ended in order", flush=True)
run.ray.init = lambda **_: None
run.cli = serve_run
run.main(*sys.argv[1:])
"""
"""What serves, as it is but for Ray and Serve."""
SERVES = """
import sys
from pathlib import Path
from deployments.cli import local_serve
config, model_dir, port, log, run = sys.argv[1:]
local_serve.run_command = lambda file, *rest: [sys.executable, "-c", run, str(file), *rest]
with local_serve.LocalServe(Path(config), {"model_dir": model_dir}, port=int(port), log=Path(log), profile="default"):
    pass
"""


@pytest.fixture
def serving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalServe:
    monkeypatch.setattr(local_serve, "run_command", lambda file, *rest: [sys.executable, "-c", SERVER, str(file), *rest])
    changes = {"model_dir": str(tmp_path / "tiny")}
    return LocalServe(ROOT / "ray_config.yaml", changes, port=free_port(), log=tmp_path / "logs" / "serve.log", profile="default")


def test_it_serves_for_as_long_as_the_block_lasts(serving: LocalServe, tmp_path: Path):
    with pytest.raises(BundleError), serving:
        pass
    make_bundle(tmp_path / "tiny")
    with serving as url:
        assert is_ready(url)
        assert serving.pid
    assert not is_ready(url)
    written = yaml.safe_load((tmp_path / "logs" / "serve.yaml").read_text())
    assert written["applications"][0]["args"]["model_dir"] == str(tmp_path / "tiny")


def test_what_is_served_later_need_not_be_there_when_it_starts(serving: LocalServe, tmp_path: Path):
    log = tmp_path / "logs" / "serve.log"
    serving.start()
    eventually(lambda: "waits" in log.read_text(), "it is started")
    with pytest.raises(BundleError):
        serving.deploy()
    assert "serves" not in log.read_text()
    make_bundle(tmp_path / "tiny")
    serving.deploy()
    serving.wait_until(lambda: is_ready(serving.url))
    assert f"serves {tmp_path / 'tiny'}" in log.read_text()
    serving.close()
    assert not is_ready(serving.url)


def test_an_application_that_serve_gave_up_is_not_waited_for(serving: LocalServe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_bundle(tmp_path / "tiny")
    monkeypatch.setattr(local_serve, "run_command", lambda file, *_: [sys.executable, "-c", SERVER, str(file), "broken"])
    monkeypatch.setattr(local_serve, "STATUS_EVERY_S", 0.1)
    with pytest.raises(ConfigError, match="the application could not be started: No module named tiny; the end of"), serving:
        pass


def test_what_serves_ends_in_order_where_the_process_that_started_it_is_killed(tmp_path: Path):
    make_bundle(tmp_path / "tiny")
    log = tmp_path / "serve.log"
    log.touch()
    ports.release(port := free_port())  # LocalServe claims it
    given = [ROOT / "ray_config.yaml", tmp_path / "tiny", port, log, RUN]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", SERVES, *map(str, given)], env=environment) as serves:
        told = until_right(lambda: re.search(r"served by (\d+)\n", log.read_text()), lambda found: found or serves.poll() is not None)
        serves.kill()
    assert told, log.read_text()
    served_by = int(told[1])
    try:
        eventually(lambda: not session_members(served_by), "it has ended", within_s=60)
    finally:
        kill_session(served_by)
    assert "ended in order" in log.read_text()


def test_serve_can_be_started_with_what_it_is_given():
    taken = inspect.signature(api.serve_start).parameters
    assert {"http_options", "proxy_location", "grpc_options", "controller_options"} <= taken.keys()
    assert LATER == "later"
