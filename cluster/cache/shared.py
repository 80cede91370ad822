"""The cache that replicas share (L2): keys spread over shards, and no call that can hurt its caller.

    ShardedCache  asked by the tiers; never raises, never takes longer than its deadline; a failure is a miss
    Shard         behind it: an actor, a Redis, a CacheShard in this process; may hang, may raise anything

A shard that fails several times in a row is not asked, and so costs no time, until it is tried again (see cluster.traffic.breaker).
"""

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from cluster.background import Background
from cluster.cache.entry import CacheStatistics, Entry, Key
from cluster.cache.late_leases import LateLeases
from cluster.cache.layout import Layout, ShardsSeen
from cluster.cache.rendezvous import pick
from cluster.cache.shard import Granted, Held, Leased, Lookup
from cluster.errors import BackendUnavailable, ConfigError
from cluster.traffic.breaker import Breaker, BreakerSettings, BreakerState

T = TypeVar("T")
EPOCHS = 2**16
"""How many shards' epochs a process can tell from each other."""
logger = logging.getLogger(__name__)


class Shard(Protocol):
    """One shard; see CacheShard for its methods."""

    async def mget(self, keys: Sequence[Key], *, counted: bool = True) -> Lookup: ...
    async def epochs(self, keys: Sequence[Key]) -> Mapping[Key, int]: ...
    async def mput(self, entries: Mapping[Key, Entry], epochs: Mapping[Key, int]) -> frozenset[Key]: ...
    async def lease(self, key: Key, holder: str, seconds: float, newer_than: float = 0.0) -> Leased: ...
    async def wait(self, key: Key, within_s: float, newer_than: float = 0.0) -> Entry | None: ...
    async def release(self, key: Key, holder: str) -> None: ...
    async def invalidate(self, namespace: str | None = None, group: str | None = None) -> int: ...
    async def statistics(self) -> CacheStatistics: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Erased:
    """How many entries an erasure removed, and the shards that did not confirm it: ask again. Where it is not known which shards there
    are, the whole cache's name is among those.
    """

    entries: int = 0
    unconfirmed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardHealth:
    """One shard as this process sees it. `failures` counts broken calls, `timeouts` those of them that took too long."""

    name: str
    breaker: BreakerState
    calls: int
    failures: int
    timeouts: int
    last_error: str


@dataclass(frozen=True, slots=True)
class SharedSettings:
    """`deadline_s` bounds every call of a request (for `wait`, in addition to its own time); `operator_s`: erasures and statistics."""

    deadline_s: float = 0.02
    operator_s: float = 2.0
    breaker: BreakerSettings = field(default_factory=lambda: BreakerSettings(longest_pause_s=30.0))

    def __post_init__(self) -> None:
        if not (self.deadline_s > 0 and self.operator_s > 0):
            raise ConfigError(f"deadline_s is {self.deadline_s} and operator_s {self.operator_s}; both must be positive seconds")


class GuardedShard:
    """A shard behind a deadline and a breaker; counts what fails. `clock` only moves forward.

    Whether a failed shard is back is tried in the background, by a call that costs what a request's does: no request waits for it.
    """

    def __init__(self, name: str, shard: Shard, settings: SharedSettings, clock: Callable[[], float]) -> None:
        self.name, self.shard = name, shard
        self._settings, self._clock = settings, clock
        self._breaker, self._trials = Breaker(settings.breaker), Background(1)
        self._calls = self._failures = self._timeouts = 0
        self._last_error = ""

    async def ask(self, call: Callable[[Shard], Awaitable[T]], more_s: float = 0.0) -> T | None:
        """The shard's answer within the deadline and `more_s`; None where it fails, or is not to be asked now."""
        state = self._breaker.state(self._clock())
        if state is BreakerState.CLOSED:
            return await self._timed(call, self._settings.deadline_s + more_s)
        if state is BreakerState.HALF_OPEN and self._trials.has_room():
            self._trials.start(self._timed(lambda shard: shard.epochs([]), self._settings.deadline_s))
        return None

    async def insist(self, call: Callable[[Shard], Awaitable[T]]) -> T | None:
        """As `ask`, with an operator's patience, also while the breaker is open. An answer after the deadline does not close it: no request
        would have waited for that.
        """
        return await self._timed(call, self._settings.operator_s, well_s=self._settings.deadline_s)

    async def close(self) -> None:
        await self._trials.close()
        await self.insist(lambda shard: shard.close())

    def health(self) -> ShardHealth:
        state = self._breaker.state(self._clock())
        return ShardHealth(self.name, state, self._calls, self._failures, self._timeouts, self._last_error)

    async def _timed(self, call: Callable[[Shard], Awaitable[T]], within_s: float, well_s: float = math.inf) -> T | None:
        """The shard's answer within `within_s`, else None, which counts as a failure. One after `well_s` says nothing of the shard."""
        self._calls += 1
        clock = asyncio.get_running_loop().time
        well_until = clock() + well_s
        try:
            async with asyncio.timeout(within_s):
                answer = await call(self.shard)
        except TimeoutError:
            self._timeouts += 1
            self._failed(f"no answer within {1000 * within_s:g} ms")
            return None
        except Exception as error:  # noqa: BLE001 - a foreign store may raise anything, and all of it is a miss
            self._failed(f"{type(error).__name__}: {error}".splitlines()[0], gone=isinstance(error, BackendUnavailable))
            return None
        if clock() <= well_until:
            self._succeeded()
        return answer

    def _failed(self, why: str, *, gone: bool = False) -> None:
        """Count a failure. A shard that is `gone` need not fail thrice: calls would wait for it to come back."""
        self._failures += 1
        self._last_error = why
        was_closed = self._breaker.trial_at is None
        self._breaker = self._breaker.failed(self._clock(), at_once=gone)
        if was_closed and self._breaker.trial_at is not None:
            wait_s = self._breaker.wait_s(self._clock())
            logger.warning("cache shard %s: %s; its keys are misses until it answers, next trial in %.1f s", self.name, why, wait_s)

    def _succeeded(self) -> None:
        if self._breaker.trial_at is not None:
            logger.info("cache shard %s serves again", self.name)
        self._breaker = self._breaker.succeeded()


class ShardedCache:
    """The calls of a Shard over `shards`, by name; a key belongs to the same one in every process that names them alike.

    None raises: `lease` returns None where the shard is away, and `mput` the keys that an erasure is known to refuse. A lease that is
    granted after `lease` returned None, or was cancelled, is given back; so each call has to name another holder.

    An epoch is valid only at the shard that gave it. The epochs of this cache say which shard that was, and no entry is put into another
    one with them: by then a key may have another owner.
    """

    def __init__(
        self, shards: Mapping[str, Shard], settings: SharedSettings | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if not shards:
            raise ConfigError("the shared cache has no shards; give it at least one")
        self._settings, self._clock = settings or SharedSettings(), clock
        self._shards: dict[str, GuardedShard] = {}
        self._numbers: dict[str, int] = {}
        self._own(shards)
        self._late = LateLeases(self._settings.operator_s)

    @property
    def seen(self) -> ShardsSeen | None:
        """The shards as this process sees them; None where their number is fixed, as here."""
        return None

    def follow(self, layout: Layout) -> None:
        """Follow a layout, unless the number of shards is fixed, as here, or a later layout is followed. Returns at once; idempotent."""

    async def mget(self, keys: Sequence[Key], *, counted: bool = True) -> Lookup:
        """The entries that are there, and each key's epoch; keys of a shard that fails are not found, and have no epoch."""

        async def look_up(shard: GuardedShard, asked: list[Key]) -> Lookup | None:
            found = await shard.ask(lambda s: s.mget(asked, counted=counted))
            return found and Lookup(found.entries, self._all_told(shard, found.epochs))

        parts = await self._each(self._by_shard(keys), look_up)
        return Lookup(
            {key: entry for part in parts for key, entry in part.entries.items()},
            {key: epoch for part in parts for key, epoch in part.epochs.items()},
        )

    async def epochs(self, keys: Sequence[Key]) -> Mapping[Key, int]:
        """For each key the epoch with which to put an entry of this moment, without the keys of a shard that fails."""

        async def ask(shard: GuardedShard, asked: list[Key]) -> Mapping[Key, int] | None:
            epochs = await shard.ask(lambda s: s.epochs(asked))
            return epochs and self._all_told(shard, epochs)

        return {key: epoch for part in await self._each(self._by_shard(keys), ask) for key, epoch in part.items()}

    async def mput(self, entries: Mapping[Key, Entry], epochs: Mapping[Key, int]) -> frozenset[Key]:
        """Put the entries that no erasure since their epochs concerns; returns the keys of those that one does. An entry with an epoch of
        another shard is neither put nor refused: it is a miss.
        """

        async def put(shard: GuardedShard, keys: list[Key]) -> frozenset[Key] | None:
            own = {key: epochs[key] // EPOCHS for key in keys if key in epochs and epochs[key] % EPOCHS == self._numbers[shard.name]}
            kept = {key: entries[key] for key in keys if key in own or key not in epochs}
            return await shard.ask(lambda s: s.mput(kept, own)) if kept else None

        return frozenset[Key]().union(*await self._each(self._by_shard(entries), put))

    async def lease(self, key: Key, holder: str, seconds: float, newer_than: float = 0.0) -> Leased | None:
        shard, sent = self._shard(key), list[asyncio.Future[Leased]]()

        def call(asked: Shard) -> Awaitable[Leased]:
            sent.append(asyncio.ensure_future(asked.lease(key, holder, seconds, newer_than)))
            return asyncio.shield(sent[0])

        leased = None
        try:
            leased = await shard.ask(call)
            return replace(leased, epoch=self._told(shard, leased.epoch)) if isinstance(leased, Granted | Held) else leased
        finally:
            if leased is None and sent:
                self._late.give_back(sent[0], lambda: shard.shard.release(key, holder))

    async def wait(self, key: Key, within_s: float, newer_than: float = 0.0) -> Entry | None:
        return await self._shard(key).ask(lambda s: s.wait(key, within_s, newer_than), more_s=within_s)

    async def release(self, key: Key, holder: str) -> None:
        await self._shard(key).ask(lambda s: s.release(key, holder))

    async def invalidate(self, namespace: str | None = None, group: str | None = None) -> Erased:
        """Forget a group, a namespace (group None) or everything, in all shards. May be repeated."""
        shards = [self._shards[name] for name in self._names]
        counts = await asyncio.gather(*(shard.insist(lambda s: s.invalidate(namespace, group)) for shard in shards))
        return Erased(
            sum(count or 0 for count in counts), tuple(shard.name for shard, count in zip(shards, counts, strict=True) if count is None)
        )

    async def statistics(self) -> Mapping[str, CacheStatistics]:
        """The statistics by shard; shards that do not answer are left out."""
        shards = [self._shards[name] for name in self._names]
        answers = await asyncio.gather(*(shard.insist(lambda s: s.statistics()) for shard in shards))
        return {shard.name: answer for shard, answer in zip(shards, answers, strict=True) if answer is not None}

    async def worth_repeating(self, unconfirmed: Collection[str]) -> bool:
        """Whether an erasure comes further now: one of those that did not confirm it answers, or is gone for good."""
        answering = (await self.statistics()).keys()
        return any(name in answering or name not in self._names for name in unconfirmed)

    def health(self) -> tuple[ShardHealth, ...]:
        return tuple(self._shards[name].health() for name in self._names)

    async def close(self) -> None:
        await self._late.close()
        await asyncio.gather(*(shard.close() for shard in self._shards.values()))

    def _own(self, shards: Mapping[str, Shard]) -> None:
        """Have these shards own the keys from now on."""
        self._shards = {name: self._shards.get(name) or self._guarded(name, shard) for name, shard in shards.items()}
        self._names = sorted(shards)
        for name in self._names:
            self._numbers.setdefault(name, len(self._numbers))

    def _guarded(self, name: str, shard: Shard) -> GuardedShard:
        return GuardedShard(name, shard, self._settings, self._clock)

    def _told(self, shard: GuardedShard, epoch: int) -> int:
        return epoch * EPOCHS + self._numbers[shard.name]

    def _all_told(self, shard: GuardedShard, epochs: Mapping[Key, int]) -> Mapping[Key, int]:
        return {key: self._told(shard, epoch) for key, epoch in epochs.items()}

    def _shard(self, key: Key) -> GuardedShard:
        return self._shards[pick(key, self._names)]

    def _by_shard(self, keys: Iterable[Key]) -> Mapping[GuardedShard, list[Key]]:
        grouped: defaultdict[GuardedShard, list[Key]] = defaultdict(list)
        for key in keys:
            grouped[self._shard(key)].append(key)
        return grouped

    @staticmethod
    async def _each(grouped: Mapping[GuardedShard, list[Key]], ask: Callable[[GuardedShard, list[Key]], Awaitable[T | None]]) -> list[T]:
        """The shards' answers to `ask`, which are asked at the same time, without those that fail."""
        answers = await asyncio.gather(*(ask(shard, keys) for shard, keys in grouped.items()))
        return [answer for answer in answers if answer is not None]
