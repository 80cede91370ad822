"""One user's rows as bytes, from a store of one process to that of another.

MessagePack: the model that computed the rows and their layout, then the arrays' bytes. Nothing is executed as they are read; rows of
another model or layout than the reader's, and arrays of a wrong size, are refused.
"""

from collections.abc import Mapping

import msgspec
import numpy as np

from cluster.values import Int64Array
from integrations.hstu.state.pool import Plane
from integrations.hstu.state.store import Rows

FORMAT = 1


class Layout(msgspec.Struct, frozen=True):
    """The layout of rows. `model`: names all that computed them; `planes`: name -> a row's shape, the axis of rows, the numbers' type."""

    model: str
    planes: dict[str, tuple[tuple[int, ...], int, str]]
    format: int = FORMAT


class Packed(msgspec.Struct, frozen=True):
    """A user's rows as they are written. `identities`: int64, (rows, columns)."""

    layout: Layout
    rows: int
    identities: bytes
    planes: dict[str, bytes]


def layout_of(model: str, planes: Mapping[str, Plane]) -> Layout:
    return Layout(model, {name: (tuple(plane.shape), plane.axis, np.dtype(plane.dtype).str) for name, plane in planes.items()})


def packed(layout: Layout, rows: Int64Array, planes: Rows) -> bytes:
    arrays = {name: array.tobytes() for name, array in planes.items()}
    return msgspec.msgpack.encode(Packed(layout, len(rows), rows.tobytes(), arrays))


def unpacked(data: bytes, layout: Layout) -> tuple[Int64Array, Rows]:
    """The rows' identities and their arrays, which cannot be written to. Raises ValueError at bytes that are not of this layout."""
    try:
        found = msgspec.msgpack.decode(data, type=Packed)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"no rows of a user: {error}") from error
    if found.layout != layout:
        raise ValueError(f"rows of another model or layout: {found.layout}, not {layout}")
    if found.planes.keys() != layout.planes.keys() or found.rows < 1:
        raise ValueError(f"{found.rows} rows of {sorted(found.planes)}; at least one of each of {sorted(layout.planes)} is needed")
    rows = np.frombuffer(found.identities, np.int64).reshape(found.rows, -1)
    planes = {
        name: np.frombuffer(found.planes[name], dtype).reshape(*shape[:axis], found.rows, *shape[axis:])
        for name, (shape, axis, dtype) in layout.planes.items()
    }
    return rows, planes
