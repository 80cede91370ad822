"""Which keys are asked for most at the moment, in bounded memory: what is worth refreshing before its time is over."""

import heapq
import math
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from cluster.cache.entry import Entry

KeyT = TypeVar("KeyT", bound=Hashable)

_RESCALE_AFTER_HALF_LIVES = 500  # a count of 2^500 is still far from the largest float, 2^1023


class HotKeys(Generic[KeyT]):
    """The space-saving algorithm (Metwally, Agrawal and El Abbadi, 2005) over counts that halve every `half_life_s`.

    At most `capacity` keys are counted; a new one takes the place of the least counted one and inherits its count as a possible error,
    which `top` and `hot` deduct: they never call a key hotter than it is. `hot_per_minute`: from how many lookups a minute a key is hot,
    here and by those that `divide` the lookups with this one.
    Not thread-safe. `clock` is in seconds; where it is set back, counts go on from what they were.
    """

    def __init__(
        self,
        capacity: int = 1000,
        half_life_s: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        *,
        hot_per_minute: float = 6.0,
    ) -> None:
        if capacity < 1 or half_life_s <= 0:
            raise ValueError(f"hot keys need a capacity of 1 or more and a half-life above 0, not {capacity} and {half_life_s}")
        self.capacity, self.half_life_s, self.hot_per_minute = capacity, half_life_s, hot_per_minute
        self._hot_here, self._clock = hot_per_minute, clock
        self._start = self._latest = clock()
        # Counts grow instead of decaying: a lookup after n half-lives counts 2^n, and all are read divided by the present 2^n.
        self._counts: dict[KeyT, float] = {}
        self._errors: dict[KeyT, float] = {}
        # One line a key, with a count it had once: the least of them is brought up to date only when it is looked at.
        self._least: list[tuple[float, int, KeyT]] = []
        self._lines = 0

    def __len__(self) -> int:
        return len(self._counts)

    def record(self, key: KeyT) -> None:
        """Note a lookup."""
        weight = self._weight_now()
        if key in self._counts:
            self._counts[key] += weight
        elif len(self._counts) < self.capacity:
            self._place(key, weight, error=0.0)
        else:
            error = self._drop_least()
            self._place(key, error + weight, error)

    def forget(self, concerned: Callable[[KeyT], bool]) -> None:
        """Stop counting the concerned keys. Takes time in proportion to the capacity."""
        gone = [key for key in self._counts if concerned(key)]
        for key in gone:
            del self._counts[key], self._errors[key]
        if gone:
            self._least = [line for line in self._least if line[2] in self._counts]
            heapq.heapify(self._least)

    def divide(self, counters: int) -> None:
        """So many count the lookups from now on, each of them an equal share. One lookup alone still makes no key hot, unless it does where
        there is one counter.
        """
        two_lookups = 2 * self._rate_of_one()
        self._hot_here = max(self.hot_per_minute / counters, min(self.hot_per_minute, two_lookups))

    def hot(self, key: KeyT) -> bool:
        return self.rate(key) >= self._hot_here

    def rate(self, key: KeyT) -> float:
        """Lookups a minute, as they would be if steady; 0 for a key that is not counted."""
        if key not in self._counts:
            return 0.0
        weight = self._weight_now()  # first: it may rescale the counts
        count = (self._counts[key] - self._errors[key]) / weight
        return count * self._rate_of_one()

    def top(self, n: int) -> list[tuple[KeyT, float]]:
        """The n hottest keys and their lookups a minute, hottest first. Takes time in proportion to the capacity."""
        return heapq.nlargest(n, ((key, self.rate(key)) for key in self._counts), key=lambda one: one[1])

    def due(self, key: KeyT, entry: Entry, now: float, ahead: float = 0.2) -> bool:
        """Whether to compute the entry anew already: its key is hot, and less than the share `ahead` of its fresh time is left.

        `now` is in the entry's seconds, those of `time.time()`. An entry that does not say how long it was to be fresh is never due.
        """
        return entry.fresh_s > 0 and entry.fresh_until - now < ahead * entry.fresh_s and self.hot(key)

    def _rate_of_one(self) -> float:
        # At a steady r lookups a second the decayed count tends to r x the integral of 2^(-t / half-life), r x half-life / ln 2.
        return math.log(2) / self.half_life_s * 60

    def _weight_now(self) -> float:
        now = self._clock()
        if now < self._latest:
            self._start -= self._latest - now  # else earlier counts would seem to double with each half-life that the clock was set back
        self._latest = now
        half_lives = (now - self._start) / self.half_life_s
        if half_lives > _RESCALE_AFTER_HALF_LIVES:
            self._rescale(half_lives)
            half_lives = 0.0
        return math.pow(2.0, half_lives)

    def _rescale(self, half_lives: float) -> None:
        shrink = math.pow(2.0, -half_lives)
        self._counts = {key: count * shrink for key, count in self._counts.items()}
        self._errors = {key: error * shrink for key, error in self._errors.items()}
        self._least = [(count * shrink, line, key) for count, line, key in self._least]
        self._start += half_lives * self.half_life_s

    def _place(self, key: KeyT, count: float, error: float) -> None:
        self._counts[key], self._errors[key] = count, error
        self._lines += 1  # so that keys of equal counts, which may have no order, are never compared
        heapq.heappush(self._least, (count, self._lines, key))

    def _drop_least(self) -> float:
        """Take out the key with the least count; returns that count."""
        while (line := self._least[0])[0] < self._counts[line[2]]:
            heapq.heapreplace(self._least, (self._counts[line[2]], line[1], line[2]))
        count, _, key = heapq.heappop(self._least)
        del self._counts[key], self._errors[key]
        return count
