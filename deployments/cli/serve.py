"""`genrec serve`: run the application on this machine until Ctrl-C."""

import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from cluster.config import read, read_document
from cluster.errors import ConfigError
from cluster.profile import ProfileName, of_one_machine
from deployments.app import served_bundle
from deployments.cli.config import ConfigFile

Profile = Annotated[ProfileName | None, typer.Option("--profile", help="how requests are carried (default: fast, where it works)")]
ModelDir = Annotated[Path | None, typer.Option(help="the model to serve (default: the configuration's)")]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="where to listen (default: the configuration's)")]


def serve(path: ConfigFile = Path("ray_config.yaml"), *, model_dir: ModelDir = None, port: Port = None, profile: Profile = None) -> None:
    """Check the configuration and the model, then hand over to `serve run`.

    Where RAY_ADDRESS names a cluster, it is deployed there, and the cluster's own profile holds.
    """
    settings = read(path)
    bundle = served_bundle(settings if model_dir is None else settings.model_copy(update={"model_dir": model_dir}))
    typer.echo(f"serving {bundle.version} as {path} says", err=True)
    command = serve_command()
    profiled = {} if "RAY_ADDRESS" in os.environ else of_one_machine(profile)
    config = path if model_dir is None and port is None else _written(changed(read_document(path), model_dir, port))
    os.execve(command, [command, "run", str(config)], {**profiled, **os.environ})  # noqa: S606 - the same command a user would type


def changed(document: dict[str, Any], model_dir: Path | None, port: int | None) -> dict[str, Any]:
    """A Serve configuration with another model, or port; what is None stays."""
    first, *others = document["applications"]
    model = {} if model_dir is None else {"model_dir": str(model_dir.absolute())}
    listens = {} if port is None else {"port": port}
    http = {**(document.get("http_options") or {}), **listens}
    return {**document, "http_options": http, "applications": [{**first, "args": {**(first.get("args") or {}), **model}}, *others]}


def serve_command() -> str:
    """Where Ray Serve's command line stands. Raises ConfigError."""
    beside = Path(sys.executable).with_name("serve")
    found = str(beside) if beside.is_file() else shutil.which("serve")
    if not found:
        raise ConfigError("Ray Serve's command `serve` was not found; install genrec in this environment: pip install 'genrec[cpu]'")
    return found


def _written(document: dict[str, Any]) -> Path:
    """In a file that Serve reads while it starts; this process ends with that of `serve run`, so nobody is left to remove it."""
    with tempfile.NamedTemporaryFile("w", prefix="genrec-", suffix=".yaml", delete=False) as file:
        yaml.safe_dump(document, file, sort_keys=False)
    return Path(file.name)
