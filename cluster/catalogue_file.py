"""The catalogue as a Parquet file: one row an item, in index order."""

import json
from collections.abc import Iterator
from pathlib import Path

from cluster.dataset import Catalogue
from cluster.values import Item

ROWS_AT_ONCE = 4096
BUFFER_BYTES = 1 << 20


def write_catalogue(catalogue: Catalogue, path: Path) -> None:
    """Write the item table; attributes are kept as one JSON object a row."""
    import pyarrow as pa  # noqa: PLC0415 - a model serves, and a kernel is tried, without a catalogue
    import pyarrow.parquet as pq  # noqa: PLC0415

    columns = {
        "item_id": [item.item_id for item in catalogue.items],
        "title": [item.title for item in catalogue.items],
        "attributes": [json.dumps(dict(item.attributes), ensure_ascii=False) for item in catalogue.items],
    }
    with path.open("wb") as file:  # of a path Arrow would take `shop:v2/...` for an address
        pq.write_table(pa.table(columns), file)


def read_catalogue(path: Path) -> Catalogue:
    """The catalogue that `write_catalogue` wrote, with the same indices. What Arrow would keep for the next file is given back."""
    import pyarrow as pa  # noqa: PLC0415 - as above

    catalogue = Catalogue(list(read_items(path)))
    pa.default_memory_pool().release_unused()
    return catalogue


def read_items(path: Path, most: int | None = None) -> Iterator[Item]:
    """The items in index order, of which few are read at once: of long attributes the JSON of all takes as much memory as the items.
    `most`: at most so many, at equal distances.
    """
    import pyarrow.parquet as pq  # noqa: PLC0415 - as above

    with path.open("rb") as file:
        opened = pq.ParquetFile(file, buffer_size=BUFFER_BYTES, pre_buffer=False)  # else Arrow holds the whole file
        step, following = 1 if most is None else max(1, -(-opened.metadata.num_rows // most)), 0
        for batch in opened.iter_batches(batch_size=ROWS_AT_ONCE):
            wanted = range(following, len(batch), step)
            following += step * len(wanted) - len(batch)
            columns = (batch if step == 1 else batch.take(list(wanted))).to_pydict()
            for item_id, title, attributes in zip(columns["item_id"], columns["title"], columns["attributes"], strict=True):
                yield Item(item_id, title, json.loads(attributes))
