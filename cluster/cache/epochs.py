"""What was forgotten when, so that nothing computed from before comes back.

The computation of an answer notes the epoch as it begins; each erasure begins a new one. An answer is taken in only where nothing that it
belongs to was erased since its epoch.
"""

from collections import OrderedDict

from cluster.cache.entry import Key
from cluster.cache.scopes import scope_digest, scopes_of

REMEMBERED = 100_000


class Epochs:
    """Counts erasures from `start` on. Only the latest `remembered` scopes are known one by one, by their digests: what began before those
    is refused.

    `start` must lie above every epoch that an earlier life of the same cache handed out; nanoseconds since 1970 do.
    """

    def __init__(self, start: int, remembered: int = REMEMBERED) -> None:
        self.now = self._floor = start
        self._remembered = remembered
        self._ended: OrderedDict[str, int] = OrderedDict()

    def end(self, namespace: str | None = None, group: str | None = None) -> None:
        """Everything of the group (None: the namespace; None both: everything) that is under way now is out of date."""
        self.now += 1
        scope = scope_digest(namespace, group)
        self._ended[scope] = self.now
        self._ended.move_to_end(scope)
        if len(self._ended) > self._remembered:
            self._floor = self._ended.popitem(last=False)[1]

    def admits(self, key: Key, began: int) -> bool:
        if began >= self.now:  # nothing at all was erased since
            return True
        return began >= max(self._floor, *(self._ended.get(scope, 0) for scope in scopes_of(key)))
