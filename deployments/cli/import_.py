"""`genrec import`: models trained elsewhere -> published bundle."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.bundle import ModelRecord
from cluster.bundle_store import BundleStore
from cluster.registry import DATASETS
from deployments.cli.dataset_options import open_dataset
from deployments.cli.evaluate import measured_on, print_quality, rank_all
from deployments.cli.fields import as_options
from deployments.training.dataset_options import DatasetOptions
from deployments.training.provenance import READ_AS
from deployments.training.publishing import publish
from integrations.hstu.meta_checkpoint import from_meta, is_bf16, last_row, raw_id_rows, read_meta_checkpoint
from integrations.hstu.meta_config import read_meta_config

if TYPE_CHECKING:
    from torch import Tensor

app = typer.Typer(no_args_is_help=True, help="Publish models that were trained elsewhere.")


@app.callback()
def importing() -> None:
    """Publish models that were trained elsewhere."""


@app.command()
def meta(
    checkpoint: Annotated[Path, typer.Argument(help="what Meta's research trainer saved (generative-recommenders)")],
    *,
    config: Annotated[
        Path, typer.Option(help="its .gin file, or YAML with dim, layers, heads, attention_dim, linear_dim, max_length, max_history")
    ],
    dataset: Annotated[str, typer.Option(help=f"what it was trained on, one of {', '.join(DATASETS)}")],
    path: Annotated[Path | None, typer.Option(help="the data set's file, directory or zip; without it MovieLens is fetched")] = None,
    items: Annotated[Path | None, typer.Option(help="item table of a data set that is a table")] = None,
    window_step: Annotated[
        int | None,
        typer.Option(help="by how many events the served window moves (default: 1, as Meta's code; more lets kept states serve)"),
    ] = None,
    model_dir: Annotated[Path | None, typer.Option(help="where it is published (default: models/DATASET)")] = None,
) -> None:
    """Publish an HSTU from Meta's research trainer; its data set gives titles and popularity, and measures it."""
    with as_options():
        asked = DatasetOptions(name=dataset, path=path, items=items)
    data = open_dataset(asked)
    target = model_dir or Path("models") / data.name
    BundleStore(target).require_publishable()
    told = read_meta_config(config, items=len(data.catalogue), window_step=window_step)
    state, rows = read_meta_checkpoint(checkpoint), raw_id_rows([item.item_id for item in data.catalogue.items])
    model = from_meta(state, told.sizes, rows, bf16=told.bf16)
    for remark in _remarks(state, rows):
        typer.echo(remark, err=True)
    record = ModelRecord(family="hstu", config=told.sizes.model_dump(mode="json"))
    quality = rank_all(model, data.interactions)
    origin = {READ_AS: asked.described(), "imported_from": "meta-recsys/generative-recommenders", "checkpoint": checkpoint.name}
    bundle = publish(target, record, model, data, training=origin, quality=quality)
    print_quality(quality, measured_on(bundle, data))
    typer.echo(f"published {bundle.path}", err=True)


def _remarks(state: "Mapping[str, Tensor]", rows: Sequence[int]) -> Iterator[str]:
    """Remarks on a checkpoint that can be published, but may not be the intended one."""
    if is_bf16(state):
        yield "the weights are bf16, the arithmetic is fp32, which rounds less than the trainer's: items with like scores may change places"
    if max(rows) < (last := last_row(state)):
        yield (
            f"the checkpoint has embeddings of items 1..{last}, the data set's largest item number is {max(rows)}; "
            "make sure that it numbers items as the trainer did"
        )
