"""What goes into the two tiers and what comes out of them, and for how long it stays."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Generic, Literal, TypeAlias, TypeVar

from pydantic import ConfigDict, Field

from cluster.cache.entry import CacheStatistics, Key
from cluster.cache.shared import ShardHealth
from cluster.errors import ConfigError

T_co = TypeVar("T_co", covariant=True)
Tier: TypeAlias = Literal["l1", "l2", "computed", "joined"]


@dataclass(frozen=True, slots=True)
class Computed(Generic[T_co]):
    """`negative`: degraded, worth keeping for a moment only. `keep` False: for those who wait for it, and nobody after them."""

    value: T_co
    negative: bool = False
    keep: bool = True


@dataclass(frozen=True, slots=True)
class Found(Generic[T_co]):
    """`tier`: where it was; "joined" where somebody, here or in another replica, was computing it. `age_s`: since it was computed."""

    value: T_co
    tier: Tier
    age_s: float = 0.0
    stale: bool = False


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
    """What one replica's cache did. `l2`: all shards that answer together, None without a shared cache; `shards`: how it gets on with each.

    `computed`: computations that ended well; `joined`: callers that waited for one of this replica; `refreshes`: computations begun before
    anyone had to wait; `dropped`: refreshes and writes there was no room for; `codec_failures`: values that could not be encoded or
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
    """For how long answers are kept, and what may go on in the background."""

    __pydantic_config__ = ConfigDict(extra="forbid")  # a typing error in a configuration file is not ignored

    ttl_s: Annotated[float, Field(description="an answer is fresh for so long")] = 60.0
    stale_s: Annotated[float, Field(description="and is served for so long after that, while the next one is computed")] = 300.0
    negative_ttl_s: Annotated[
        float, Field(description="a degraded answer is kept for so long; a failed refresh is not repeated earlier")
    ] = 1.0
    jitter: Annotated[
        float, Field(description="times vary by this share, so that what was computed together is not computed anew together")
    ] = 0.1
    wait_s: Annotated[float, Field(description="for so long another replica's computation is awaited")] = 1.0
    lease_s: Annotated[float, Field(description="after so long a replica that computes an answer is thought dead")] = 5.0
    refresh_ahead: Annotated[float, Field(description="hot answers are computed anew when this share of their fresh time is left")] = 0.2
    hot_per_minute: Annotated[float, Field(description="from so many lookups a minute an answer is hot")] = 6.0
    max_background: Annotated[int, Field(description="refreshes at a time; more are dropped")] = 64
    max_writes: Annotated[int, Field(description="answers on their way to the shared cache; more are dropped")] = 1024

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
    """Keys whose refresh went wrong a moment ago; at most `limit`, the oldest are forgotten first."""

    def __init__(self, clock: Callable[[], float] = time.time, limit: int = 10_000) -> None:
        self._clock, self._limit = clock, limit
        self._until: OrderedDict[Key, float] = OrderedDict()

    def pause(self, key: Key, seconds: float) -> None:
        self._until[key] = self._clock() + seconds
        self._until.move_to_end(key)
        if len(self._until) > self._limit:
            self._until.popitem(last=False)

    def paused(self, key: Key) -> bool:
        return self._clock() < self._until.get(key, 0.0)
