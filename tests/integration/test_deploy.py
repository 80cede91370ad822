"""Plain `serve deploy ray_config.yaml` on a cluster that `ray start` made, as a user would; then a change without a restart."""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from deployments.cli.local_serve import is_ready
from deployments.cli.serve import serve_command
from tests.documents import ROOT
from tests.integration.conftest import behaviours
from tests.ports import free_port
from tests.waiting import eventually, until_right

pytestmark = pytest.mark.cluster


@pytest.fixture(autouse=True)
def _with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray guards a cluster that `ray start` made by a token, and its clients must be told to send one."""
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))


@contextmanager
def ray_head(directory: Path) -> Iterator[str]:
    """The dashboard address of a head node started with `ray start`, in `directory` as its working directory."""
    dashboard = free_port()
    ray = str(Path(serve_command()).with_name("ray"))
    named = ("port", "ray-client-server-port", "dashboard-agent-listen-port")
    # workers' are the system's choice: the ranges that Ray has itself are for one cluster a machine
    ports = [f"--dashboard-port={dashboard}", *(f"--{name}={free_port()}" for name in named), "--min-worker-port=0", "--max-worker-port=0"]
    temporary = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short enough for sockets, and no other Ray on this machine takes notice
    command = [ray, "start", "--head", "--block", "--disable-usage-stats", "--temp-dir", temporary, *ports]
    with (directory / "ray.log").open("wb") as log:
        head = subprocess.Popen(command, cwd=directory, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        yield f"http://127.0.0.1:{dashboard}"
    finally:
        head.send_signal(signal.SIGTERM)
        try:
            head.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
            head.wait()
        shutil.rmtree(temporary, ignore_errors=True)


def deploy(config: Path, dashboard: str) -> None:
    """`serve deploy` once the dashboard answers, since a try in vain takes a second of processor time; again while Serve does not."""
    command = [serve_command(), "deploy", str(config), "--address", dashboard]
    eventually(lambda: httpx.get(dashboard), "the dashboard answers")
    until_right(
        lambda: subprocess.run(command, capture_output=True, text=True, check=False),
        lambda done: done.returncode == 0,
        within_s=300,
        every_s=1,
    )


def at_rest(dashboard: str) -> set[int]:
    """The processes of the encoder's replicas, once Serve is about to change nothing of them."""
    headers = {"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}

    def encoder() -> dict[str, Any]:
        response = httpx.get(f"{dashboard}/api/serve/applications/", headers=headers, timeout=120)
        applications = response.json()["applications"].values() if response.is_success else ()
        return next((one["deployments"]["encoder"] for one in applications), {})

    told = until_right(encoder, lambda seen: seen.get("status") == "HEALTHY")
    return {replica["pid"] for replica in told["replicas"] if replica["state"] == "RUNNING"}


def test_serve_deploy_serves_and_a_new_user_config_changes_engines_without_a_restart(compiled_hstu, tmp_path: Path):
    """The file is deployed as it is but for the port and the number of encoders: its `model_dir` is found from where Ray was started."""
    shutil.copytree(compiled_hstu.path.parent, tmp_path / "models" / "ml-100k")
    document = yaml.safe_load((ROOT / "ray_config.yaml").read_text())
    document["http_options"] |= {"host": "127.0.0.1", "port": free_port()}
    encoder = next(one for one in document["applications"][0]["deployments"] if one["name"] == "encoder")
    encoder["autoscaling_config"]["max_replicas"] = 1  # so that a replica that is new is one that was restarted
    config, url = tmp_path / "ray_config.yaml", f"http://127.0.0.1:{document['http_options']['port']}"
    request = {"user_id": "ada", "behaviours": behaviours(1, 2, 3), "cache": "bypass"}

    def served_by() -> str:
        response = httpx.post(f"{url}/v1/recommend", json=request, timeout=120)
        if response.status_code in (408, 503, 504):  # the limits are those that are shipped, and this machine may be busy
            return ""
        assert response.status_code == 200, response.text
        return response.json()["stages"][-1]["backend"]

    with ray_head(tmp_path) as dashboard:
        config.write_text(yaml.safe_dump(document))
        deploy(config, dashboard)
        eventually(lambda: is_ready(url), "ready")
        eventually(lambda: served_by() == "onnxruntime", "onnxruntime serves")
        before = at_rest(dashboard)

        encoder["user_config"] = {"order": ["tensorrt", "torch"], "selection": "ordered", "disabled": []}
        config.write_text(yaml.safe_dump(document))
        deploy(config, dashboard)
        eventually(lambda: served_by() == "torch", "torch serves")
        assert at_rest(dashboard) == before, "the replica was not restarted"
