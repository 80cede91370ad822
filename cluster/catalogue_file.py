"""The catalogue as a Parquet file: one row an item, in index order."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.dataset import Catalogue
from cluster.values import Item


def write_catalogue(catalogue: Catalogue, path: Path) -> None:
    """Write the item table; attributes are kept as one JSON object a row."""
    columns = {
        "item_id": [item.item_id for item in catalogue.items],
        "title": [item.title for item in catalogue.items],
        "attributes": [json.dumps(dict(item.attributes), ensure_ascii=False) for item in catalogue.items],
    }
    pq.write_table(pa.table(columns), path)


def read_catalogue(path: Path) -> Catalogue:
    """The catalogue that `write_catalogue` wrote, with the same indices."""
    columns = pq.read_table(path).to_pydict()
    rows = zip(columns["item_id"], columns["title"], columns["attributes"], strict=True)
    return Catalogue([Item(item_id, title, json.loads(attributes)) for item_id, title, attributes in rows])
