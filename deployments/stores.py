"""Open the stores of a gateway's state, as configured: the cache of answers and the event store. The gateway starts without them too."""

import asyncio
import logging
from collections.abc import Callable

from cluster.cache.actor_shards import connect, name_of, remove_all
from cluster.cache.admission import admission_of
from cluster.cache.memory import MemoryCache
from cluster.cache.shared import ShardedCache
from cluster.cache.tier_values import TierSettings
from cluster.cache.tiered import TieredCache
from cluster.config import CacheSettings, Settings
from cluster.errors import GenrecError
from cluster.events.opened_later import StoreOpenedLater
from cluster.values import Recommendation
from pipelines.answer_codec import ANSWER_CODEC

REMOVE_EVERY_S, REMOVALS = 30.0, 20
"""How often, and how many times, a gateway without cache actors ends those of an earlier configuration after it has started. A rolling
update ends the last gateways of that configuration in the meantime.
"""
OPEN_WITHIN_S = 8.0
"""How long the start of a gateway waits for the event store: longer than for a connection, so that it can say why there is none."""
logger = logging.getLogger("ray.serve")


async def open_cache(settings: CacheSettings, application: str) -> TieredCache[Recommendation] | None:
    """The cache of an application's answers; with l1 alone where l2 cannot be reached, None where answers are not to be kept."""
    if not settings.enabled:
        await open_shared(settings.model_copy(update={"l2": "off"}), application)
        return None
    admission = admission_of(settings.minimum_hit_rate)
    l1 = MemoryCache(settings.policy, settings.l1_bytes, admission=admission, namespace_share=settings.tenant_share)
    tiers = TierSettings(
        ttl_s=settings.ttl_s, stale_s=settings.stale_s, negative_ttl_s=settings.negative_ttl_s, hot_per_minute=settings.hot_per_minute
    )
    return TieredCache(l1, await open_shared(settings, application), tiers, ANSWER_CODEC)


async def open_shared(settings: CacheSettings, application: str) -> ShardedCache | None:
    """The cache that all gateways of an application share. An error is logged and not raised: answers can always be computed."""
    try:
        if settings.l2 != "actors":
            # those of an earlier configuration would keep what no erasure reaches
            await asyncio.to_thread(remove_all, name_of(application))
        match settings.l2:
            case "actors":
                return await connect(settings, name_of(application))
            case "redis":
                from integrations.redis.cache import RedisCache  # noqa: PLC0415 - an optional dependency

                return await RedisCache.connect(settings, application)
            case "off":
                return None
    except GenrecError:
        logger.exception("answers are kept in this replica alone")
        return None


async def keep_removed(settings: CacheSettings, application: str, remove: Callable[[str], object] = remove_all) -> None:
    """Where no cache actors are configured, end those of an earlier configuration again and again: a gateway of that configuration makes
    them anew with its next look-up, and no later erasure would reach them. `remove` blocks and does not raise.
    """
    if settings.enabled and settings.l2 == "actors":
        return
    for _ in range(REMOVALS):
        await asyncio.sleep(REMOVE_EVERY_S)
        await asyncio.to_thread(remove, name_of(application))


async def open_events(settings: Settings) -> StoreOpenedLater | None:
    """The event store, None where events are switched off. One that is away now is opened by the requests that need it; one that takes
    longer than OPEN_WITHIN_S goes on being opened, and they wait for that.
    """
    if not settings.events.enabled:
        return None
    store = StoreOpenedLater(settings.event_store_url)
    try:
        async with asyncio.timeout(OPEN_WITHIN_S):
            problem = await store.open()
    except TimeoutError:
        problem = f"it has not been opened within {OPEN_WITHIN_S:g} s, and still is to be; look whether it is locked or overloaded"
    if problem:
        logger.warning("until the event store is there, requests must bring their behaviours: %s", problem)
    return store
