"""kill -9 of cache actors and gateways under load: the short form of benchmarks/kill_caches.py."""

import pytest

from benchmarks.kill_caches import drive
from cluster.bundle_store import BundleStore
from tests.chaos.served import Served

pytestmark = pytest.mark.cluster


async def test_nothing_fails_and_no_user_meets_another_while_caches_and_gateways_are_killed(two: Served):
    items = [item.item_id for item in BundleStore(two.model_dir).open().catalogue.items]
    traffic, lost = await drive(two.url, two.serving, items, requests=2000, users=100, concurrency=8, every=400)
    tally = traffic.tally
    assert (tally.failed, tally.strangers, lost) == ([], [], [])
    assert tally.killed["cache actor"] >= 1
    assert tally.killed["gateway"] >= 1
    assert tally.tiers["l1"] + tally.tiers["l2"] > 0
