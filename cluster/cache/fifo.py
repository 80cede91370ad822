"""First in, first out: the key that has been there longest leaves, whether it is asked for or not."""

from collections import OrderedDict

from cluster.cache.policy import KeyT, WeighedPolicy


class FifoPolicy(WeighedPolicy[KeyT]):
    """The order of insertion is the order of eviction."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # An OrderedDict: taking the first key out of a plain dict walks over all those taken out before it.
        self._weights: OrderedDict[KeyT, int] = OrderedDict()

    def touch(self, key: KeyT) -> None:
        if key not in self._weights:
            raise KeyError(key)

    def _insert(self, key: KeyT, weight: int) -> None:
        """The weights are the queue."""

    def _forget(self, key: KeyT) -> None:
        """The weights are the queue."""

    def _victim(self) -> KeyT:
        return next(iter(self._weights))
