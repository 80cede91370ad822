"""`genrec serve`: run the application on this machine until Ctrl-C."""

import os
import shutil
import sys
from pathlib import Path

import typer

from cluster.config import read
from cluster.errors import ConfigError
from deployments.app import pin_version
from deployments.cli.config import ConfigFile


def serve(path: ConfigFile = Path("ray_config.yaml")) -> None:
    """Check the configuration and the model, then hand over to `serve run`."""
    pinned = pin_version(read(path))
    typer.echo(f"serving {pinned.model_dir.name}/{pinned.version} as {path} says", err=True)
    command = serve_command()
    os.execv(command, [command, "run", str(path)])  # noqa: S606 - the same command a user would type


def serve_command() -> str:
    """Where Ray Serve's command line stands. Raises ConfigError."""
    beside = Path(sys.executable).with_name("serve")
    found = str(beside) if beside.is_file() else shutil.which("serve")
    if not found:
        raise ConfigError("Ray Serve's command `serve` was not found; install genrec in this environment: pip install 'genrec[cpu]'")
    return found
