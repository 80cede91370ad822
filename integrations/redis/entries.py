"""Entries as bytes: a header of fixed length, then the payload. Reading the bytes executes nothing of them."""

import struct

from cluster.cache.entry import Entry

HEADER = struct.Struct("<B4dQQ?")
"""Format, fresh_until, stale_until, cost_ms, fresh_s, weight, epoch, degraded; scripts.py reads five of them."""
FORMAT = 3


def to_bytes(entry: Entry, epoch: int) -> bytes:
    """The bytes of an entry. `epoch`: when its computation began; an erasure since then of anything it belongs to erases it too."""
    header = HEADER.pack(FORMAT, entry.fresh_until, entry.stale_until, entry.cost_ms, entry.fresh_s, entry.weight, epoch, entry.degraded)
    return header + bytes(entry.payload)


def from_bytes(raw: bytes | None) -> Entry | None:
    """The entry of the bytes; None where there are none, or another version of the program wrote them."""
    if raw is None or len(raw) < HEADER.size or raw[0] != FORMAT:
        return None
    _, fresh_until, stale_until, cost_ms, fresh_s, weight, _, degraded = HEADER.unpack_from(raw)
    return Entry(raw[HEADER.size :], weight, fresh_until, stale_until, cost_ms, fresh_s, degraded)
