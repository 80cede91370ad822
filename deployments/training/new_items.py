"""Publish a version of a model that knows more items, without training it."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from cluster.bundle import GENERATIVE, LEARNT, RANKER, SEMANTIC_IDS, Bundle, ModelRecord, RankerRecord
from cluster.bundle_store import BundleStore, Draft
from cluster.dataset import Catalogue
from cluster.semantic_ids import SemanticIds, write_semantic_ids
from cluster.values import FloatArray, Item
from deployments.training.provenance import item_order_sha256
from deployments.training.publishing import write_required
from integrations.hstu.config import RankerConfig
from integrations.hstu.ranker import HSTURanker
from integrations.hstu.sequence_model import SequenceModel
from integrations.hstu.weights import build_model, load_model, load_ranker, save_weights
from pipelines.new_items import Placed, Resemblance, extend_ids, place, resemblance

_EMBEDDING = "item_embedding.weight"


def publish_with(bundle: Bundle, new: Sequence[Item], first_seen: int) -> tuple[Bundle, int]:
    """Publish the bundle's model with items that its catalogue lacks, as its next version; returns it, and how many of the new items
    resemble none that it has learnt.

    The version becomes current where `bundle` still is. `first_seen`: in seconds since 1970. Raises DataError, and publishes nothing, where
    no semantic ID is free.
    """
    joint = Catalogue([*bundle.catalogue.items, *new])
    model = load_model(bundle)
    lengths: FloatArray = model.item_embedding.weight.detach().norm(dim=1).numpy()
    alike = resemblance(joint, len(bundle.catalogue), np.flatnonzero(bundle.learnt))
    placed = place(alike, bundle.item_vectors, lengths)
    vectors = np.concatenate([bundle.item_vectors, placed.vectors])
    ids = _ids(bundle, vectors, joint) if bundle.manifest.decoder else None
    record = bundle.manifest.model.model_copy(update={"config": {**bundle.manifest.model.config, "items": len(joint)}})
    store = BundleStore(bundle.path.parent)
    with store.publish(record, since=bundle.manifest.version) as draft:
        popularity = np.append(bundle.popularity, np.zeros(len(new), np.int64))
        seen = np.append(bundle.first_seen, np.full(len(new), first_seen, np.int64))
        grown = build_model(record)
        grown.load_state_dict(_with_rows(model.state_dict(), placed))
        write_required(draft, grown, joint, popularity=popularity, first_seen=seen, item_vectors=vectors)
        np.save(draft.path / LEARNT, np.append(bundle.learnt, np.ones(len(new), bool)))
        _describe(draft, bundle, joint)
        if ids:
            _put_decoder(draft, bundle, ids)
        if bundle.manifest.ranker:
            ranker, draft.ranker = grown_ranker(load_ranker(bundle), bundle.ranker(), alike)
            save_weights(ranker.state_dict(), draft.path / RANKER)
    return store.open(draft.version), placed.unlike


def without_added(bundle: Bundle) -> tuple[ModelRecord, SequenceModel]:
    """The bundle's model, and its record, without the items that were added since the training."""
    record, weights = bundle.manifest.model, load_model(bundle).state_dict()
    record = record.model_copy(update={"config": {**record.config, "items": len(bundle.catalogue) - bundle.added_items}})
    model = build_model(record)
    model.load_state_dict({**weights, _EMBEDDING: weights[_EMBEDDING][: len(model.item_embedding.weight)]})
    return record, model.eval()


def grown_ranker(ranker: HSTURanker, record: RankerRecord, alike: Resemblance) -> tuple[HSTURanker, RankerRecord]:
    """The ranker, and its record, with embeddings of the new items after those of its own, among the known items that they are like."""
    embeddings = ranker.item_embedding.weight.detach()
    placed = place(alike, ranker.item_vectors().detach().numpy(), embeddings.norm(dim=1).numpy())
    record = record.model_copy(update={"config": {**record.config, "items": ranker.config.items + len(alike.found)}})
    grown = HSTURanker(RankerConfig.of(record))
    grown.load_state_dict(_with_rows(ranker.state_dict(), placed))
    return grown.eval(), record


def _with_rows(weights: Mapping[str, torch.Tensor], placed: Placed) -> dict[str, torch.Tensor]:
    """A model's weights with the new items' embeddings below those of the known."""
    known = weights[_EMBEDDING]
    return {**weights, _EMBEDDING: torch.cat([known, torch.from_numpy(placed.rows).to(known.dtype)])}


def _ids(bundle: Bundle, vectors: FloatArray, joint: Catalogue) -> SemanticIds:
    """Semantic IDs of all items; those of new ones are made as `genrec train` recorded for the known ones."""
    decoder = cast("dict[str, Any]", bundle.manifest.training.get("decoder") or {})
    made: dict[str, Any] = decoder.get("semantic_ids") or {}
    learnt = len(bundle.catalogue) - bundle.added_items
    return extend_ids(bundle.semantic_ids, vectors, joint, title_weight=float(made.get("title_weight", 0)), learnt=learnt)


def _describe(draft: Draft, bundle: Bundle, joint: Catalogue) -> None:
    """Describe the draft: provenance and quality stay those of the training; `added_items` counts all items that came since."""
    added = bundle.added_items + len(joint) - len(bundle.catalogue)
    draft.training = {**bundle.manifest.training, "item_order_sha256": item_order_sha256(joint), "added_items": added}
    draft.quality, draft.blend = dict(bundle.manifest.quality), bundle.manifest.blend


def _put_decoder(draft: Draft, bundle: Bundle, ids: SemanticIds) -> None:
    """Put the unchanged decoder into the draft, beside the new semantic IDs."""
    for file in (file for file in GENERATIVE if file != SEMANTIC_IDS):
        draft.take(bundle, file)
    write_semantic_ids(ids, draft.path / SEMANTIC_IDS)
    draft.decoder = bundle.decoder().model_copy(update={"semantic_ids": ids.version})
