"""A gateway's way to the cache actors: they are made, found and ended by name, and called as Shards.

    replica -> ShardedCache -> ActorShard -> (Ray) -> CacheActor, one process each: APPLICATION-cache-0, -1, ...

Actors are named by the Serve application: two applications on one cluster share none. A call of an actor costs each side about a
millisecond of Python, for one question or many, so questions that wait go together, and those that no caller waits for wait for others.

How many there are may change while they serve (see cluster.cache.elastic): they hand each other what they hold. One that was removed for
good is made anew. A large value stays in the object store of the node that computed it: only a reference passes through the actor, and it
is a miss once that is lost.
"""

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from cluster.background import AHEAD, no_requests_context
from cluster.cache.actor import RAY_ERRORS, Asked, ShardSettings, find, find_or_make, kill, named
from cluster.cache.elastic import ElasticCache
from cluster.cache.entry import CacheStatistics, Entry, Key
from cluster.cache.layout import Layout
from cluster.cache.moving import ShardState
from cluster.cache.shard import Leased, Lookup
from cluster.cache.shared import SharedSettings
from cluster.config import CacheSettings
from cluster.errors import BackendUnavailable
from cluster.traffic.batcher import Batcher, Member, Pacing, Raised

T = TypeVar("T")
LARGE_BYTES = 100_000
MOST_TOGETHER, ON_THE_WAY, PATIENCE_S = 16, 2, 0.2
"""Questions in one call, few enough for an answer without Ray's object store; calls under way, and for how long each delays the next."""
AHEAD_WAIT_S = 0.01
"""How long a question that no caller waits for waits for others, at most; less where the deadline is short."""
logger = logging.getLogger(__name__)


class ActorShard:
    """A cache actor as a Movable. After a failed call the actor is found again by its name, or made anew, in the background, as long as it
    is `wanted`.
    """

    def __init__(
        self, name: str, settings: ShardSettings, large_within_s: float, actor: Any, wanted: Callable[[str], bool] = lambda _: True
    ) -> None:
        self._name, self._settings, self._large_within_s, self._wanted = name, settings, large_within_s, wanted
        self._actor = actor
        self._search: asyncio.Task[None] | None = None
        self._ahead_wait_s = min(AHEAD_WAIT_S, large_within_s / 2)
        self._questions: Batcher[Asked, Any] = Batcher(
            self._together,
            _of_one_call,
            lambda: MOST_TOGETHER,
            size=lambda asked: asked.size,
            pacing=Pacing(max_running=lambda: ON_THE_WAY, patience_s=PATIENCE_S),
            cancel_when_all_left=True,
            context=no_requests_context(),
        )

    async def mget(self, keys: Sequence[Key], *, counted: bool = True) -> Lookup:
        found: Lookup = await self._ask(Asked("mget", (list(keys),), {"counted": counted}))
        entries = await asyncio.gather(*map(self._whole, found.entries.values()))
        return Lookup({key: entry for key, entry in zip(found.entries, entries, strict=True) if entry}, found.epochs)

    async def epochs(self, keys: Sequence[Key]) -> Mapping[Key, int]:
        epochs: Mapping[Key, int] = await self._ask(Asked("epochs", (list(keys),)))
        return epochs

    async def mput(self, entries: Mapping[Key, Entry], epochs: Mapping[Key, int]) -> frozenset[Key]:
        light = {key: await _light(entry) for key, entry in entries.items()}
        size = sum(len(entry.payload) for entry in light.values() if isinstance(entry.payload, bytes))
        arguments = light, dict(epochs)
        refused: frozenset[Key]
        if size > LARGE_BYTES:  # no question waits for so many bytes
            refused = await self._call("mput", *arguments)
        else:
            refused = await self._questions.submit(Asked("mput", arguments, size=size))  # at once: others may wait for an entry of these
        return refused

    async def lease(self, key: Key, holder: str, seconds: float, newer_than: float = 0.0) -> Leased:
        leased: Leased = await self._ask(Asked("lease", (key, holder, seconds, newer_than)))
        if not isinstance(leased, Entry):
            return leased
        if (entry := await self._whole(leased)) is not None:
            return entry
        again: Leased = await self._call("lease", key, holder, seconds, max(newer_than, leased.fresh_until))
        if not isinstance(again, Entry):
            return again
        if (entry := await self._whole(again)) is not None:
            return entry
        raise LookupError(f"{self._name}: the value of {key.digest} was lost with the process that computed it")

    async def wait(self, key: Key, within_s: float, newer_than: float = 0.0) -> Entry | None:
        entry: Entry | None = await self._call("wait", key, within_s, newer_than)
        return await self._whole(entry) if entry else None

    async def release(self, key: Key, holder: str) -> None:
        await self._call("release", key, holder)

    async def invalidate(self, namespace: str | None = None, group: str | None = None) -> int:
        count: int = await self._call("invalidate", namespace, group)
        return count

    async def follow(self, layout: Layout) -> ShardState:
        state: ShardState = await self._call("follow", layout)
        return state

    async def erase(self, namespace: str | None, group: str | None, layout: Layout) -> tuple[int, Layout]:
        answer: tuple[int, Layout] = await self._call("erase", namespace, group, layout)
        return answer

    async def statistics(self) -> CacheStatistics:
        answer: CacheStatistics = await self._call("statistics")
        self._actor.configure.remote(self._settings)  # restarted since, it has those it was first made with; else this changes nothing
        return answer

    async def close(self) -> None:
        """The actor stays, for the other replicas and the next ones."""
        if self._search is not None:
            self._search.cancel()

    def _ask(self, asked: Asked) -> asyncio.Future[Any]:
        """The answer to a question, which goes with others."""
        return self._questions.submit(asked, self._ahead_wait_s if AHEAD.get() else 0.0)

    async def _together(self, members: Sequence[Member[Asked, Any]]) -> Sequence[Any | Raised]:
        answers: Sequence[Any | Raised] = await self._call("each", [member.request for member in members])
        return answers

    async def _call(self, method: str, *arguments: Any) -> Any:
        """Raises BackendUnavailable where the actor's process has ended: Ray has the next calls wait until it runs again."""
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except BaseException as error:  # a timeout, seen from here, is a cancellation
            self._find_again()
            if isinstance(error, RayActorError):
                raise BackendUnavailable(f"cache actor {self._name} has ended") from error
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
        if self._wanted(self._name) and (self._search is None or self._search.done()):
            self._search = asyncio.get_running_loop().create_task(self._found())

    async def _found(self) -> None:
        try:
            self._actor = await asyncio.to_thread(find_or_make, self._name, self._settings)
        except RAY_ERRORS as error:
            logger.warning("cache actor %s cannot be reached: %s: %s", self._name, type(error).__name__, error)


class ActorShards:
    """The cache actors of a name, as Shards."""

    def __init__(self, name: str, settings: ShardSettings, large_within_s: float) -> None:
        self._name, self._settings, self._large_within_s = name, settings, large_within_s
        self._wanted = frozenset[str]()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache-actors")

    async def make(self, names: Sequence[str]) -> Mapping[str, ActorShard]:
        self._wanted = frozenset(names)
        actors = await self._ask_ray(lambda: {one: find_or_make(one, self._settings) for one in names})
        return {one: self._shard(one, actor) for one, actor in actors.items()}

    async def others(self, names: Sequence[str]) -> Mapping[str, ActorShard]:
        actors = await self._ask_ray(lambda: {one: find(one) for one in named(self._name) if one not in names})
        return {one: self._shard(one, actor) for one, actor in actors.items() if actor is not None}

    async def end(self, name: str) -> None:
        await self._ask_ray(lambda: kill(name))

    async def _ask_ray(self, question: Callable[[], T]) -> T:
        """Ask one question after the other, in a thread for them alone: while Ray's head is away an answer takes a minute, and questions
        that were given up would hold the threads that the whole process shares.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, question)
        except RAY_ERRORS as error:
            raise _unreachable(error) from error

    def _shard(self, name: str, actor: Any) -> ActorShard:
        return ActorShard(name, self._settings, self._large_within_s, actor, self._wanted_still)

    def _wanted_still(self, name: str) -> bool:
        return name in self._wanted


async def connect(settings: CacheSettings, name: str, deadlines: SharedSettings | None = None) -> ElasticCache:
    """The shared cache of this name; its actors are made where they do not exist, and told the settings where they do. Actors that are not
    wanted any more, as of earlier settings, give what they hold to the others, and are ended.

    `deadlines`: in place of those of the settings. Raises BackendUnavailable in a process that belongs to no Ray cluster.
    """
    if not ray.is_initialized():  # the first remote call would start a cluster of its own
        raise BackendUnavailable("the cache actors live in a Ray cluster, and this process belongs to none; call ray.init first")
    shard = ShardSettings(settings.policy, settings.l2_shard_bytes, settings.tenant_share, settings.minimum_hit_rate, given_at=time.time())
    deadlines = deadlines or SharedSettings(deadline_s=settings.l2_deadline_ms / 1000)
    place = ActorShards(name, shard, deadlines.deadline_s / 2)
    return await ElasticCache.made(name, place, least=settings.l2_shards, most=settings.most_shards, settings=deadlines)


def remove_all(name: str) -> None:
    """End the cache actors of this name for good, where there are any: they outlive the configuration that asked for them. Blocks for one
    call of Ray's head where there are none. Does not raise: what is wrong is logged.
    """
    if not ray.is_initialized():
        return
    try:
        for one in named(name):
            kill(one)
    except RAY_ERRORS as error:
        logger.warning("cache actors may live on (%s: %s); look for them with: ray list actors", type(error).__name__, error)


def name_of(application: str) -> str:
    """What the cache actors of a Serve application are called, before their numbers."""
    return f"{application}-cache"


def _of_one_call(sizes: Sequence[int]) -> Sequence[int]:
    """The first questions that wait, as many as one call takes: MOST_TOGETHER, of LARGE_BYTES together."""
    return range(bisect_right(list(accumulate(sizes[:MOST_TOGETHER])), LARGE_BYTES))


def _unreachable(error: Exception) -> BackendUnavailable:
    return BackendUnavailable(f"the cache actors cannot be reached: {type(error).__name__}: {error}; see: ray status")


async def _light(entry: Entry) -> Entry:
    """The entry; a large payload is put into the object store, and a reference stands in its place."""
    if len(entry.payload) < LARGE_BYTES:
        return entry
    return replace(entry, payload=await asyncio.to_thread(ray.put, entry.payload))  # copies, and may wait for room
