"""One version in gateways of different settings, as during a rolling update: the real pipeline over one shared cache."""

import pytest

from cluster.bundle_store import BundleStore
from cluster.cache.memory import MemoryCache
from cluster.cache.shard import CacheShard
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.cache.tier_values import TierSettings
from cluster.cache.tiered import TieredCache
from cluster.config import parse
from cluster.events.store import Event, open_event_store
from cluster.values import Behaviour, RecommendRequest
from deployments.served_model import ServedModel
from pipelines.answer_codec import ANSWER_CODEC
from pipelines.stored_history import SWITCHED_OFF, StoredHistories
from tests.bundles import make_bundle
from tests.fakes.stages import FakeStages

pytestmark = pytest.mark.virtual_time

OFF = {"events": {"enabled": False}}


class Gateways:
    """Gateways of one application, one for each question, with a memory of its own."""

    def __init__(self, root, events):
        make_bundle(root, items=20)
        self.store, self.events, self.shard = BundleStore(root), events, CacheShard(MemoryCache())

    async def ask(self, tree, user):
        """The answer of a gateway with these settings."""
        settings = parse(tree)
        shared = ShardedCache({"only": self.shard}, SharedSettings(deadline_s=60))
        cache = TieredCache(MemoryCache(), shared, TierSettings(), ANSWER_CODEC)
        histories = StoredHistories(self.events if settings.events.enabled else None, settings.events.longest)
        model = ServedModel(self.store.open(), settings, FakeStages(self.store), histories, cache=cache)
        answer = await model.answers.recommend(RecommendRequest(user, k=3))
        await cache.close()
        return answer


@pytest.fixture
async def gateways(tmp_path):
    events = await open_event_store(f"sqlite:///{tmp_path}/events.db")
    await events.append([Event("ada", Behaviour(item, 1000)) for item in ("20", "19")])
    yield Gateways(tmp_path / "models", events)
    await events.close()


@pytest.mark.parametrize(
    "changed",
    [
        {"gateway": {"pool": 100}},
        {"gateway": {"rank_pool": 50}},
        {"generator": {"beam": 10}},
        {"events": {"longest": 1}},
        {"events": {"url": "postgresql://db/events"}},
        OFF,
    ],
    ids=str,
)
async def test_an_answer_that_was_computed_by_other_settings_is_not_given(gateways, changed):
    assert [(await gateways.ask(tree, "bob")).cache.tier for tree in ({}, changed, changed, {})] == ["computed", "computed", "l2", "l2"]


async def test_gateways_share_answers_though_settings_differ_on_which_none_depends(gateways):
    other = {"gateway": {"max_k": 7, "deadline_s": 3}, "cache": {"ttl_s": 5}, "events": {"read_deadline_ms": 100}}
    assert [(await gateways.ask(tree, "ada")).cache.tier for tree in ({}, other)] == ["computed", "l2"]


async def test_a_gateway_that_reads_fewer_events_answers_by_these_alone(gateways):
    for tree, unseen in (({}, "18"), ({"events": {"longest": 1}}, "20")):
        assert (await gateways.ask(tree, "ada")).items[0].item.item_id == unseen


async def test_events_are_said_to_be_switched_off_only_where_they_are(gateways):
    assert (await gateways.ask(OFF, "bob")).stages[0].fallback_from[0].reason == SWITCHED_OFF
    assert (await gateways.ask({}, "bob")).stages[0].backend == "sqlite"
