"""`genrec data`: fetch a dataset, or say what is in one."""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from cluster.dataset import Dataset
from cluster.errors import UnknownChoice
from cluster.registry import DATASETS
from cluster.values import Action
from deployments.cli.dataset_options import DATASET, open_dataset
from deployments.cli.fields import with_fields
from deployments.training.dataset_options import DatasetOptions
from integrations.datasets.fetch import fetch_movielens
from integrations.datasets.options import GROUPLENS
from integrations.datasets.repeats import in_one_second, last_item_met_before, repeated

app = typer.Typer(no_args_is_help=True, help="Fetch datasets and look into them.")
PERCENTILES = (0, 25, 50, 75, 90, 99, 100)
FETCHABLE = tuple(name for name in DATASETS if name.startswith("ml-"))


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(metavar="DATASET", help=f"one of {', '.join(FETCHABLE)}")],
    *,
    cache: Annotated[Path | None, typer.Option(help="where to keep it (default: $GENREC_CACHE or ~/.cache/genrec)")] = None,
    mirror: Annotated[str, typer.Option(help="where to fetch MovieLens from")] = GROUPLENS,
) -> None:
    """Bring a MovieLens dataset into the cache and print where it lies."""
    if name not in FETCHABLE:
        raise UnknownChoice("dataset to fetch", name, FETCHABLE)
    typer.echo(fetch_movielens(name, cache, mirror))


@app.command()
@with_fields
def inspect(
    dataset: Annotated[DatasetOptions, DATASET],
    as_json: Annotated[bool, typer.Option("--json", help="print one JSON object")] = False,
) -> None:
    """Read a dataset and print its users, items, events, time span, sequence lengths and actions."""
    summary = summarise(open_dataset(dataset))
    if as_json:
        typer.echo(json.dumps(summary, ensure_ascii=False))
    else:
        Console(markup=False).print(_as_table(summary))


def summarise(dataset: Dataset) -> dict[str, Any]:
    """What is in a dataset, in numbers. `lengths` are the percentiles of events per user; `repeated_events` equal another one in user,
    item, second, action and value; `events_in_one_second` lie in that of their user's event before; `last_item_met_before` is the share of
    users whose last event is of an item that they had met before.
    """
    events, catalogue = dataset.interactions, dataset.catalogue
    counts = np.bincount(events.actions, minlength=len(Action))
    return {
        "name": dataset.name,
        "source": dataset.source,
        "users": events.users,
        "items": len(catalogue),
        "items_with_events": int(np.count_nonzero(events.popularity(len(catalogue)))),
        "events": len(events),
        "from": _moment(events.timestamps.min()),
        "to": _moment(events.timestamps.max()),
        "lengths": {f"p{percent}": float(np.percentile(events.lengths, percent)) for percent in PERCENTILES},
        "actions": {action.value: int(counts[action.code]) for action in Action if counts[action.code]},
        "events_with_value": int(np.count_nonzero(~np.isnan(events.values))),
        "repeated_events": len(repeated(events)),
        "events_in_one_second": int(np.count_nonzero(in_one_second(events))),
        "last_item_met_before": round(last_item_met_before(events), 3),
        "skipped_rows": dataset.skipped_rows,
    }


def _as_table(summary: Mapping[str, Any]) -> Table:
    table = Table(show_header=False, box=None)
    for key, value in summary.items():
        shown = "  ".join(f"{name} {_number(number)}" for name, number in value.items()) if isinstance(value, dict) else value
        table.add_row(key.replace("_", " "), f"{shown:,}" if isinstance(shown, int) else str(shown))
    return table


def _number(number: float) -> str:
    """With all digits of a whole number, of which `g` keeps six."""
    return f"{number:,.0f}" if float(number).is_integer() else f"{number:,g}"


def _moment(timestamp: np.int64) -> str:
    return datetime.fromtimestamp(int(timestamp), UTC).isoformat().replace("+00:00", "Z")
