"""Entries as bytes: a header of fixed length, then the payload. Nothing in it is executed when it is read."""

import struct

from cluster.cache.entry import Entry

HEADER = struct.Struct("<B4dQQ")  # format, fresh_until, stale_until, cost_ms, fresh_s, weight, epoch; scripts.py reads three of them
FORMAT = 2


def to_bytes(entry: Entry, epoch: int) -> bytes:
    """`epoch`: when its computation began; it counts as erased where something that it belongs to was erased since."""
    header = HEADER.pack(FORMAT, entry.fresh_until, entry.stale_until, entry.cost_ms, entry.fresh_s, entry.weight, epoch)
    return header + bytes(entry.payload)


def from_bytes(raw: bytes | None) -> Entry | None:
    """None where there are no such bytes, or another version of the program wrote them."""
    if raw is None or len(raw) < HEADER.size or raw[0] != FORMAT:
        return None
    _, fresh_until, stale_until, cost_ms, fresh_s, weight, _ = HEADER.unpack_from(raw)
    return Entry(raw[HEADER.size :], weight, fresh_until, stale_until, cost_ms, fresh_s)
