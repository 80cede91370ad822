"""Entries as bytes: a header of fixed length, then the payload. Nothing in it is executed when it is read."""

import struct

from cluster.cache.entry import Entry

HEADER = struct.Struct("<B4dQ")  # format, fresh_until, stale_until, cost_ms, fresh_s, weight; scripts.py reads fresh_until as well
FORMAT = 1


def to_bytes(entry: Entry) -> bytes:
    header = HEADER.pack(FORMAT, entry.fresh_until, entry.stale_until, entry.cost_ms, entry.fresh_s, entry.weight)
    return header + bytes(entry.payload)


def from_bytes(raw: bytes | None) -> Entry | None:
    """None where there are no such bytes, or another version of the program wrote them."""
    if raw is None or len(raw) < HEADER.size or raw[0] != FORMAT:
        return None
    _, fresh_until, stale_until, cost_ms, fresh_s, weight = HEADER.unpack_from(raw)
    return Entry(raw[HEADER.size :], weight, fresh_until, stale_until, cost_ms, fresh_s)
