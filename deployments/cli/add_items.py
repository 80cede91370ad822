"""genrec add-items: publish a version of a model that knows more items, without training it."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, cast

import numpy as np
import torch
import typer

from cluster.bundle import GENERATIVE, RANKER, SEMANTIC_IDS, Bundle, BundleStore, Draft
from cluster.dataset import Catalogue
from cluster.semantic_ids import SemanticIds, write_semantic_ids
from cluster.values import FloatArray, Item
from deployments.cli.dataset_options import READ_AS, DatasetOptions, as_trained, tell_skipped
from deployments.cli.publishing import item_order_sha256, write_required
from integrations.datasets.table import read_items
from integrations.hstu.config import RankerConfig
from integrations.hstu.ranker import HSTURanker
from integrations.hstu.weights import build_model, load_model, load_ranker, save_weights
from pipelines.new_items import Placed, extend_ids, place

_EMBEDDING = "item_embedding.weight"


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

    A new item has no events, so its vector is the mean of those of the 10 items most similar to it by title and attributes; one that
    resembles none gets the mean of all. Items that the model knows stay as they are. Columns are named as for the training, unless said
    otherwise.
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
    new = [item for item in listed if bundle.catalogue.index_of(item.item_id) is None]
    if not new:
        typer.echo(f"nothing to add: {bundle.version} holds all {len(listed)} items of {items}")
        return
    seen = first_seen.replace(tzinfo=UTC) if first_seen else datetime.now(UTC)
    unlike = publish_grown(store, bundle, new, int(seen.timestamp()))
    typer.echo(f"published {store.open().version}: {len(new)} items added to the {len(bundle.catalogue)} of {bundle.version}")
    if unlike:
        typer.secho(f"{unlike} of them share no word with a known item and stand at the mean of all", fg="yellow", err=True)
    if bundle.manifest.artifacts:
        typer.secho(f"its compiled artifacts hold the old items; run: genrec compile --model-dir {model_dir}", fg="yellow", err=True)


def publish_grown(store: BundleStore, bundle: Bundle, new: Sequence[Item], first_seen: int) -> int:
    """Publish the bundle's model with items that its catalogue lacks; how many of them resemble none that it holds.

    `first_seen` is in seconds since 1970. Raises DataError where no semantic ID is free; nothing is published then.
    """
    joint = Catalogue([*bundle.catalogue.items, *new])
    model = load_model(bundle)
    lengths: FloatArray = model.item_embedding.weight.detach().norm(dim=1).numpy()
    placed = place(joint, bundle.item_vectors, lengths)
    vectors = np.concatenate([bundle.item_vectors, placed.vectors])
    ids = _ids(bundle, vectors, joint) if bundle.manifest.decoder else None
    record = bundle.manifest.model.model_copy(update={"config": {**bundle.manifest.model.config, "items": len(joint)}})
    with store.publish(record) as draft:
        popularity = np.append(bundle.popularity, np.zeros(len(new), np.int64))
        seen = np.append(bundle.first_seen, np.full(len(new), first_seen, np.int64))
        grown = build_model(record)
        grown.load_state_dict(_with_rows(model.state_dict(), placed))
        write_required(draft, grown, joint, popularity=popularity, first_seen=seen, item_vectors=vectors)
        _describe(draft, bundle, joint)
        if ids:
            _put_decoder(draft, bundle, ids)
        if bundle.manifest.ranker:
            _put_ranker(draft, bundle, joint)
    return placed.unlike


def _with_rows(weights: Mapping[str, torch.Tensor], placed: Placed) -> dict[str, torch.Tensor]:
    """A model's weights with the new items' embeddings below those of the known."""
    known = weights[_EMBEDDING]
    return {**weights, _EMBEDDING: torch.cat([known, torch.from_numpy(placed.rows).to(known.dtype)])}


def _ids(bundle: Bundle, vectors: FloatArray, joint: Catalogue) -> SemanticIds:
    """Semantic IDs of all items, with what `genrec train` wrote down of how the known ones were made."""
    decoder = cast("dict[str, Any]", bundle.manifest.training.get("decoder") or {})
    made: dict[str, Any] = decoder.get("semantic_ids") or {}
    learnt = len(bundle.catalogue) - _added(bundle)
    return extend_ids(bundle.semantic_ids, vectors, joint, title_weight=float(made.get("title_weight", 0)), learnt=learnt)


def _describe(draft: Draft, bundle: Bundle, joint: Catalogue) -> None:
    """Provenance and quality are still those of the training; `added_items` have come since, in this version and those before it."""
    added = _added(bundle) + len(joint) - len(bundle.catalogue)
    draft.training = {**bundle.manifest.training, "item_order_sha256": item_order_sha256(joint), "added_items": added}
    draft.quality, draft.blend = dict(bundle.manifest.quality), bundle.manifest.blend


def _put_decoder(draft: Draft, bundle: Bundle, ids: SemanticIds) -> None:
    """The decoder as it is, beside the new semantic IDs."""
    for file in (file for file in GENERATIVE if file != SEMANTIC_IDS):
        draft.take(bundle, file)
    write_semantic_ids(ids, draft.path / SEMANTIC_IDS)
    draft.decoder = bundle.decoder().model_copy(update={"semantic_ids": ids.version})


def _put_ranker(draft: Draft, bundle: Bundle, joint: Catalogue) -> None:
    """The ranker with the new items placed among its own embeddings."""
    known, ranker = bundle.ranker(), load_ranker(bundle)
    embeddings = ranker.item_embedding.weight.detach()
    placed = place(joint, ranker.item_vectors().detach().numpy(), embeddings.norm(dim=1).numpy())
    draft.ranker = known.model_copy(update={"config": {**known.config, "items": len(joint)}})
    grown = HSTURanker(RankerConfig.of(draft.ranker))
    grown.load_state_dict(_with_rows(ranker.state_dict(), placed))
    save_weights(grown.state_dict(), draft.path / RANKER)


def _added(bundle: Bundle) -> int:
    return cast(int, bundle.manifest.training.get("added_items", 0))
