"""S3-FIFO: three first-in-first-out queues (Yang et al., "FIFO queues are all you need for cache eviction", SOSP 2023).

    new key -> small (10 %) -- asked for twice or more --> main (90 %) -- hits since --> main again
                  |                                          |
                  +- else evicted, remembered in ghost       +- else evicted
    key the ghost remembers -> main
    key that is expected    -> main

Most keys are asked for once; they pass through the small queue and leave the main one alone. The last line is ours: an answer computed
ahead is asked for later than the small queue would keep it.
"""

from collections import OrderedDict

from cluster.cache.policy import KeyT, WeighedPolicy, WeighedQueue

SMALL_SHARE = 0.1
GHOST_SHARE = 0.9
"""Shares of the capacity: what the small queue may hold, and what the keys that the ghost remembers weighed."""
MOST_HITS = 3
"""Hits are counted up to here: two bits in the paper."""
HITS_TO_PROMOTE = 2
MOST_EXPECTED = 4096


class S3FifoPolicy(WeighedPolicy[KeyT]):
    """The published algorithm with weights for sizes, and its authors' later change (libCacheSim's S3FIFO, 2024).

    The change: until the first eviction, new keys go to the main queue once the small one is full, and again once the capacity has grown.
    Published, they all wait in the small one, and the first evictions take a cache's worth of keys out of it.

    An expected key comes before it is asked for: its first hit is what brings other keys, and does not count.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._filling = True
        self._remembered = False
        self._hits: dict[KeyT, int] = {}
        self._small = WeighedQueue[KeyT]()
        self._main = WeighedQueue[KeyT]()
        self._expected = OrderedDict[int, None]()  # hashes, as below; some may never come: at most MOST_EXPECTED, the oldest are dropped
        self._ghost = WeighedQueue[int]()  # hashes: the memory of evicted keys must not name an erased user

    def touch(self, key: KeyT) -> None:
        hits = self._hits[key]
        if hits < MOST_HITS:
            self._hits[key] = hits + 1

    def expect(self, key: KeyT) -> None:
        if key not in self:
            self._expected[hash(key)] = None
            if len(self._expected) > MOST_EXPECTED:
                self._expected.popitem(last=False)

    def resize(self, capacity: int) -> list[KeyT]:
        self._filling = self._filling or capacity > self.capacity
        evicted = super().resize(capacity)
        self._trim_ghost()
        return evicted

    def _measure(self, capacity: int) -> None:
        super()._measure(capacity)
        self._small_capacity = max(1, int(SMALL_SHARE * capacity))
        self._ghost_capacity = int(GHOST_SHARE * capacity)

    def _make_room(self, key: KeyT, weight: int) -> list[KeyT]:
        # Asked first: keys that leave now must not drive the key out of the ghost that they join.
        self._remembered = (known := hash(key)) in self._ghost
        if self._remembered:
            self._ghost.remove(known)
        return super()._make_room(key, weight)

    def _insert(self, key: KeyT, weight: int) -> None:
        if expected := (known := hash(key)) in self._expected:
            del self._expected[known]
        self._hits[key] = -1 if expected else 0
        if expected or self._remembered or (self._filling and self._small.used >= self._small_capacity):
            self._main.append(key, weight)
        else:
            self._small.append(key, weight)

    def _forget(self, key: KeyT) -> None:
        del self._hits[key]
        (self._small if key in self._small else self._main).remove(key)

    def _reweigh(self, key: KeyT, weight: int) -> list[KeyT]:
        (self._small if key in self._small else self._main).reweigh(key, weight)
        return super()._reweigh(key, weight)

    def _victim(self) -> KeyT:
        self._filling = False
        if self._main.used <= self.capacity - self._small_capacity:
            while self._small.used:
                key, weight = self._small.pop_oldest()
                if self._hits[key] < HITS_TO_PROMOTE:
                    self._remember(key, weight)
                    del self._hits[key]
                    return key
                self._hits[key] = 0
                self._main.append(key, weight)
        return self._victim_of_main()

    def _victim_of_main(self) -> KeyT:
        """The oldest key without a hit; those before it go round again and lose a hit each."""
        queue, hits = self._main.weights, self._hits
        while hits[key := next(iter(queue))] > 0:
            hits[key] -= 1
            queue.move_to_end(key)
        self._main.pop_oldest()
        del hits[key]
        return key

    def _remember(self, key: KeyT, weight: int) -> None:
        self._ghost.append(hash(key), weight)
        self._trim_ghost()

    def _trim_ghost(self) -> None:
        while self._ghost.used > self._ghost_capacity:
            self._ghost.pop_oldest()
