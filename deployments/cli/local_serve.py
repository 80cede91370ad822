"""Serve on this machine for as long as a `with` block lasts: `genrec serve` in a process of its own, on a Ray cluster of its own.

What serves ends in order with the block, and where the process that serves by it is killed.

    with LocalServe(Path("ray_config.yaml"), {"model_dir": "models/ml-100k"}, port=8000, log=Path("serve.log")) as url:
        httpx.post(f"{url}/v1/recommend", json=...)

In steps, where the model is made ready while Ray and Serve start:

    with closing(LocalServe(...)) as serving:
        serving.start()
        ...
        serving.deploy()
        serving.wait_until(is_ready)
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import yaml

from cluster import ports
from cluster.config import parse
from cluster.config_file import read_document
from cluster.errors import ConfigError
from cluster.profile import ProfileName, free_block, of_one_machine
from cluster.served import served_bundle
from deployments.cli.processes import kill_session
from deployments.cli.serve import LATER, run_command
from deployments.sizing.fit import require_all_fit
from deployments.sizing.processes import replicas

READY_WITHIN_S = 400.0
POLL_S = 0.3
STATUS_EVERY_S = 3.0
"""How often Serve is asked whether it still tries to start the application."""
STOP_WITHIN_S = 30.0
LOG_TAIL_LINES = 25
APPLICATION = "genrec"


class LocalServe:
    """The application that `config` describes, with the keys of `changes` in place of its own, listening on 127.0.0.1 only.

    `profile`: one of `cluster.profile`; None: the fast one where it works. Variables that the environment has already go before it.
    The `with` block is given the base URL once requests are answered. Raises ConfigError where the port is taken, the configuration or the
    model is refused, or nothing is ready in time; the message ends with the log's last lines.
    """

    def __init__(self, config: Path, changes: Mapping[str, Any], *, port: int, log: Path, profile: ProfileName | None = None) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._config, self._changes, self._port, self._log, self._profile = config, changes, port, log, profile
        self._process: subprocess.Popen[bytes] | None = None
        self._block = 0

    def __enter__(self) -> str:
        document = local_document(self._config, self._changes, self._port)
        try:
            self._start(document)
            self.wait_until(lambda: is_ready(self.url))
        except BaseException:
            self.close()
            raise
        return self.url

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Begin to start Ray and Serve. The model that they are to serve need not be there yet."""
        self._start(local_document(self._config, self._changes, self._port, checked=False), LATER)

    def deploy(self) -> None:
        """After `start`: have the application served as soon as Ray and Serve run."""
        self._write(local_document(self._config, self._changes, self._port))
        if self._process is not None and self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it has ended, and what waits for it hears so
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until `holds` is true. Raises ConfigError where it is not in time, or the service has ended or given the application up."""
        deadline, status_at = time.monotonic() + READY_WITHIN_S, time.monotonic() + STATUS_EVERY_S
        while not holds():
            if self._process is None or self._process.poll() is not None:
                status = "before it was started" if self._process is None else f"with status {self._process.returncode}"
                raise ConfigError(f"the service ended {status}; {tail(self._log)}")
            if time.monotonic() > status_at:
                if problem := self._given_up():
                    raise ConfigError(f"the application could not be started: {problem}; {tail(self._log)}")
                status_at = time.monotonic() + STATUS_EVERY_S
            if time.monotonic() > deadline:
                raise ConfigError(f"nothing was ready on {self.url} within {READY_WITHIN_S:g} s; {tail(self._log)}")
            time.sleep(POLL_S)

    def close(self) -> None:
        """End all processes of the service."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_WITHIN_S)
        kill_session(process.pid)  # what did not end with it; HAProxy outlives a proxy that was killed
        process.wait()
        if process.stdin:
            process.stdin.close()
        ports.release(self._block)

    @property
    def pid(self) -> int:
        """The process of `genrec serve`, from which all of Ray's descend. Raises ConfigError where none runs."""
        if self._process is None:
            raise ConfigError("nothing is served yet; enter the `with` block first")
        return self._process.pid

    @property
    def dashboard(self) -> str:
        """The dashboard's address, read from the log: another cluster of this machine may have the usual port. Raises ConfigError."""
        if found := re.search(r"View the dashboard at \S*?(http://[\d.]+:\d+)", self._log.read_text(errors="replace")):
            return found[1]
        raise ConfigError(f"{self._log} names no dashboard; nothing is served yet")

    def running(self, deployment: str) -> set[int]:
        """The processes of a deployment's replicas that Serve gives requests to. A controller that is away raises a TransportError."""
        replicas = self._application()["deployments"][deployment]["replicas"]
        return {replica["pid"] for replica in replicas if replica["state"] == "RUNNING"}

    def _application(self) -> dict[str, Any]:
        """The application as Serve's controller describes it. Raises TransportError while the controller is away, and ConfigError or
        KeyError before it knows the application.
        """
        headers = {"Authorization": f"Bearer {auth_token()}"}
        answer = httpx.get(f"{self.dashboard}/api/serve/applications/", headers=headers, timeout=20.0)
        if answer.status_code != 200:
            raise httpx.ReadError(f"{answer.status_code} {answer.text[:200]}")
        application: dict[str, Any] = answer.json()["applications"][APPLICATION]
        return application

    def _given_up(self) -> str:
        """Why Serve has given up starting the application; "" where it has not, or cannot be asked."""
        with suppress(httpx.TransportError, ConfigError, KeyError):
            application = self._application()
            if application["status"] == "DEPLOY_FAILED":
                return str(application["message"])
        return ""

    def _start(self, document: Mapping[str, Any], *when: str) -> None:
        ports.require_free(self._port)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._write(document)
        self._block = free_block()
        profiled = of_one_machine(self._block, self._profile, http_port=self._port)
        environment = {**profiled, **os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        with self._log.open("wb") as output:
            # a session of its own: Ctrl-C in the terminal reaches us alone, and we stop it in order; where we are killed, its input ends
            self._process = subprocess.Popen(
                run_command(self._file, "local", *when),
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment,
                pass_fds=ports.descriptors(self._port, self._block),
            )

    @property
    def _file(self) -> Path:
        return self._log.with_suffix(".yaml")

    def _write(self, document: Mapping[str, Any]) -> None:
        self._file.write_text(yaml.safe_dump(dict(document), sort_keys=False))


def local_document(config: Path, changes: Mapping[str, Any], port: int, *, checked: bool = True) -> dict[str, Any]:
    """The Serve configuration to run on this machine alone. Raises ConfigError or, where it is `checked`, BundleError for a model that
    cannot be served.
    """
    document = read_document(config)
    document["http_options"] = {**(document.get("http_options") or {}), "host": "127.0.0.1", "port": port}
    application = document["applications"][0]
    settings = parse({**(application.get("args") or {}), **changes}, str(config))
    if checked:
        require_all_fit(settings, served_bundle(settings), replicas(document, most=False))
    application["args"] = {**(application.get("args") or {}), **changes, "model_dir": str(settings.model_dir.absolute())}
    return document


def auth_token() -> str:
    """Ray's token for its dashboard, from where Ray's own commands take it; "" where there is none."""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    return path.read_text().strip() if path.is_file() else ""


def tail(log: Path) -> str:
    """The last lines of a log, for the end of a message."""
    lines = log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n  ".join([f"the end of {log}:", *lines])


def is_ready(url: str) -> bool:
    """Whether a server at `url` says that it can answer."""
    try:
        return httpx.get(f"{url}/readyz", timeout=2.0).status_code == 200
    except httpx.TransportError:
        return False
