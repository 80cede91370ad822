"""The values that go into the two tiers and come out of them, and how long they stay."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from cluster.cache.entry import CacheStatistics, Key
from cluster.cache.shared import ShardHealth
from cluster.errors import ConfigError
from cluster.values import CacheTier

T_co = TypeVar("T_co", covariant=True)
MOST_PAUSES = 10_000
JITTER = 0.1
"""The share by which the times that answers are kept vary where nothing else is said."""
KEPT_TIMES = 1.2
"""How many times its configured time an answer may be kept: JITTER longer, with a margin."""


@dataclass(frozen=True, slots=True)
class Computed(Generic[T_co]):
    """A computed answer. `degraded`: worth keeping for a moment only. `keep` False: only for the callers that wait for it."""

    value: T_co
    degraded: bool = False
    keep: bool = True


@dataclass(frozen=True, slots=True)
class Found(Generic[T_co]):
    """An answer that was found. `tier`: where it was, "joined" where another caller was computing it; `age_s`: since it was computed.
    `due`: to be computed anew, as it is stale or soon will be and is in demand. `kept` False: it was computed only for those that waited.
    """

    value: T_co
    tier: CacheTier
    age_s: float = 0.0
    stale: bool = False
    due: bool = False
    kept: bool = True


@dataclass(frozen=True, slots=True)
class Invalidated:
    """Entries removed from each tier, and the shards that did not confirm: ask again."""

    l1: int
    l2: int = 0
    unconfirmed: tuple[str, ...] = ()

    @property
    def dropped(self) -> int:
        return self.l1 + self.l2


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """One replica's cache. `l2`: all shards that answer, together; None without a shared cache. `shards`: each shard as this replica sees
    it.

    `computed`: computations that ended well; `joined`: callers that waited for one of this replica; `refreshes`: computations begun before
    a caller had to wait; `dropped`: refreshes and writes for which there was no room; `codec_failures`: values that could not be encoded or
    decoded. `hot`: digests, without their users, and lookups a minute, hottest first.
    """

    l1: CacheStatistics
    l2: CacheStatistics | None
    shards: tuple[ShardHealth, ...]
    computed: int
    joined: int
    refreshes: int
    dropped: int
    codec_failures: int
    hot: tuple[tuple[str, float], ...]

    @property
    def l2_failures(self) -> int:
        """Calls of the shared cache that broke or took too long."""
        return sum(shard.failures for shard in self.shards)

    @property
    def hot_per_minute(self) -> tuple[float, ...]:
        return tuple(rate for _, rate in self.hot)


@dataclass(frozen=True, slots=True)
class TierSettings:
    """For how long answers are kept, and what may go on in the background. Raises ConfigError at values that make no sense.

    `ttl_s`: an answer is fresh for so long, and for `stale_s` after that it is served while the next one is computed. `negative_ttl_s`: a
    degraded answer is kept for so long, and a refresh that left nothing to keep is not repeated earlier. `jitter`: times vary by this
    share, so that what was computed together is not computed anew together. `wait_s`: for so long another replica's computation is awaited
    before it is done here as well; as long as an answer may take without hurting the caller. `lease_s`: after so long a replica that
    computes an answer is thought dead. `refresh_ahead`: answers looked up `hot_per_minute` times or more, in all replicas together as
    one of them reckons, are computed anew when this share of their fresh time is left. `max_background`: refreshes at a time,
    of one lane half of them; `max_writes`: answers on their way to the shared cache; more are dropped.
    """

    ttl_s: float = 60.0
    stale_s: float = 300.0
    negative_ttl_s: float = 1.0
    jitter: float = JITTER
    wait_s: float = 0.5
    lease_s: float = 5.0
    refresh_ahead: float = 0.2
    hot_per_minute: float = 6.0
    max_background: int = 64
    max_writes: int = 1024

    def __post_init__(self) -> None:
        if not min(self.ttl_s, self.negative_ttl_s, self.wait_s, self.lease_s, self.hot_per_minute) > 0:
            raise ConfigError(
                f"ttl_s is {self.ttl_s}, negative_ttl_s {self.negative_ttl_s}, wait_s {self.wait_s}, lease_s {self.lease_s}, "
                f"hot_per_minute {self.hot_per_minute}; all must be positive"
            )
        if not self.stale_s >= 0:
            raise ConfigError(f"stale_s is {self.stale_s}; it must be 0 (never serve a stale answer) or more seconds")
        if not (0 <= self.jitter < 1 and 0 <= self.refresh_ahead < 1):
            raise ConfigError(f"jitter is {self.jitter} and refresh_ahead {self.refresh_ahead}; both are shares, from 0 to below 1")
        if min(self.max_background, self.max_writes) < 0:
            raise ConfigError(f"max_background is {self.max_background} and max_writes {self.max_writes}; neither may be negative")


class Pauses:
    """Keys for which a refresh left nothing a moment ago; at most MOST_PAUSES, the oldest are forgotten first."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until: OrderedDict[Key, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._until)

    def pause(self, key: Key, seconds: float) -> None:
        self._until[key] = self._clock() + seconds
        self._until.move_to_end(key)
        self._drop_ended()
        if len(self._until) > MOST_PAUSES:
            self._until.popitem(last=False)

    def paused(self, key: Key) -> bool:
        return self._clock() < self._until.get(key, 0.0)

    def forget(self, concerned: Callable[[Key], bool]) -> None:
        """Drop the pauses of the concerned keys, so that no erased user is named here. Takes time in proportion to their number."""
        self._drop_ended()
        for key in [key for key in self._until if concerned(key)]:
            del self._until[key]

    def _drop_ended(self) -> None:
        """Drop pauses that have ended, the oldest first, as they are about equally long."""
        while self._until and next(iter(self._until.values())) <= self._clock():
            self._until.popitem(last=False)
