"""Cache shards as named Ray actors, which outlive the process that made them.

    replica -> ShardedCache -> ActorShard -> (Ray) -> CacheActor, one process each: APPLICATION-cache-0, -1, ...

They are named by the Serve application: two applications on one cluster share none.

An actor that dies is restarted by Ray, empty; until then its keys are misses. One that was removed for good is made anew. A large value
stays in the object store of the node that computed it: only a reference passes through the actor, and it is a miss once that is lost.
"""

import asyncio
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayError

from cluster.cache.admission import admission_of
from cluster.cache.entry import CacheStatistics, Entry, Key
from cluster.cache.memory import MemoryCache
from cluster.cache.shard import CacheShard, Leased, Lookup
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.config import CacheSettings
from cluster.errors import BackendUnavailable

NAMESPACE = "genrec"
LARGE_BYTES = 100_000
REFUSALS = (RayError, ValueError, RuntimeError, ConnectionError)  # what Ray raises where it cannot be had
MAX_CONCURRENCY = 10_000  # callers that wait for another's computation take a place each
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShardSettings:
    """What one actor is told. Where two differ, the one that was `given_at` a later time (seconds since 1970) holds."""

    policy: str
    capacity_bytes: int
    namespace_share: float
    minimum_hit_rate: float
    given_at: float


class CacheActor(CacheShard):
    """The shard behind a name; each of its methods is a remote call."""

    def __init__(self, settings: ShardSettings) -> None:
        super().__init__(_memory(settings))
        self._settings = settings

    async def configure(self, settings: ShardSettings) -> bool:
        """Says whether anything changed. The entries stay, as far as there is room for them."""
        if settings.given_at <= self._settings.given_at:
            return False
        known, self._settings = self._settings, settings
        if replace(known, given_at=settings.given_at) == settings:
            return False
        held, self.memory = self.memory.entries(), _memory(settings)
        for key, entry in held:
            self.memory.put(key, entry)
        return True


class ActorShard:
    """An actor as a Shard. After a call that failed it is found again by its name, or made anew, beside the calls."""

    def __init__(self, name: str, settings: ShardSettings, large_within_s: float, actor: Any) -> None:
        self._name, self._settings, self._large_within_s = name, settings, large_within_s
        self._actor = actor
        self._search: asyncio.Task[None] | None = None

    async def mget(self, keys: Sequence[Key], *, counted: bool = True) -> Lookup:
        found: Lookup = await self._call("mget", list(keys), counted=counted)
        entries = await asyncio.gather(*map(self._whole, found.entries.values()))
        return Lookup({key: entry for key, entry in zip(found.entries, entries, strict=True) if entry}, found.epochs)

    async def mput(self, entries: Mapping[Key, Entry], epochs: Mapping[Key, int]) -> frozenset[Key]:
        light = {key: await _light(entry) for key, entry in entries.items()}
        refused: frozenset[Key] = await self._call("mput", light, dict(epochs))
        return refused

    async def lease(self, key: Key, holder: str, seconds: float, newer_than: float = 0.0) -> Leased:
        leased: Leased = await self._call("lease", key, holder, seconds, newer_than)
        if not isinstance(leased, Entry):
            return leased
        if (entry := await self._whole(leased)) is not None:
            return entry
        again: Leased = await self._call("lease", key, holder, seconds, max(newer_than, leased.fresh_until))
        if isinstance(again, Entry):
            raise BackendUnavailable(f"{self._name}: the value of {key.digest} was lost with the process that computed it")
        return again

    async def wait(self, key: Key, within_s: float, newer_than: float = 0.0) -> Entry | None:
        entry: Entry | None = await self._call("wait", key, within_s, newer_than)
        return await self._whole(entry) if entry else None

    async def release(self, key: Key, holder: str) -> None:
        await self._call("release", key, holder)

    async def invalidate(self, namespace: str | None = None, group: str | None = None) -> int:
        count: int = await self._call("invalidate", namespace, group)
        return count

    async def statistics(self) -> CacheStatistics:
        answer: CacheStatistics = await self._call("statistics")
        self._actor.configure.remote(self._settings)  # restarted since, it has those it was first made with; else this changes nothing
        return answer

    async def close(self) -> None:
        """The actor stays, for the other replicas and the next ones."""
        if self._search is not None:
            self._search.cancel()

    async def _call(self, method: str, *arguments: Any, **named: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*arguments, **named)
        except BaseException:  # a timeout, seen from here, is a cancellation
            self._find_again()
            raise

    async def _whole(self, entry: Entry) -> Entry | None:
        """The entry with its bytes; None where those were lost with the process that put them, or do not come in time."""
        if not isinstance(entry.payload, ray.ObjectRef):
            return entry
        try:
            async with asyncio.timeout(self._large_within_s):
                return replace(entry, payload=await entry.payload)
        except (RayError, TimeoutError) as error:
            logger.info("a large cached value is a miss: %s: %s", type(error).__name__, error)
            return None

    def _find_again(self) -> None:
        if self._search is None or self._search.done():
            self._search = asyncio.get_running_loop().create_task(self._found())

    async def _found(self) -> None:
        try:
            self._actor = await asyncio.to_thread(_find_or_make, self._name, self._settings)
        except REFUSALS as error:
            logger.warning("cache actor %s cannot be had: %s: %s", self._name, type(error).__name__, error)


async def connect(settings: CacheSettings, name: str, patience: SharedSettings | None = None) -> ShardedCache:
    """The shared cache of this name; its actors are made where they do not exist, and told the settings where they do. Actors of earlier
    settings, beyond `l2_shards`, are ended: no replica asks them any more, and no erasure would reach what they hold.

    `patience`: the deadlines, in place of those of the settings. Raises BackendUnavailable where Ray refuses.
    """
    if not ray.is_initialized():  # the first remote call would start a cluster of its own
        raise BackendUnavailable("the cache actors live in a Ray cluster, and this process belongs to none; call ray.init first")
    shard = ShardSettings(settings.policy, settings.l2_shard_bytes, settings.tenant_share, settings.minimum_hit_rate, given_at=time.time())
    patience = patience or SharedSettings(deadline_s=settings.l2_deadline_ms / 1000)
    try:
        actors = await asyncio.to_thread(lambda: {one: _find_or_make(one, shard) for one in shard_names(settings.l2_shards, name)})
        await asyncio.to_thread(_end, name, settings.l2_shards)
    except REFUSALS as error:
        raise BackendUnavailable(f"the cache actors cannot be had: {type(error).__name__}: {error}; see: ray status") from error
    shards = {one: ActorShard(one, shard, patience.deadline_s / 2, actor) for one, actor in actors.items()}
    return ShardedCache(shards, patience)


def remove_all(name: str) -> None:
    """End the cache actors of this name for good, where there are any: they outlive the configuration that asked for them. Blocks for one
    call of Ray's head where there are none. Does not raise: what is wrong is logged.
    """
    if not ray.is_initialized():
        return
    try:
        _end(name, 0)
    except REFUSALS as error:
        logger.warning("cache actors may live on (%s: %s); look for them with: ray list actors", type(error).__name__, error)


def name_of(application: str) -> str:
    """What the cache actors of a Serve application are called, before their numbers."""
    return f"{application}-cache"


def shard_names(shards: int, name: str) -> list[str]:
    return [f"{name}-{index}" for index in range(shards)]


def _end(name: str, first: int) -> None:
    """The actors numbered from `first` on. Blocks."""
    numbered = re.compile(rf"{re.escape(name)}-(\d+)")
    for one in ray.util.list_named_actors(all_namespaces=True):
        known = numbered.fullmatch(one["name"]) if one["namespace"] == NAMESPACE else None
        if known and int(known[1]) >= first:
            _kill(one["name"])


def _kill(name: str) -> None:
    try:
        ray.kill(ray.get_actor(name, NAMESPACE))
        logger.info("ended cache actor %s: the configuration has no use for it", name)
    except ValueError:  # another replica was faster
        logger.debug("cache actor %s has ended", name)


def _find_or_make(name: str, settings: ShardSettings) -> Any:
    """Blocks for as long as Ray's head needs; not until the actor runs."""
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "get_if_exists": True, "max_restarts": -1}
    placed = {"num_cpus": 0, "max_concurrency": MAX_CONCURRENCY, "scheduling_strategy": "SPREAD"}
    actor: Any = ray.remote(CacheActor).options(**options, **placed).remote(settings)
    actor.configure.remote(settings)
    return actor


def _memory(settings: ShardSettings) -> MemoryCache:
    admission = admission_of(settings.minimum_hit_rate)
    return MemoryCache(settings.policy, settings.capacity_bytes, admission=admission, namespace_share=settings.namespace_share)


async def _light(entry: Entry) -> Entry:
    """Itself, or where its payload is large, with a reference in its place."""
    if len(entry.payload) < LARGE_BYTES:
        return entry
    return replace(entry, payload=await asyncio.to_thread(ray.put, entry.payload))  # copies, and may wait for room
