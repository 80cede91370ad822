"""The search for cache actors, by a head of Ray that does not answer."""

import asyncio
import threading

import ray

from cluster.cache.actor import NAMESPACE, ActorShards, ShardSettings
from tests.waiting import until

SETTINGS = ShardSettings("s3fifo", 1 << 20, 1.0, 0.0, given_at=1.0)


async def test_searches_that_are_given_up_while_the_head_is_away_keep_no_threads_from_others(monkeypatch):
    """Ray gives up after a minute; the gateway's own files are read in threads too."""
    asked, back = [], threading.Event()

    def listed(**_):
        asked.append(1)
        back.wait(60)
        return [{"namespace": NAMESPACE, "name": "shop-cache-0"}, {"namespace": NAMESPACE, "name": "shop-cache-1"}]

    monkeypatch.setattr(ray.util, "list_named_actors", listed)
    monkeypatch.setattr(ray, "get_actor", lambda name, _: name)
    place = ActorShards("shop-cache", SETTINGS, 1.0)
    try:
        searches = [asyncio.create_task(place.others(["shop-cache-0"])) for _ in range(5)]
        await until(lambda: asked)
        for search in searches:
            search.cancel()
        await asyncio.wait(searches)
        assert len(asked) == 1
    finally:
        back.set()
    assert list(await place.others(["shop-cache-0"])) == ["shop-cache-1"]
