"""Serve on this machine for as long as a `with` block lasts: `serve run` in a process of its own, on a Ray cluster of its own.

with LocalServe(Path("ray_config.yaml"), {"model_dir": "models/ml-100k"}, port=8000, log=Path("serve.log")) as url:
    httpx.post(f"{url}/v1/recommend", json=...)
"""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from cluster.config import parse, read_document
from cluster.errors import ConfigError
from deployments.app import pin_version
from deployments.cli.serve import serve_command

READY_WITHIN_S = 400.0
STOP_WITHIN_S = 30.0
LOG_TAIL_LINES = 25


class LocalServe:
    """What `config` describes, with the keys of `changes` in place of its own, listening on 127.0.0.1 only.

    Entering returns the base URL once requests are answered. Raises ConfigError where the port is taken, the configuration or the model
    is refused, or nothing is ready in time; the message ends with the log's last lines.
    """

    def __init__(self, config: Path, changes: Mapping[str, Any], *, port: int, log: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._config, self._changes, self._port, self._log = config, changes, port, log
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> str:
        require_free(self._port)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        written = self._log.with_suffix(".yaml")
        written.write_text(yaml.safe_dump(self._document(), sort_keys=False))
        command = [serve_command(), "run", "--address", "local", str(written)]
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
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

    def _document(self) -> dict[str, Any]:
        """The Serve configuration to run. Raises ConfigError or BundleError where genrec's part of it cannot be served."""
        document = read_document(self._config)
        document["http_options"] = {**(document.get("http_options") or {}), "host": "127.0.0.1", "port": self._port}
        application = document["applications"][0]
        settings = pin_version(parse({**(application.get("args") or {}), **self._changes}, str(self._config)))
        application["args"] = {**(application.get("args") or {}), **self._changes, "model_dir": str(settings.model_dir)}
        return document

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
        try:
            process.wait(STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def is_ready(url: str) -> bool:
    """Whether a server at `url` says that it can answer."""
    try:
        return httpx.get(f"{url}/readyz", timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False


def require_free(port: int) -> None:
    """Raises ConfigError where something listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of this machine cannot be had ({error.strerror}); stop what uses it or give another --port"
            ) from error
