"""The stores of a gateway's state, as configured."""

import asyncio
import time

import pytest

from cluster.config import CacheSettings, parse
from cluster.events.opened_later import StoreOpenedLater
from deployments.stores import REMOVALS, REMOVE_EVERY_S, keep_removed, open_events
from tests.waiting import settled

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("settings", [{"l2": "off"}, {"l2": "redis", "redis_url": "redis://127.0.0.1:6379/0"}, {"enabled": False}])
async def test_cache_actors_that_are_not_configured_any_more_are_removed_until_no_older_gateway_makes_them_anew(settings):
    removed, began = [], time.monotonic()
    await keep_removed(CacheSettings(**settings), "shop", removed.append)
    assert removed == ["shop-cache"] * REMOVALS
    assert time.monotonic() - began == pytest.approx(REMOVALS * REMOVE_EVERY_S)


async def test_cache_actors_that_are_configured_are_not_removed():
    removed = []
    await keep_removed(CacheSettings(), "shop", removed.append)
    assert removed == []


async def test_a_gateway_starts_while_its_event_store_is_locked_and_has_it_once_it_is_open(monkeypatch):
    asked, unlocked = [], asyncio.Event()

    class Store:
        readers = 4

        async def version(self, tenant, user_id):
            return "v"

    async def open_locked(url):
        asked.append(url)
        await unlocked.wait()
        return Store()

    monkeypatch.setattr("deployments.stores.StoreOpenedLater", lambda url: StoreOpenedLater(url, open_locked))
    store = await open_events(parse({}))
    waiting = asyncio.create_task(store.version("default", "ada"))
    await settled()
    assert not waiting.done()
    unlocked.set()
    assert (await waiting, len(asked)) == ("v", 1)
