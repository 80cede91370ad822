"""`genrec backends`: which engines could serve here, and why the others could not. Needs neither Ray nor, for a first look, a model."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cluster import registry
from cluster.bundle import Bundle, BundleStore
from cluster.config import Settings, read
from cluster.controller import FrameworkController
from cluster.errors import ConfigError
from cluster.stage_rules import encoder_rules

STAGE = "encoder"
CONFIG_FILE = Path("ray_config.yaml")


@dataclass(frozen=True)
class Row:
    """One backend; `available` is None where it takes a model to tell."""

    name: str
    import_string: str
    rank: int | None
    available: bool | None
    reason: str


def backends(
    *,
    model_dir: Annotated[Path | None, typer.Option(help="the model to serve, as models/ml-1m (default: the configuration's)")] = None,
    version: Annotated[int | None, typer.Option(help="which of its versions (default: the current one)")] = None,
    config: Annotated[Path | None, typer.Option("--config", "-c", help=f"a Serve config file (default: {CONFIG_FILE}, if there)")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """List every stage's backends in the order they are asked: available here or not, and why not."""
    settings = read(config or CONFIG_FILE) if config or CONFIG_FILE.is_file() else Settings()
    bundle = _bundle(model_dir, version, settings)
    rows, explanation = _probed(settings, bundle) if bundle else (_imported(settings), _without_model(settings))
    if as_json:
        typer.echo(json.dumps(_as_json(bundle, rows, explanation), indent=2))
    else:
        Console().print(_table(rows, f"{STAGE} backends for {bundle.version}" if bundle else f"{STAGE} backends"))
        typer.echo(explanation)


def _bundle(model_dir: Path | None, version: int | None, settings: Settings) -> Bundle | None:
    """The model asked for, or the configured one if it has been published; None otherwise. Raises BundleError."""
    if model_dir is not None:
        return BundleStore(model_dir).open(version)
    store = BundleStore(settings.model_dir)
    if not store.versions():
        return None
    wanted = version or settings.version
    return store.open(wanted) if wanted else store.open_last_good()[0]


def _probed(settings: Settings, bundle: Bundle) -> tuple[list[Row], str]:
    table = registry.backends(STAGE, settings.encoder.backends)
    controller = FrameworkController(STAGE, table, settings.encoder.order, bundle, encoder_rules(len(bundle.catalogue)))
    for name in settings.encoder.disabled:
        controller.disable(name)
    controller.probe()
    snapshot = controller.snapshot()
    rows = [Row(one.name, one.import_string, one.rank, one.available, one.reason) for one in snapshot.backends]
    return rows, snapshot.explanation


def _imported(settings: Settings) -> list[Row]:
    """What can be said without a model: whether each backend's module is there."""
    order = settings.encoder.order
    table = registry.backends(STAGE, settings.encoder.backends)
    names = sorted(table, key=lambda name: order.index(name) if name in order else len(order))
    return [_imported_row(name, table[name], order.index(name) if name in order else None) for name in names]


def _imported_row(name: str, import_string: str, rank: int | None) -> Row:
    try:
        registry.resolve(import_string)
    except (ImportError, ConfigError) as error:
        return Row(name, import_string, rank, available=False, reason=f"cannot be imported: {error}")
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
        table.add_row("-" if row.rank is None else str(row.rank + 1), row.name, shown[row.available], escape(row.reason))
    return table


def _as_json(bundle: Bundle | None, rows: list[Row], explanation: str) -> dict[str, Any]:
    stages = [{"stage": STAGE, "explanation": explanation, "backends": [asdict(row) for row in rows]}]
    return {"model_version": bundle.version if bundle else None, "stages": stages}
