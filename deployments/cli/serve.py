"""`genrec serve`: run the application on this machine until Ctrl-C, SIGTERM or the end of its terminal."""

import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cluster import ports
from cluster.config_file import read, read_document
from cluster.errors import ConfigError
from cluster.profile import ProfileName, free_block, of_one_machine
from cluster.serve_keys import SERVES_PORT
from cluster.served import served_bundle
from deployments.cli.config import ConfigFile
from deployments.sizing.fit import require_all_fit
from deployments.sizing.processes import replicas

LATER = "later"
Profile = Annotated[ProfileName | None, typer.Option("--profile", help="how requests are carried (default: fast, where it works)")]
ModelDir = Annotated[Path | None, typer.Option(help="the model to serve (default: the configuration's)")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="where to listen (default: the configuration's)")]
Host = Annotated[str | None, typer.Option(help="the address to listen on, as 0.0.0.0 in a container (default: the configuration's)")]


def serve(
    path: ConfigFile = Path("ray_config.yaml"),
    *,
    model_dir: ModelDir = None,
    host: Host = None,
    port: Port = None,
    profile: Profile = None,
) -> None:
    """Check the configuration and the model, then serve until Ctrl-C, SIGTERM or the end of its terminal.

    Where RAY_ADDRESS names a cluster, it is deployed there, and the cluster's own profile holds.
    """
    settings, document = read(path, host), read_document(path)
    bundle = served_bundle(settings if model_dir is None else settings.model_copy(update={"model_dir": model_dir}))
    wanted = changed(document, model_dir, port, host)
    alone = not os.environ.get("RAY_ADDRESS")
    if alone:  # elsewhere its processes may be on several machines, and each looks for itself
        require_all_fit(settings, bundle, replicas(document, most=False))
    profiled = _alone(wanted["http_options"], profile) if alone else {}
    typer.echo(f"serving {bundle.version} as {path} says", err=True)
    as_it_is = model_dir is None and host is None and port is None
    config = path if as_it_is else _written(wanted)
    os.execve(sys.executable, run_command(config), {**profiled, **os.environ})  # noqa: S606 - one process serves, and gets the signals


def _alone(http: Mapping[str, Any], profile: ProfileName | None) -> dict[str, str]:
    """The environment of a separate cluster. The claims on its port and its block of ports outlive this program's `execve`."""
    port = int(http.get("port", SERVES_PORT))
    ports.require_free(port, http.get("host") or "")  # without a host Serve listens at every address
    block = free_block()
    for file in ports.descriptors(port, block):
        os.set_inheritable(file, True)
    return of_one_machine(block, profile, http_port=port)


def changed(document: dict[str, Any], model_dir: Path | None, port: int | None, host: str | None = None) -> dict[str, Any]:
    """A Serve configuration with another model, port or address; what is None stays."""
    first, *others = document["applications"]
    model = {} if model_dir is None else {"model_dir": str(model_dir.absolute())}
    listens = {name: value for name, value in (("host", host), ("port", port)) if value is not None}
    http = {**(document.get("http_options") or {}), **listens}
    return {**document, "http_options": http, "applications": [{**first, "args": {**(first.get("args") or {}), **model}}, *others]}


def run_command(config: Path, *address: str) -> list[str]:
    """The command that serves a file, in this environment's Python; an address may be followed by LATER."""
    return [sys.executable, "-m", "deployments.cli.run", str(config), *address]


def serve_command() -> str:
    """The path of Ray Serve's command line. Raises ConfigError where there is none."""
    beside = Path(sys.executable).with_name("serve")
    found = str(beside) if beside.is_file() else shutil.which("serve")
    if not found:
        raise ConfigError("Ray Serve's command `serve` was not found; install genrec with its extra cpu in this environment")
    return found


def _written(document: dict[str, Any]) -> Path:
    """The document in a file, which Serve reads while it starts; this process becomes `serve run`, so none is left to remove the file."""
    with tempfile.NamedTemporaryFile("w", prefix="genrec-", suffix=".yaml", delete=False) as file:
        yaml.safe_dump(document, file, sort_keys=False)
    return Path(file.name)
