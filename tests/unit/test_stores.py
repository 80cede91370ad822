"""The stores of a gateway's state, as configured."""

import time

import pytest

from cluster.config import CacheSettings
from deployments.stores import REMOVALS, REMOVE_EVERY_S, keep_removed

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
