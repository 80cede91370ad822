"""`genrec keys`: keys for callers of the API."""

import math
from datetime import UTC, datetime
from typing import Annotated, get_args

import typer
import yaml

from cluster.config import parse
from cluster.errors import ConfigError
from cluster.traffic import api_keys

app = typer.Typer(no_args_is_help=True, help="Make keys for callers of the API.")


@app.callback()
def keys() -> None:
    """Keep the name of the only command on the command line."""


@app.command()
def new(
    name: Annotated[str, typer.Option(help="the key's owner, for people")],
    tenant: Annotated[str | None, typer.Option(help="the only tenant it may act for, and see events of; default: any")] = None,
    right: Annotated[list[str] | None, typer.Option(help="read, events, erase or operate; repeatable; default: the first three")] = None,
    expires: Annotated[str | None, typer.Option(help="2027-01-31, or 2027-01-31T18:00:00+01:00; default: never")] = None,
) -> None:
    """Make a key. It is printed once, on the standard output, and kept nowhere; what the configuration needs goes to the standard error."""
    if unknown := set(right or ()) - set(rights := get_args(api_keys.Right)):
        raise ConfigError(f"--right {min(unknown)} is no right; choose from {', '.join(rights)}")
    if tenant is not None and "operate" in (right or ()):
        raise ConfigError("--right operate acts for all tenants; leave --tenant out, or make a second key for what operates")
    key = api_keys.new_key()
    asked = {"name": name, "sha256": api_keys.digest(key.encode()), "tenant": tenant, "rights": right, "expires": expires}
    entry = {field: value for field, value in asked.items() if value is not None}
    [made] = parse({"gateway": {"api_keys": [entry]}}, "genrec keys new").gateway.api_keys
    if made.expires is not None and made.expires <= (now := datetime.now(UTC)):
        cure = "name a later one, or leave it out for a key that never expires"
        raise ConfigError(f"--expires {expires} is past: it is {now:%Y-%m-%dT%H:%M:%SZ}; {cure}")
    typer.echo(key)
    typer.echo("Keep it: it is not shown again. Add this under gateway.api_keys, and deploy the configuration:", err=True)
    typer.echo(f"  - {{{', '.join(f'{field}: {_quoted(value)}' for field, value in entry.items())}}}", err=True)
    if made.tenant not in (None, "default"):
        cure = f"import them by: genrec events import ... --tenant {made.tenant}"
        typer.echo(f"It sees the events of the tenant {made.tenant} alone, not those of `default`; {cure}", err=True)


def _quoted(value: str | list[str]) -> str:
    """The value as YAML in ASCII. JSON will not do: it writes characters beyond 16 bits as two escapes, which YAML reads as two halves."""
    return yaml.safe_dump(value, default_style='"', default_flow_style=True, width=math.inf).strip()
