"""`genrec backends check`: does a backend do what its stage relies on? Needs neither Ray nor a model."""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster import registry
from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.checks.report import Report, Result
from cluster.checks.suite import CASES, LIMIT_S
from cluster.checks.suite import check as run_checks
from cluster.errors import ConfigError, UnknownChoice

UNAVAILABLE = 3
"""The exit status where the backend cannot run here, so that it is neither right nor wrong. 1: a check failed; 2: the command is wrong."""
_COLOURS = {Result.PASSED: "green", Result.FAILED: "red", Result.SKIPPED: "yellow"}


def check(
    backend: Annotated[str, typer.Argument(metavar="MODULE:CLASS", help="the backend, or the name of one that is registered")],
    *,
    stage: Annotated[str, typer.Option(help=f"which stage it is for: {', '.join(CASES)}")] = "encoder",
    option: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="an option of the backend's, in YAML; repeatable")] = None,
    model_dir: Annotated[Path | None, typer.Option(help="check it with this model (default: a small one of random numbers)")] = None,
    version: Annotated[int | None, typer.Option(help="which of the model's versions (default: the current one)")] = None,
    limit_s: Annotated[float, typer.Option(help="how many seconds a check may take", min=0.001)] = LIMIT_S,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Check a backend: exit status 0 where it passes, 1 where a check fails, 3 where it says that it cannot run here."""
    if stage not in CASES:
        raise UnknownChoice("stage", stage, CASES)
    options = _options(option or [])
    with _bundle(model_dir, version) as bundle:
        report = run_checks(_import_string(backend, stage), stage, bundle, options=options, limit_s=limit_s)
    if as_json:
        typer.echo(json.dumps(asdict(report) | {"failed": report.failed}, indent=2))
    else:
        _print(report, made=model_dir is None)
    raise typer.Exit(1 if report.failed else UNAVAILABLE if report.unavailable else 0)


def _import_string(backend: str, stage: str) -> str:
    """The import string of a backend that is given by name or as MODULE:CLASS. Raises UnknownChoice."""
    if ":" in backend:
        return backend
    table = registry.backends(stage)
    if backend not in table:
        raise UnknownChoice(f"{stage} backend", backend, [*table, "module:Class"])
    return table[backend]


def _options(pairs: list[str]) -> Mapping[str, Any]:
    """Name -> value, read as YAML. Raises ConfigError where an option is not NAME=VALUE."""
    options = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name.isidentifier() and equals):
            raise ConfigError(f"--option {pair!r} is not NAME=VALUE, as in --option url=http://localhost:8000")
        try:
            options[name] = yaml.safe_load(value)
        except (ValueError, yaml.YAMLError) as error:  # the former at a date that there is not
            raise ConfigError(f"--option {pair!r}: its value is not YAML: {error}") from error
    return options


@contextmanager
def _bundle(model_dir: Path | None, version: int | None) -> Iterator[Bundle]:
    """The model that the options name, or a small one made for the check."""
    if model_dir is not None:
        yield BundleStore(model_dir).open(version)
        return
    try:
        from integrations.hstu.random_bundles import make_complete_bundle  # noqa: PLC0415 - needs torch, which a model of one's own does not
    except ImportError as error:
        raise ConfigError(
            f"a model to check with cannot be made: {error}; give --model-dir, or install genrec with its extra cpu"
        ) from error
    with tempfile.TemporaryDirectory(prefix="genrec-check-") as directory:
        yield make_complete_bundle(Path(directory) / "random")


def _print(report: Report, *, made: bool) -> None:
    table = Table("check", title=f"{report.stage} {report.backend} with {report.model_version}")
    table.add_column("", no_wrap=True)
    table.add_column("why", overflow="fold")
    for outcome in report.outcomes:
        table.add_row(outcome.check, f"[{_COLOURS[outcome.result]}]{outcome.result}[/]", escape(outcome.reason))
    Console().print(table)
    counted = ", ".join(f"{report.count(result)} {result}" for result in Result if report.count(result))
    typer.echo(counted + (f"; it cannot run here: {report.unavailable}" if report.unavailable else ""))
    if report.unavailable and made:
        typer.echo("that is with a small model made for the occasion; to check it with one of yours, give --model-dir")
