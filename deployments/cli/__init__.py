"""The command `genrec`."""

import importlib
import sys
from errno import EDQUOT, ENOSPC
from pathlib import Path

import typer

from cluster.errors import GenrecError
from deployments.cli.empty_paths import refuse_empty_paths

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, help="Train, compile and serve generative recommenders on a Ray Serve cluster."
)

COMMANDS = {
    "demo": "deployments.cli.demo:demo",
    "init": "deployments.cli.init:init",
    "serve": "deployments.cli.serve:serve",
    "cluster": "deployments.cli.cluster:app",
    "data": "deployments.cli.data:app",
    "train": "deployments.cli.train:train",
    "train-ranker": "deployments.cli.train_ranker:train_ranker",
    "evaluate": "deployments.cli.evaluate:evaluate",
    "import": "deployments.cli.import_:app",
    "add-items": "deployments.cli.add_items:add_items",
    "models": "deployments.cli.models:app",
    "compile": "deployments.cli.compile:compile_",
    "events": "deployments.cli.events:app",
    "backends": "deployments.cli.backends:app",
    "top": "deployments.cli.top:top",
    "size": "deployments.cli.size:size",
    "bench": "deployments.cli.bench:app",
    "keys": "deployments.cli.keys:app",
    "config": "deployments.cli.config:config",
}

OURS = ("cluster", "deployments", "integrations", "pipelines")
"""The packages of genrec: one of their modules that is not there is a bug."""
NO_ROOM = (ENOSPC, EDQUOT)
"""Errors of a full disk; where a write raises them, they may name no file."""


@app.callback()
def genrec() -> None:
    """Keep the command's name on the command line though only the one that is called is registered."""


def main() -> None:
    """Run the command line. An error meant for people, a file that cannot be had, or an engine that is not installed, is printed as one
    line, with exit status 1.
    """
    try:
        _register()
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in OURS:
            raise
        typer.secho(f"genrec: {error}; install genrec with its extra cpu (on a GPU machine: gpu)", fg="red", err=True)
        sys.exit(1)
    try:
        refuse_empty_paths(app, sys.argv[1:])
        app()
    except (GenrecError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno not in NO_ROOM:
            raise
        typer.secho(f"genrec: {_said(error)}", fg="red", err=True)
        sys.exit(1)


def _said(error: GenrecError | OSError) -> str:
    """The error, with the cure where the system's own words have none."""
    if isinstance(error, FileExistsError) and error.filename and Path(error.filename).is_file():
        return f"{error.filename} is a file, and no directory; name another one"
    return f"{error}; make room" if isinstance(error, OSError) and error.errno in NO_ROOM else str(error)


def _register() -> None:
    """Import only the command that is called, or all of them for help: some load torch, some Ray."""
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    for name, target in COMMANDS.items():
        if asked in COMMANDS and asked != name:
            continue
        module, attribute = target.split(":")
        command = getattr(importlib.import_module(module), attribute)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)
