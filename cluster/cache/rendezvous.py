"""Which shard a key belongs to, the same in every process: highest random weight (Thaler & Ravishankar, 1996).

Every node draws a number for the key and the highest wins. Where a node goes, only its keys move, each to the node that came second;
where a node comes, it takes its share, and nothing moves between the others.
"""

from collections.abc import Sequence
from hashlib import blake2b

from cluster.cache.entry import Key
from cluster.errors import ConfigError


def pick(key: Key, nodes: Sequence[str]) -> str:
    """The node for `key`, in any order of `nodes`. Raises ConfigError where there are none."""
    if not nodes:
        raise ConfigError("there are no cache shards to choose from; give the shared cache at least one")
    named = _bytes_of(key)
    return max(nodes, key=lambda node: (_weight(named, node), node))


def _weight(named: bytes, node: str) -> bytes:
    return blake2b(_prefixed(node) + named, digest_size=8).digest()


def _bytes_of(key: Key) -> bytes:
    return b"".join(map(_prefixed, key))


def _prefixed(part: str) -> bytes:
    """The part with its length before it, so that ("ab", "c") and ("a", "bc") differ."""
    encoded = part.encode()
    return len(encoded).to_bytes(4, "big") + encoded
