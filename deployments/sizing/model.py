"""The sizes of a model, from which the memory that it takes is reckoned."""

import json
import sys
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from cluster.bundle import CATALOGUE, Bundle
from cluster.catalogue_file import read_items
from cluster.dataset import JSON_KEPT
from cluster.errors import BundleError
from cluster.values import Item
from integrations.decoder.config import DecoderConfig
from integrations.hstu.config import HSTUConfig, RankerConfig, SASRecConfig, SequenceConfig

CONFIGS: dict[str, type[SequenceConfig]] = {"hstu": HSTUConfig, "sasrec": SASRecConfig}
SAMPLED = 1000
GRAPHS = frozenset(f"{kind}/{graph}" for kind in ("onnx", "tensorrt") for graph in ("encode", "retrieve", "append", "rank", "rank_append"))


@dataclass(frozen=True, slots=True)
class Entry:
    """The bytes that an item of the catalogue takes. `held`: as a Python object, with its places in list and index; `title`: its title's
    letters; `json`: the beginning of its JSON in an answer.
    """

    held: int = 400
    title: int = 30
    json: int = 180


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a model. `graphs`: what it is compiled to, as onnx/retrieve."""

    name: str
    encoder: SequenceConfig
    decoder: DecoderConfig | None = None
    ranker: RankerConfig | None = None
    graphs: frozenset[str] = GRAPHS
    entry: Entry = Entry()

    @property
    def items(self) -> int:
        return self.encoder.items

    @property
    def vector_bytes(self) -> int:
        """The bytes of all items' vectors, (V + 1, D) in fp32."""
        return 4 * (self.items + 1) * self.encoder.dim

    @property
    def catalogue_bytes(self) -> int:
        return self.items * self.entry.held + table_bytes(self.items)

    @property
    def json_bytes(self) -> int:
        """The bytes of the beginnings of items' JSON in answers, as far as they are kept."""
        kept = min(self.items, JSON_KEPT)
        return kept * self.entry.json + table_bytes(kept)


def sizes_of(bundle: Bundle, entry: Entry | None = None) -> Sizes:
    """The sizes of a bundle's model. Raises BundleError where this release does not know its family or configuration."""
    manifest = bundle.manifest
    if (family := CONFIGS.get(manifest.model.family)) is None:
        raise BundleError(f"{bundle.version} is a {manifest.model.family!r}; this release sizes {', '.join(CONFIGS)}")
    try:
        encoder = family.model_validate(manifest.model.config)
        decoder = DecoderConfig.model_validate(manifest.decoder.config) if manifest.decoder else None
    except ValidationError as error:
        raise BundleError(f"the configuration of {bundle.version} is not one this release understands: {error}") from error
    ranker = RankerConfig.of(manifest.ranker) if manifest.ranker else None
    graphs = frozenset(f"{one.kind}/{one.graph}" for one in manifest.artifacts)
    return Sizes(bundle.version, encoder, decoder, ranker, graphs, entry or Entry())


def sampled_entry(bundle: Bundle) -> Entry:
    """The mean entry of the bundle's catalogue, over SAMPLED items at equal distances: items that no table describes may come last. The
    file is read where the bundle has not read its catalogue yet.
    """
    if bundle.has_catalogue:
        items = bundle.catalogue.items
        made = list(items[:: max(1, -(-len(items) // SAMPLED))])
    else:
        made = list(read_items(bundle.path / CATALOGUE, SAMPLED))
    count = max(1, len(made))
    held = sum(map(_held, made)) // count
    titles = sum(len(item.title) for item in made) // count
    texts = sum(len(item.item_id) + len(item.title) + len(json.dumps(item.attributes, ensure_ascii=False)) for item in made) // count
    return Entry(held, titles, _in_memory(texts + 100))


def _held(item: Item) -> int:
    strings = (item.item_id, item.title, *item.attributes, *item.attributes.values())
    return allocated(item) + allocated(item.attributes) + sum(map(allocated, strings)) + 32 + 8


def allocated(value: Any) -> int:
    """Bytes that Python's allocator takes for an object, without what it refers to."""
    return -(-sys.getsizeof(value) // 16) * 16


def _in_memory(letters: int) -> int:
    return -(-(letters + 49) // 16) * 16


def table_bytes(entries: int) -> int:
    """The bytes of a dict of so many entries: at most two thirds of its places are taken, and it grows by doubling."""
    if not entries:
        return 0
    places = 1 << (-(-entries * 3 // 2) - 1).bit_length()
    return places * 4 + places * 2 // 3 * 16
