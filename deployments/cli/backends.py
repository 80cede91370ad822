"""`genrec backends`: which engines could serve here, and why the others could not. Needs neither Ray nor, for a first look, a model."""

import asyncio
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster import registry
from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.config import Settings
from cluster.config_file import read
from cluster.engines.controller import FrameworkController
from cluster.engines.skipped import reason_of
from cluster.engines.stage_rules import RULES
from deployments.cli.backend_checks import check
from deployments.cli.config import find_own_modules

CONFIG_FILE = Path("ray_config.yaml")
app = typer.Typer()
app.command()(check)


@dataclass(frozen=True)
class Row:
    """One backend; `available` is None where only a probe with a model can tell."""

    name: str
    import_string: str
    rank: int | None
    available: bool | None
    reason: str


@dataclass(frozen=True)
class Stage:
    """The backends of one stage; `explanation` says which would serve, and why."""

    stage: str
    explanation: str
    backends: list[Row]


@app.callback(invoke_without_command=True)
def backends(
    context: typer.Context,
    *,
    model_dir: Annotated[Path | None, typer.Option(help="the model to serve, as models/ml-1m (default: the configuration's)")] = None,
    version: Annotated[int | None, typer.Option(help="which of its versions (default: the current one)")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help=f"a Serve config file (default: {CONFIG_FILE}, if there)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """List every stage's backends in the order they are asked: available here or not, and why not. `check` checks one of your own."""
    find_own_modules()
    if context.invoked_subcommand:
        return
    for name in registry.misnamed():
        cure = f"name it by its stage ({', '.join(registry.BACKENDS)}) and its own name, as encoder.mine"
        typer.echo(f"entry point {name!r} of {registry.ENTRY_POINT_GROUP} adds no backend; {cure}", err=True)
    for problem in registry.contested():
        typer.echo(f"{problem}; uninstall one of both, or name the one to use under `backends:`", err=True)
    settings = read(config or CONFIG_FILE) if config or CONFIG_FILE.is_file() else Settings()
    bundle = _bundle(model_dir, version, settings)
    stages = [_probed(name, settings, bundle) if bundle else _imported(name, settings) for name in RULES]
    if as_json:
        typer.echo(json.dumps({"model_version": bundle.version if bundle else None, "stages": [asdict(one) for one in stages]}, indent=2))
        return
    for one in stages:
        Console().print(_table(one.backends, f"{one.stage} backends" + (f" for {bundle.version}" if bundle else "")))
        typer.echo(one.explanation)


def _bundle(model_dir: Path | None, version: int | None, settings: Settings) -> Bundle | None:
    """The model that the options name, else the configured one if it has been published, else None. Raises BundleError."""
    if model_dir is not None:
        return BundleStore(model_dir).open(version)
    store = BundleStore(settings.model_dir)
    if not store.versions():
        return None
    wanted = version or settings.version
    return store.open(wanted) if wanted else store.open_last_good()[0]


def _probed(stage: str, settings: Settings, bundle: Bundle) -> Stage:
    rules = RULES[stage](bundle)
    controller = FrameworkController[Any, Any].configured(settings.engines(stage), bundle, rules)
    asyncio.run(controller.probe())
    snapshot = controller.snapshot()
    rows = [Row(one.name, one.import_string, one.rank, one.available, one.reason) for one in snapshot.backends]
    return Stage(stage, snapshot.explanation, rows)


def _imported(stage: str, settings: Settings) -> Stage:
    """The stage as far as it is known without a model: whether each backend can be imported."""
    engines = settings.engines(stage)
    order, table = engines.in_order(), registry.backends(stage, engines.backends)
    names = sorted(table, key=lambda name: order.index(name) if name in order else len(order))
    rows = [_imported_row(name, table[name], order.index(name) if name in order else None) for name in names]
    return Stage(stage, _without_model(settings), rows)


def _imported_row(name: str, import_string: str, rank: int | None) -> Row:
    try:
        registry.resolve(import_string)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the module is the backend's code
        why = str(error) if isinstance(error, ImportError) else reason_of(error)
        return Row(name, import_string, rank, available=False, reason=f"cannot be imported: {why}")
    return Row(name, import_string, rank, available=None, reason="not probed without a model")


def _without_model(settings: Settings) -> str:
    return f"nothing is published in {settings.model_dir}, so only imports were tried; run: genrec train DATASET, or give --model-dir"


def _table(rows: list[Row], title: str) -> Table:
    table = Table("order", title=title)
    table.add_column("backend", no_wrap=True)
    table.add_column("available")
    table.add_column("why not", overflow="fold")
    shown = {True: "[green]yes[/]", False: "[red]no[/]", None: "?"}
    for row in rows:
        table.add_row("-" if row.rank is None else str(row.rank + 1), escape(row.name), shown[row.available], escape(row.reason))
    return table
