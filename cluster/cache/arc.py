"""ARC: recency and frequency, balanced by what the cache would have needed (Megiddo and Modha, FAST 2003).

Keys used once are in `once` (T1 in the paper), keys used again in `again` (T2), both least recently used first. For keys evicted from
either, `once_ghost` (B1) and `again_ghost` (B2) remember names and weights. A miss that a ghost remembers shows that its queue was too
short: the target of `once` (p) moves accordingly.
"""

from cluster.cache.policy import KeyT, WeighedPolicy, WeighedQueue


class ArcPolicy(WeighedPolicy[KeyT]):
    """The published algorithm with weights for sizes: where it moves one page, this moves as many keys as make room for the new one.

    Bounds, as published: `once` and its ghost weigh at most the capacity, all four at most twice the capacity.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._once = WeighedQueue[KeyT]()
        self._again = WeighedQueue[KeyT]()
        # hashes: the memory of evicted keys must not name an erased user
        self._once_ghost = WeighedQueue[int]()
        self._again_ghost = WeighedQueue[int]()
        self._target = 0.0
        self._met_again_ghost = False

    def touch(self, key: KeyT) -> None:
        if key in self._again:
            self._again.weights.move_to_end(key)
        else:
            self._again.append(key, self._once.remove(key))

    def resize(self, capacity: int) -> list[KeyT]:
        self._target = self._target * capacity / self.capacity
        evicted = super().resize(capacity)
        self._trim_ghosts()
        return evicted

    def _make_room(self, key: KeyT, weight: int) -> list[KeyT]:
        self._met_again_ghost = hash(key) in self._again_ghost
        if hash(key) in self._once_ghost:
            self._target = min(self._target + weight * _ratio(self._again_ghost, self._once_ghost), float(self.capacity))
        elif self._met_again_ghost:
            self._target = max(self._target - weight * _ratio(self._once_ghost, self._again_ghost), 0.0)
        return super()._make_room(key, weight)

    def _insert(self, key: KeyT, weight: int) -> None:
        known = hash(key)
        if known in self._once_ghost:
            self._once_ghost.remove(known)
            self._again.append(key, weight)
        elif known in self._again_ghost:
            self._again_ghost.remove(known)
            self._again.append(key, weight)
        else:
            self._once.append(key, weight)
        self._trim_ghosts()

    def _victim(self) -> KeyT:
        once = self._once.used
        if once and (once > self._target or (self._met_again_ghost and once >= self._target) or not self._again.used):
            queue, ghost = self._once, self._once_ghost
        else:
            queue, ghost = self._again, self._again_ghost
        key, weight = queue.pop_oldest()
        ghost.append(hash(key), weight)
        return key

    def _trim_ghosts(self) -> None:
        while self._once_ghost.used and self._once.used + self._once_ghost.used > self.capacity:
            self._once_ghost.pop_oldest()
        while self._again_ghost.used and self.used + self._once_ghost.used + self._again_ghost.used > 2 * self.capacity:
            self._again_ghost.pop_oldest()

    def _forget(self, key: KeyT) -> None:
        (self._again if key in self._again else self._once).remove(key)

    def _reweigh(self, key: KeyT, weight: int) -> list[KeyT]:
        (self._again if key in self._again else self._once).reweigh(key, weight)
        evicted = super()._reweigh(key, weight)
        self._trim_ghosts()
        return evicted


def _ratio(other: WeighedQueue[int], met: WeighedQueue[int]) -> float:
    """How many times the key's weight the target moves: the shorter the ghost that remembered the key, the more."""
    return max(1.0, other.used / met.used)
