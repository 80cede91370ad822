"""Serve on this machine for as long as a `with` block lasts: `serve run` in a process of its own, on a Ray cluster of its own.

with LocalServe(Path("ray_config.yaml"), {"model_dir": "models/ml-100k"}, port=8000, log=Path("serve.log")) as url:
    httpx.post(f"{url}/v1/recommend", json=...)
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from cluster.config import parse, read_document
from cluster.errors import ConfigError
from cluster.profile import ProfileName, is_free, of_one_machine
from deployments.app import resolved
from deployments.cli.processes import kill_session
from deployments.cli.serve import serve_command

READY_WITHIN_S = 400.0
STOP_WITHIN_S = 30.0
LOG_TAIL_LINES = 25
APPLICATION = "genrec"


class LocalServe:
    """What `config` describes, with the keys of `changes` in place of its own, listening on 127.0.0.1 only.

    `profile` is one of `cluster.profile`; None is the fast one where it works. What the environment says already goes before it.
    Entering returns the base URL once requests are answered. Raises ConfigError where the port is taken, the configuration or the model
    is refused, or nothing is ready in time; the message ends with the log's last lines.
    """

    def __init__(self, config: Path, changes: Mapping[str, Any], *, port: int, log: Path, profile: ProfileName | None = None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._config, self._changes, self._port, self._log, self._profile = config, changes, port, log, profile
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> str:
        require_free(self._port)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        written = self._log.with_suffix(".yaml")
        written.write_text(yaml.safe_dump(local_document(self._config, self._changes, self._port), sort_keys=False))
        command = [serve_command(), "run", "--address", "local", str(written)]
        environment = {**of_one_machine(self._profile), **os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        with self._log.open("wb") as output:
            # a session of its own: Ctrl-C in the terminal reaches us alone, and we stop it in order
            self._process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment)
        try:
            self._wait_until_ready(self._process)
        except BaseException:
            self._stop(self._process)
            raise
        return self.url

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process:
            self._stop(self._process)

    @property
    def pid(self) -> int:
        """The process that serves, of which Ray's all descend. Raises ConfigError where none runs."""
        if self._process is None:
            raise ConfigError("nothing is served yet; enter the `with` block first")
        return self._process.pid

    @property
    def dashboard(self) -> str:
        """Its address, as the log tells it: another cluster of this machine may have the usual port. Raises ConfigError."""
        if found := re.search(r"View the dashboard at \S*?(http://[\d.]+:\d+)", self._log.read_text(errors="replace")):
            return found[1]
        raise ConfigError(f"{self._log} names no dashboard; nothing is served yet")

    def running(self, deployment: str) -> set[int]:
        """The processes of a deployment's replicas that Serve gives requests to. A controller that is away raises a TransportError."""
        headers = {"Authorization": f"Bearer {auth_token()}"}
        answer = httpx.get(f"{self.dashboard}/api/serve/applications/", headers=headers, timeout=20.0)
        if answer.status_code != 200:
            raise httpx.ReadError(f"{answer.status_code} {answer.text[:200]}")
        replicas = answer.json()["applications"][APPLICATION]["deployments"][deployment]["replicas"]
        return {replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise ConfigError(f"`serve run` ended with status {process.returncode}; {self._tail()}")
            if is_ready(self.url):
                return
            time.sleep(0.3)
        raise ConfigError(f"nothing was ready on {self.url} within {READY_WITHIN_S:g} s; {self._tail()}")

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n  ".join([f"the end of {self._log}:", *lines])

    @staticmethod
    def _stop(process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_WITHIN_S)
        kill_session(process.pid)  # what did not end with it; HAProxy outlives a proxy that was killed
        process.wait()


def local_document(config: Path, changes: Mapping[str, Any], port: int) -> dict[str, Any]:
    """The Serve configuration to run on this machine alone. Raises ConfigError or BundleError where genrec's part is refused."""
    document = read_document(config)
    document["http_options"] = {**(document.get("http_options") or {}), "host": "127.0.0.1", "port": port}
    application = document["applications"][0]
    settings = resolved(parse({**(application.get("args") or {}), **changes}, str(config)))
    application["args"] = {**(application.get("args") or {}), **changes, "model_dir": str(settings.model_dir)}
    return document


def auth_token() -> str:
    """What Ray's own commands show a dashboard, looked for where they look for it; "" where there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path.read_text().strip() if path.is_file() else ""


def is_ready(url: str) -> bool:
    """Whether a server at `url` says that it can answer."""
    try:
        return httpx.get(f"{url}/readyz", timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False


def require_free(port: int) -> None:
    """Raises ConfigError where something listens on the port already."""
    if not is_free(port, "127.0.0.1"):
        raise ConfigError(f"port {port} of this machine cannot be had; stop what uses it or give another --port")
