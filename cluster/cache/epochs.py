"""What was erased when, so that no answer from before an erasure comes back.

Each erasure begins a new epoch. The computation of an answer notes the epoch in which it begins, and the answer is taken in only where no
erasure since then covers it.
"""

from collections import OrderedDict

from cluster.cache.entry import Key
from cluster.cache.scopes import scope_digest, scopes_of

REMEMBERED = 100_000


class Epochs:
    """Counts erasures from `start` on. Only the latest `remembered` scopes are known one by one, by their digests: answers from before
    those are refused.

    `start` must be above every epoch that the same cache handed out before a restart; nanoseconds since 1970 are.
    """

    def __init__(self, start: int, remembered: int = REMEMBERED) -> None:
        self.now = self._floor = start
        self._remembered = remembered
        self._ended: OrderedDict[str, int] = OrderedDict()

    def end(self, namespace: str | None = None, group: str | None = None) -> None:
        """Note an erasure of a group (None: the namespace; None both: everything): answers of it that are under way are out of date."""
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
