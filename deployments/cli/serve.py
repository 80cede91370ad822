"""`genrec serve`: run the application on this machine until Ctrl-C."""

import os
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.config import read
from cluster.errors import ConfigError
from cluster.profile import ProfileName, of_one_machine
from deployments.app import served_bundle
from deployments.cli.config import ConfigFile

Profile = Annotated[ProfileName | None, typer.Option("--profile", help="how requests are carried (default: fast, where it works)")]


def serve(path: ConfigFile = Path("ray_config.yaml"), *, profile: Profile = None) -> None:
    """Check the configuration and the model, then hand over to `serve run`.

    Where RAY_ADDRESS names a cluster, it is deployed there, and the cluster's own profile holds.
    """
    typer.echo(f"serving {served_bundle(read(path)).version} as {path} says", err=True)
    command = serve_command()
    profiled = {} if "RAY_ADDRESS" in os.environ else of_one_machine(profile)
    os.execve(command, [command, "run", str(path)], {**profiled, **os.environ})  # noqa: S606 - the same command a user would type


def serve_command() -> str:
    """Where Ray Serve's command line stands. Raises ConfigError."""
    beside = Path(sys.executable).with_name("serve")
    found = str(beside) if beside.is_file() else shutil.which("serve")
    if not found:
        raise ConfigError("Ray Serve's command `serve` was not found; install genrec in this environment: pip install 'genrec[cpu]'")
    return found
