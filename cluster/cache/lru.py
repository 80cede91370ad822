"""Least recently used: the key with the oldest last hit, or insertion, leaves."""

from cluster.cache.fifo import FifoPolicy
from cluster.cache.policy import KeyT


class LruPolicy(FifoPolicy[KeyT]):
    """First in, first out, where a hit counts as an insertion."""

    def touch(self, key: KeyT) -> None:
        self._weights.move_to_end(key)
