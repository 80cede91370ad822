"""Which entries a full cache takes in while it hits too rarely.

A flood of keys asked for once (a crawler, a scan, an attack) makes any cache miss. While the hit rate of the latest lookups is below a
minimum, a full cache takes in no key it has not been asked for before, unless it is computed ahead of a request for it, and evicts what is
worth least: frequency x cost / weight. A key that was not taken in and is asked for again counts as a hit, or the rate would stay low for
what the cache refuses.
"""

import random
from collections.abc import Hashable, Iterable

from cluster.cache.entry import Entry, Key
from cluster.cache.policy import WeighedQueue
from cluster.errors import ConfigError

_HALVES = bytes(count // 2 for count in range(256))


class FrequencySketch:
    """Roughly how often a key was counted of late: a count-min sketch (Cormode and Muthukrishnan, 2005) whose counters are halved after
    every `memory` counts, as in TinyLFU (Einziger, Friedman and Manes, 2017).

    Estimates are never too low but for the halving and the limit of 255. There are four rows of at least twice `memory` counters, so that
    a key never counted is taken for a known one in at most (1/2)^4 of cases, and in a hundredth or so on average.
    """

    ROWS = 4

    def __init__(self, memory: int = 50_000) -> None:
        if memory < 1:
            raise ValueError(f"a frequency sketch must remember 1 count or more, not {memory}")
        self.memory = memory
        self._mask = (1 << (2 * memory - 1).bit_length()) - 1
        self._rows = [bytearray(self._mask + 1) for _ in range(self.ROWS)]
        self._counted = 0

    def add(self, key: Hashable) -> None:
        for row, place in zip(self._rows, self._places(key), strict=True):
            if row[place] < 255:
                row[place] += 1
        self._counted += 1
        if self._counted >= self.memory:
            self._rows = [bytearray(row.translate(_HALVES)) for row in self._rows]
            self._counted = 0

    def estimate(self, key: Hashable) -> int:
        return min(row[place] for row, place in zip(self._rows, self._places(key), strict=True))

    def _places(self, key: Hashable) -> Iterable[int]:
        """The key's place in each row, all from one hash by double hashing (Kirsch and Mitzenmacher, 2006)."""
        # The hash of a small integer is that integer: multiply (Knuth, vol. 3, 6.4) so that all bits depend on it.
        mixed = hash(key) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & 0xFFFFFFFFFFFFFFFF
        start, step, mask = mixed >> 32, mixed & 0xFFFFFFFF | 1, self._mask
        return (start & mask, start + step & mask, start + 2 * step & mask, start + 3 * step & mask)


class AdaptiveAdmission:
    """Strict while the recent hit rate is below `minimum_hit_rate`; no longer strict once it is above `relax_at`.

    `relax_at` (default: a tenth of the way from the minimum to 1) lies above the minimum, so that a rate about the minimum does not switch
    to and fro. `sample`: among how many entries, drawn at random, the victim is chosen. `memory`: how many lookups the frequencies
    remember. Raises ConfigError at a minimum that is no share between 0 and 1, and at a `relax_at` below it.
    """

    def __init__(
        self,
        minimum_hit_rate: float,
        *,
        relax_at: float | None = None,
        sample: int = 8,
        memory: int = 50_000,
        seed: int | None = None,
    ) -> None:
        if not 0 < minimum_hit_rate < 1:
            raise ConfigError(
                f"minimum_hit_rate is {minimum_hit_rate}; give a share above 0 and below 1, as 0.05 (no cache always hits), "
                "or do without admission control: in the configuration, 0"
            )
        self.minimum_hit_rate = minimum_hit_rate
        self.relax_at = minimum_hit_rate + (1 - minimum_hit_rate) / 10 if relax_at is None else relax_at
        if self.relax_at < minimum_hit_rate:
            raise ConfigError(f"relax_at ({self.relax_at}) must not be below minimum_hit_rate ({minimum_hit_rate})")
        self.sample = sample
        self.strict = False
        self._frequencies = FrequencySketch(memory)
        self._refused = WeighedQueue[int]()  # hashes: the memory of keys must not name an erased user
        self._random = random.Random(seed)

    def record(self, key: Hashable, recent_hit_rate: float | None) -> None:
        """Note a lookup. `recent_hit_rate`: with it, `refused` keys among the hits; None before there were enough lookups."""
        self._frequencies.add(key)
        if recent_hit_rate is not None:
            self.strict = recent_hit_rate < (self.relax_at if self.strict else self.minimum_hit_rate)

    def admits(self, key: Hashable) -> bool:
        """Whether a key may enter a full cache: while strict, only one that was asked for before the lookup that has just missed it."""
        return not self.strict or self._frequencies.estimate(key) > 1

    def expect(self, key: Hashable) -> None:
        """Note that a key is going to be asked for: it counts as asked for before and now."""
        self._frequencies.add(key)
        self._frequencies.add(key)

    def refuse(self, key: Hashable, weight: int, capacity: int) -> None:
        """Note a key that is not taken in, for about as long as a cache of this capacity would have kept it."""
        self.refused(key)
        self._refused.append(hash(key), weight)
        while self._refused.used > capacity:
            self._refused.pop_oldest()

    def refused(self, key: Hashable) -> bool:
        """Whether a key that is looked up was refused of late; asked once for each time."""
        if known := (hashed := hash(key)) in self._refused:
            self._refused.remove(hashed)
        return known

    def victim(self, pool: "SampledKeys", entries: dict[Key, Entry], now: float) -> Key:
        """The key that is worth least to keep among a sample of the pool's keys."""
        return min(pool.draw(self.sample, self._random), key=lambda key: self.value(key, entries[key], now))

    def value(self, key: Hashable, entry: Entry, now: float) -> float:
        """In proportion, the milliseconds of computing that a byte of this entry saves; less than any other where it is over. An entry of
        unknown cost counts as one of 1 ms.
        """
        if entry.freshness(now) == "expired":
            return -1.0
        return self._frequencies.estimate(key) * (entry.cost_ms or 1.0) / entry.weight


def admission_of(minimum_hit_rate: float) -> AdaptiveAdmission | None:
    """The admission for a minimum hit rate; at 0 None: the cache takes in everything. Raises ConfigError as AdaptiveAdmission does."""
    return AdaptiveAdmission(minimum_hit_rate) if minimum_hit_rate else None


class SampledKeys:
    """Keys of which a few can be drawn in constant time: at random, or one after the other."""

    def __init__(self) -> None:
        self._hand = 0
        self._keys: list[Key] = []
        self._places: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: Key) -> None:
        if key not in self._places:
            self._places[key] = len(self._keys)
            self._keys.append(key)

    def discard(self, key: Key) -> None:
        place = self._places.pop(key, None)
        if place is None:
            return
        last = self._keys.pop()
        if last != key:
            self._keys[place] = last
            self._places[last] = place

    def draw(self, count: int, source: random.Random) -> list[Key]:
        """`count` keys, some perhaps twice. Raises IndexError where there are none."""
        return source.choices(self._keys, k=count)

    def at_hand(self) -> Key:
        """The key after the one that was `passed` last, then from the beginning again. Raises IndexError where there are none."""
        if self._hand >= len(self._keys):
            self._hand = 0
        return self._keys[self._hand]

    def passed(self) -> None:
        """The key at hand stays: it is the next one's turn, as it is where that key is discarded."""
        self._hand += 1
