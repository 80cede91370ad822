"""`genrec config`: the resolved configuration, and what each key means."""

import json
from pathlib import Path
from typing import Annotated

import typer
import yaml

from cluster.config import Settings, read

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="a Serve config file, as ray_config.yaml")]


def config(
    path: ConfigFile = Path("ray_config.yaml"),
    *,
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON schema: every key, its type, default and meaning")] = False,
) -> None:
    """Print the configuration as genrec resolves it, every default filled in."""
    if schema:
        typer.echo(json.dumps(Settings.model_json_schema(), indent=2))
    else:
        typer.echo(yaml.safe_dump(read(path).model_dump(mode="json"), sort_keys=False), nl=False)
