"""Small published bundles with random weights: something to serve where nothing has been trained, for tests and `genrec backends check`."""

from collections import Counter
from pathlib import Path

import numpy as np
import torch
from pydantic import JsonValue

from cluster.bundle import CATALOGUE, FIRST_SEEN, ITEM_VECTORS, POPULARITY, RANKER, WEIGHTS, Bundle, ModelRecord, RankerRecord
from cluster.bundle_store import BundleStore, Draft
from cluster.catalogue_file import write_catalogue
from cluster.dataset import Catalogue
from cluster.ranking import RatingScale, Task
from cluster.semantic_ids import SemanticIds
from cluster.values import Item
from integrations.decoder.config import DecoderConfig
from integrations.decoder.files import save_decoder
from integrations.decoder.model import SemanticIdDecoder
from integrations.hstu.config import RankerConfig
from integrations.hstu.ranker import HSTURanker
from integrations.hstu.weights import build_model, save_weights

CONFIGS: dict[str, dict[str, JsonValue]] = {
    "hstu": {"dim": 16, "layers": 2, "heads": 2, "attention_dim": 8, "linear_dim": 8, "max_length": 31, "max_history": 20},
    "sasrec": {"dim": 16, "layers": 2, "heads": 2, "feedforward_dim": 16, "max_length": 31, "max_history": 20},
}


DECODER_SIZES = {"hidden": 64, "layers": 2, "heads": 2, "feedforward": 128, "prompt_length": 8, "dropout": 0.0}


def make_generative_bundle(root: Path, *, items: int = 200, seed: int = 0, sizes: tuple[int, ...] = (8, 8), **decoder: int) -> Bundle:
    """As `make_bundle`, with random semantic IDs and a random decoder whose probabilities are far from uniform.

    `sizes` are the codes of every level but the last, which tells apart what shares the rest; `decoder` overrides DECODER_SIZES, and the
    vocabulary, which may be larger than the semantic IDs need: decoders of the same sizes and seed have the same weights.
    """
    return _add_decoder(make_bundle(root, items=items, seed=seed), seed, sizes, decoder)


def make_complete_bundle(
    root: Path,
    *,
    items: int = 200,
    seed: int = 0,
    max_history: int = 64,
    codes: tuple[int, ...] = (8, 8),
    decoder: dict[str, int] | None = None,
    **sizes: int,
) -> Bundle:
    """An encoder, a decoder and a ranker, with a window that is long enough for engines that keep users' states to keep them. `sizes` are
    of encoder and ranker, `decoder` as in `make_generative_bundle`.
    """
    config: dict[str, JsonValue] = {**sizes, "max_history": max_history, "max_length": max_history + 11}
    bundle = make_bundle(root, items=items, family="hstu", seed=seed, ranker=_ranker_record(items, config), **config)
    return _add_decoder(bundle, seed, codes, decoder or {})


def _add_decoder(bundle: Bundle, seed: int, sizes: tuple[int, ...], decoder: dict[str, int]) -> Bundle:
    """The next version of the bundle, with a decoder."""
    ids = random_semantic_ids(len(bundle.catalogue), sizes, seed)
    given = {"vocabulary": ids.vocabulary, "state_dim": bundle.item_vectors.shape[1], **DECODER_SIZES, **decoder}
    config = DecoderConfig(levels=ids.levels, **given)
    torch.manual_seed(seed)
    model = SemanticIdDecoder(config, ids, bundle.item_vectors)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(6 if "weight" in name and "norm" not in name else 1)
    store = BundleStore(bundle.path.parent)
    with store.recompile(bundle) as draft:
        save_decoder(model, draft)
        draft.compiled_from = None
    return store.open()


RANKER_SIZES = {"dim": 16, "layers": 3, "heads": 2, "attention_dim": 8, "linear_dim": 8, "max_length": 31, "max_history": 20}


def make_ranking_bundle(root: Path, *, items: int = 200, seed: int = 0, **config: JsonValue) -> Bundle:
    """As `make_bundle`, with a random ranker of clicks, ratings and purchases; `config` overrides RANKER_SIZES."""
    return make_bundle(root, items=items, seed=seed, ranker=_ranker_record(items, config))


def _ranker_record(items: int, config: dict[str, JsonValue]) -> RankerRecord:
    tasks, rating = (Task.CLICK, Task.RATING, Task.PURCHASE), RatingScale(low=1, high=5, mean=3.5, deviation=1.1)
    return RankerRecord(family="hstu", config={**RANKER_SIZES, "items": items, **config}, tasks=tasks, rating=rating)


def _put_ranker(record: RankerRecord, draft: Draft) -> None:
    ranker = HSTURanker(RankerConfig.of(record))
    with torch.no_grad():
        for parameter in ranker.parameters():
            parameter.mul_(2)
    save_weights(ranker.state_dict(), draft.path / RANKER)
    draft.ranker = record


def random_semantic_ids(items: int, sizes: tuple[int, ...], seed: int = 0) -> SemanticIds:
    """Unique paths: random codes at each level, and a last level that counts the items that share them."""
    rng, codes, met = np.random.default_rng(seed), np.zeros((items + 1, len(sizes) + 1), np.int32), Counter[tuple[int, ...]]()
    for item in range(1, items + 1):
        path = tuple(int(rng.integers(size)) for size in sizes)
        codes[item] = *path, met[path]
        met[path] += 1
    return SemanticIds(codes, (*sizes, max(met.values())))


def make_bundle(
    root: Path, *, items: int = 200, family: str = "hstu", seed: int = 0, ranker: RankerRecord | None = None, **config: JsonValue
) -> Bundle:
    """Publish a version of a model named after `root` and open it. Weights are random but large enough to make histories matter.

    `config` overrides keys of CONFIGS[family]. The catalogue's ids are "1".."V" with titles "Item 1" and so on; item 1 is the most popular.
    """
    store = BundleStore(root)
    record = ModelRecord(family=family, config={**CONFIGS[family], "items": items, **config})
    with store.publish(record) as draft:
        torch.manual_seed(seed)
        model = build_model(record)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(4)
        save_weights(model.state_dict(), draft.path / WEIGHTS)
        write_catalogue(Catalogue([Item(str(i), f"Item {i}") for i in range(1, items + 1)]), draft.path / CATALOGUE)
        np.save(draft.path / POPULARITY, np.r_[0, np.arange(items, 0, -1)].astype(np.int64))
        np.save(draft.path / FIRST_SEEN, np.r_[0, 1_600_000_000 + np.arange(items)].astype(np.int64))
        np.save(draft.path / ITEM_VECTORS, model.item_vectors().detach().numpy())
        if ranker:
            _put_ranker(ranker, draft)
    return store.open()
