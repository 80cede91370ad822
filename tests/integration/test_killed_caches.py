"""kill -9 of cache actors and gateways under load: the short form of benchmarks/kill_caches.py."""

from pathlib import Path

import pytest

from benchmarks.kill_caches import drive
from cluster.bundle import Bundle, BundleStore
from tests.clusters import SharedCluster, fixed

pytestmark = pytest.mark.cluster


async def test_nothing_fails_and_no_user_meets_another_while_caches_and_gateways_are_killed(
    compiled_hstu: Bundle, fast: SharedCluster, tmp_path: Path
):
    model_dir = compiled_hstu.path.parent
    items = [item.item_id for item in BundleStore(model_dir).open().catalogue.items]
    args = {"model_dir": str(model_dir), "events": {"url": f"sqlite:///{tmp_path}/events.db"}}
    with fast.application(fixed({"gateway": 2}), args) as serving:
        traffic, lost = await drive(serving.url, serving, items, requests=2000, users=100, concurrency=8, every=400)
    tally = traffic.tally
    assert (tally.failed, tally.strangers, lost) == ([], [], [])
    assert tally.killed["cache actor"] >= 1
    assert tally.killed["gateway"] >= 1
    assert tally.tiers["l1"] + tally.tiers["l2"] > 0
