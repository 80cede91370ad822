"""What one request of a client comes to where every engine takes longer than any caller waits: the real callers, budgets and pipeline."""

import asyncio
import inspect
from functools import partial
from time import monotonic
from types import SimpleNamespace

import pytest

from cluster import profile
from cluster.cache.memory import MemoryCache
from cluster.cache.tier_values import TierSettings
from cluster.cache.tiered import TieredCache
from cluster.config import Settings
from cluster.events.guarded import GuardedHistories
from cluster.events.read_turns import ReadTurns
from cluster.events.store import StoredHistory
from cluster.ranking import RankingRequest
from cluster.stages import ENCODER, GENERATOR, RANKER
from cluster.values import Behaviour, RecommendRequest, Together
from deployments.stages import SplitStages
from pipelines.answer_codec import ANSWER_CODEC
from pipelines.cached_recommender import CachedRecommender
from pipelines.rank import CandidateRanker
from pipelines.recommend import Recommender
from pipelines.stored_history import StoredHistories
from tests.examples import example
from tests.fakes.handles import Streamed
from tests.fakes.played_stages import Ascending, Descending, Naming, bundle_with_ranker
from tests.waiting import settled

pytestmark = pytest.mark.virtual_time
ENGINE_S = 16.0
SEEN = (Behaviour("1", 1000), Behaviour("2", 2000))


class Slow:
    """A deployment's handle: each call, or each part of an answer, takes as long as the engines. `requests`: that reached it."""

    deployment_name = "slow"

    def __init__(self) -> None:
        self.requests = 0

    def options(self, *, stream: bool = False, **_: str) -> SimpleNamespace:
        remote = partial(self.remote, stream=stream)
        return SimpleNamespace(remote=remote, stream=SimpleNamespace(remote=remote))

    def __getattr__(self, method: str) -> SimpleNamespace:
        return SimpleNamespace(remote=self.remote)

    def remote(self, asked, *_, stream=False):
        self.requests += len(asked.requests) if isinstance(asked, Together) else 1
        return Streamed(self._part()) if stream else asyncio.ensure_future(asyncio.sleep(ENGINE_S))

    async def _part(self):
        yield await asyncio.sleep(ENGINE_S, [])


class Service:
    """A gateway's pipeline over replicas that are all slow, but for encoders that are `quick`."""

    def __init__(self, root, *, quick: bool = False) -> None:
        self.encoder, self.generator, self.ranker = Slow(), Slow(), Slow()
        stages = SplitStages(self.encoder, self.generator, self.ranker)
        bundle = bundle_with_ranker(root / "models", decoder=True, last_stage=True)
        encode, generate, rank = (
            lambda request, within_s, stage=stage: stages.ask(stage, request, within_s) for stage in (ENCODER, GENERATOR, RANKER)
        )
        self._recommender = Recommender(bundle, Descending(bundle) if quick else encode, generate, stages.stream, rank)
        self._ranks = CandidateRanker(bundle, StoredHistories(None, 100), encode, rank, deadline_s=5.0, ranking_deadline_s=2.0)

    async def recommend(self, number: int) -> float:
        """How many seconds it took."""
        began = monotonic()
        assert (await self._recommender.recommend(RecommendRequest(f"user {number}", SEEN, k=3))).items
        return monotonic() - began

    async def stream(self, number: int) -> float:
        began = monotonic()
        parts = [part async for part in self._recommender.stream(RecommendRequest(f"user {number}", SEEN, k=3))]
        assert parts[-1].items
        return monotonic() - began

    async def rank(self, number: int) -> float:
        began = monotonic()
        await self._ranks.rank(RankingRequest(f"user {number}", ("3", "4"), SEEN))
        return monotonic() - began


async def steadily(ask, count, per_s):
    """The times of `count` requests, so many a second."""

    async def one(number):
        await asyncio.sleep(number / per_s)
        return await ask(number)

    return await asyncio.gather(*(one(number) for number in range(count)))


@pytest.mark.parametrize("kind", ["recommend", "stream", "rank"])
async def test_where_all_engines_are_slow_a_request_is_a_fifth_more_calls_of_each_stage_and_is_answered(tmp_path, kind):
    service = Service(tmp_path)
    times = await steadily(getattr(service, kind), 200, per_s=20)
    assert max(times) == pytest.approx(7, abs=0.1)
    assert all(0 < stage.requests <= 1.2 * 200 for stage in (service.encoder, service.ranker))
    assert service.generator.requests == 0, "it has no state to begin with"


@pytest.mark.parametrize("kind", ["recommend", "stream"])
async def test_where_only_the_encoder_is_quick_a_request_is_a_fifth_more_calls_of_generator_and_ranker_and_is_answered(tmp_path, kind):
    service = Service(tmp_path, quick=True)
    times = await steadily(getattr(service, kind), 200, per_s=20)
    assert max(times) == pytest.approx(7, abs=0.1)
    assert all(0 < stage.requests <= 1.2 * 200 for stage in (service.generator, service.ranker))


class Busy:
    """A store of which every read takes almost as long as one may."""

    name = "busy"

    def __init__(self, read_s):
        self.read_s = read_s

    async def version(self, tenant, user_id):
        await asyncio.sleep(self.read_s)
        return "v"

    async def history(self, tenant, user_id, limit, until=None):
        return StoredHistory(SEEN, await self.version(tenant, user_id))


async def test_the_longest_answer_waits_for_two_reads_and_reads_twice_and_each_stage_takes_its_time(tmp_path):
    settings, just = Settings.model_validate({"model_dir": "models/any"}), 0.999
    edge, read_s = settings.gateway, settings.events.read_deadline_ms / 1e3
    bundle = bundle_with_ranker(tmp_path / "models", decoder=True, last_stage=True)
    cache = TieredCache(MemoryCache("s3fifo", 2**20), None, TierSettings(), ANSWER_CODEC)
    histories = GuardedHistories(Busy(just * read_s), read_s, ReadTurns(lambda: 1))
    recommender = Recommender(
        bundle,
        Descending(bundle, delay=just * edge.deadline_s),
        Naming(bundle, *range(5, 25), delay=just * edge.generation_deadline_s),
        None,
        Ascending(bundle, delay=just * edge.ranking_deadline_s),
    )

    async def others():
        while True:
            await histories.version("another", "u")

    reading = asyncio.create_task(others())
    await settled()
    began = monotonic()
    answer = await CachedRecommender(recommender, StoredHistories(histories, 100), cache, "").recommend(RecommendRequest("u", k=3))
    took_s = monotonic() - began
    reading.cancel()
    assert not answer.degraded
    assert {stage.stage for stage in answer.stages} >= {"history", "encode", "generate", "rank"}
    assert took_s + TierSettings().wait_s < settings.longest_answer_s, "where another gateway computes it, that is waited for, too"
    assert took_s + edge.admission.max_wait_ms / 1e3 < float(profile.HAPROXY["RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S"]) - 1


def test_neither_haproxy_nor_the_example_client_begins_anew_what_is_merely_slow():
    settings, client = Settings.model_validate({"model_dir": "models/any"}), example("client")
    longest_s = settings.longest_answer_s + settings.gateway.admission.max_wait_ms / 1e3
    assert longest_s < float(profile.HAPROXY["RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S"])
    for kind in (client.Client, client.AsyncClient):
        assert longest_s < inspect.signature(kind).parameters["try_s"].default
