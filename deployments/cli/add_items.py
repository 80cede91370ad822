"""`genrec add-items`: publish a version of a model that knows more items, without training it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from cluster.bundle import Bundle
from cluster.bundle_store import BundleStore
from cluster.values import Item
from deployments.cli.dataset_options import tell_skipped
from deployments.cli.models import overtaken
from deployments.training.dataset_options import DatasetOptions, as_trained
from deployments.training.new_items import publish_with
from deployments.training.provenance import READ_AS
from integrations.datasets.table import read_items


def add_items(
    items: Annotated[Path, typer.Argument(help="item table (id, title, any attributes), CSV or Parquet, as genrec train --items takes")],
    *,
    model_dir: Annotated[Path, typer.Option(help="directory with the versions of one model, such as models/ml-1m")],
    first_seen: Annotated[
        datetime | None,
        typer.Option(help="UTC; when the items were new, for --freshness (default: now)", formats=["%Y-%m-%d", "%Y-%m-%dT%H:%M:%S"]),
    ] = None,
    item_id_column: Annotated[str | None, typer.Option(help="id column of the item table")] = None,
    item_title_column: Annotated[str | None, typer.Option(help="title column of the item table")] = None,
    delimiter: Annotated[str | None, typer.Option(help=r"between the fields of a text table, as ';' or '\t'; guessed by default")] = None,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="count bad rows and read on, rather than stop at the first")
    ] = False,
) -> None:
    """Publish a version of the current model with the table's new items; no training is needed.

    A new item has no events, so its vector is the mean of those of the 10 items most similar to it by title and attributes, among those
    with events that were learnt and those added before; one that resembles none gets the mean of them all. Items that the model knows
    stay as they are, and those that it knows by their ids alone, as from events, are counted. Columns are named as for the training,
    unless said otherwise. Status 1 where another version became current meanwhile, which the new items are not in.
    """
    store = BundleStore(model_dir)
    bundle = store.open()
    table = DatasetOptions(
        name="table", item_id_column=item_id_column, item_title_column=item_title_column, delimiter=delimiter, skip_bad_rows=skip_bad_rows
    )  # fmt: skip
    if READ_AS in bundle.manifest.training:
        table = as_trained(table, bundle)
    options = table.read_options()
    listed = read_items(items, options)
    tell_skipped(options.on_bad_row, str(items))
    _tell_of_bare_items(listed, bundle, items)
    new = [item for item in listed if bundle.catalogue.index_of(item.item_id) is None]
    if not new:
        typer.echo(f"nothing to add: {bundle.version} holds all {len(listed)} items of {items}")
        return
    seen = first_seen.replace(tzinfo=UTC) if first_seen else datetime.now(UTC)
    published, unlike = publish_with(bundle, new, int(seen.timestamp()))
    typer.echo(f"published {published.version}: {len(new)} items added to the {len(bundle.catalogue)} of {bundle.version}")
    if unlike:
        told = f"{unlike} of them share no word with an item that the model has learnt, and stand at the mean of those"
        typer.secho(told, fg="yellow", err=True)
    if told := overtaken(store, published.manifest.version, "run the same command again to add the items to that one"):
        typer.secho(told, fg="yellow", err=True)
        raise typer.Exit(1)
    if bundle.manifest.artifacts:
        told = f"it has no compiled artifacts, so PyTorch serves it until this is done: genrec compile --model-dir {model_dir}"
        typer.secho(told, fg="yellow", err=True)


def _tell_of_bare_items(listed: Sequence[Item], bundle: Bundle, table: Path) -> None:
    """Print to stderr how many of the listed items the version knows without the title and attributes that the table has, if any."""
    known = {item.item_id: item for item in bundle.catalogue.items if item.title == item.item_id and not item.attributes}
    if bare := sum(item != known.get(item.item_id, item) for item in listed):
        told = f"{bare} items of {table} are known to {bundle.version} by their ids alone, as from events, and stay so"
        typer.secho(f"{told}: move their rows to the table of items, and train anew", fg="yellow", err=True)
