"""`genrec config`: the resolved configuration, and what each key means."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
import yaml

from cluster.config import Settings
from cluster.config_file import read
from cluster.errors import ConfigError
from cluster.traffic.api_keys import masked_tree
from deployments.cli.configuration_reference import configuration_reference

ConfigFile = Annotated[Path, typer.Option("--config", "-c", help="a Serve config file, as ray_config.yaml")]


def config(
    path: ConfigFile = Path("ray_config.yaml"),
    *,
    schema: Annotated[bool, typer.Option("--schema", help="print the JSON schema: every key, its type, default and meaning")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="print the same as a page: docs/configuration.md")] = False,
) -> None:
    """Print the configuration as genrec resolves it, every default filled in; passwords and keys are left out. Warns of backends
    of your own that cannot be imported here or do not take their options, and of API keys that expire within 14 days.
    """
    if schema and markdown:
        raise ConfigError("--schema and --markdown are two forms of the same; give one of them")
    if markdown:
        typer.echo(configuration_reference(), nl=False)
    elif schema:
        typer.echo(json.dumps(Settings.model_json_schema(), indent=2))
    else:
        find_own_modules()
        typer.echo(yaml.safe_dump(masked_tree(read(path, tries_options=True).model_dump(mode="json")), sort_keys=False), nl=False)


def find_own_modules() -> None:
    """Have Python look for modules in the directory where the command is called, as under `genrec serve`: one's own usually lie there."""
    if "" not in sys.path:
        sys.path.insert(0, "")
