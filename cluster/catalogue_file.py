"""The catalogue as a Parquet file: one row an item, in index order."""

import json
from pathlib import Path

from cluster.dataset import Catalogue
from cluster.values import Item


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
    """The catalogue that `write_catalogue` wrote, with the same indices."""
    import pyarrow.parquet as pq  # noqa: PLC0415 - as above

    with path.open("rb") as file:
        columns = pq.read_table(file).to_pydict()
    rows = zip(columns["item_id"], columns["title"], columns["attributes"], strict=True)
    return Catalogue([Item(item_id, title, json.loads(attributes)) for item_id, title, attributes in rows])
