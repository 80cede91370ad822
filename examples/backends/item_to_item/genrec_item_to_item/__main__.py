"""`python -m genrec_item_to_item fit`: learn the neighbours from any data that genrec reads."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from cluster.errors import GenrecError
from deployments.cli.dataset_options import DATASET, open_dataset
from deployments.cli.fields import with_fields
from deployments.training.dataset_options import DatasetOptions
from genrec_item_to_item.neighbours import fit, write

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help="An encoder of genrec from item-to-item neighbours.")


@app.callback()
def genrec_item_to_item() -> None:
    """Keep the name of the one command on the command line."""


@app.command("fit")
@with_fields
def fit_command(
    dataset: Annotated[DatasetOptions, DATASET],
    *,
    out: Annotated[Path, typer.Option(help="the file to write, as models/shop.neighbours.npz: beside the model, not in it")],
    half_life_days: Annotated[float, typer.Option(help="after how many days between them two events count half", min=0.001)] = 30.0,
    window: Annotated[int, typer.Option(help="how many events apart those of a user are still compared", min=1)] = 50,
    neighbours: Annotated[int, typer.Option(help="of each item", min=1)] = 100,
) -> None:
    """Learn each item's neighbours from a dataset."""
    data = open_dataset(dataset)
    found = fit(data.interactions, len(data.catalogue), half_life_days=half_life_days, window=window, count=neighbours)
    write(found, data, out)
    having = int((found.similarities[1:] > 0).any(axis=1).sum())
    typer.echo(f"{having} of {len(data.catalogue)} items have neighbours; written to {out}")


if __name__ == "__main__":
    try:
        app(prog_name="python -m genrec_item_to_item")
    except GenrecError as error:
        sys.exit(f"genrec_item_to_item: {error}")
