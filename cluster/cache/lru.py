"""Least recently used: the key leaves whose last hit, or insertion, is longest ago."""

from cluster.cache.fifo import FifoPolicy
from cluster.cache.policy import KeyT


class LruPolicy(FifoPolicy[KeyT]):
    """First in, first out, where a hit counts as an insertion."""

    def touch(self, key: KeyT) -> None:
        self._weights.move_to_end(key)
