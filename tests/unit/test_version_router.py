"""Which version answers whom, in one gateway: the real pipeline over a model_cache of versions, with stages that a test controls."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

from cluster.background import AHEAD, LANE, lane_of
from cluster.bundle_store import BundleStore
from cluster.cache.memory import MemoryCache
from cluster.cache.tier_values import TierSettings
from cluster.cache.tiered import TieredCache
from cluster.config import GatewaySettings, Settings
from cluster.engines.skipped import NoBackendAnswered
from cluster.errors import InvalidRequest, ModelGone
from cluster.events.store import StoredHistory
from cluster.fleet.board import FleetNews
from cluster.fleet.rollout import Arm, Rollout, Trial
from cluster.fleet.trial_guard import MANY_FIRSTS, Guard, VersionFigures, judge
from cluster.ranking import RankingRequest, Task
from cluster.traffic.latency import LatencySummary
from cluster.values import Behaviour, RecommendRequest, SkippedBackend
from deployments.http.connection import BodyBudget, Connection
from deployments.http.problems import TooLate
from deployments.served_model import ServedModel
from deployments.trial_figures import TrialFigures, VersionRecorder
from deployments.version_router import SHADOWS_AT_ONCE, VersionRouter
from pipelines.answer_codec import ANSWER_CODEC
from pipelines.stored_history import StoredHistories
from tests.bundles import make_bundle
from tests.fakes.clock import Clock
from tests.fakes.played_stages import RANKER, Ascending, Naming, bundle_with_decoder, bundle_with_ranker
from tests.fakes.stages import FakeStages
from tests.waiting import until

pytestmark = pytest.mark.virtual_time

ITEMS = {1: 20, 2: 30, 3: 40}
USERS = [f"user {number}" for number in range(40)]
HISTORY = (Behaviour("1", 1000),)
HALF = Trial(version=2, share=0.5, began=1.0)
TRIED = HALF.arm
BROKE = NoBackendAnswered("encoder", (SkippedBackend("torch", "broke", failed=True),))


class FakeModelCache:
    """Holds what a test puts there."""

    def __init__(self):
        self.by_version = {}

    @property
    def models(self):
        return tuple(self.by_version.values())

    def get(self, version):
        return self.by_version.get(version)


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    root = tmp_path_factory.mktemp("models") / "tiny"
    for items in ITEMS.values():
        make_bundle(root, items=items)
    return root


class Rig:
    """A gateway's versions, of which the model_cache holds 1 and 2."""

    def __init__(self, store, *, cached=False, events=None):
        self.events = events
        self.store, self.stages, self.model_cache = store, FakeStages(store), FakeModelCache()
        self._cache = TieredCache(MemoryCache("s3fifo", 2**20), None, TierSettings(), ANSWER_CODEC) if cached else None
        for version in (1, 2):
            self.hold(version)
        self.versions = VersionRouter(self.model_cache, self.stages)

    def hold(self, version):
        bundle = self.store.open(version)
        self.model_cache.by_version[version] = ServedModel(
            bundle, Settings(), self.stages, StoredHistories(self.events, 100), cache=self._cache
        )

    def learn(self, stable, trial=None, *, settled=True, used=(), held=(1, 2, 3)):
        news = FleetNews(frozenset(self.stages.able), frozenset(used), settled=settled, anywhere={"encoder": frozenset(held)})
        self.versions.update(Rollout(stable=stable, trial=trial, previous=list(range(1, stable))), news)

    async def ask(self, user="ada", **more):
        return await self.versions.recommend(RecommendRequest(user, HISTORY, k=3, **more))

    async def served_by(self, user="ada"):
        """The version whose items the answer has; every answer names the version it was made of."""
        answer = await self.ask(user)
        number = int(answer.model_version.removeprefix("tiny/"))
        assert [one.item.item_id for one in answer.items] == [str(ITEMS[number] - rank) for rank in range(3)]
        assert not answer.degraded
        return number

    def encoder(self, version):
        return self.stages.encoders[f"tiny/{version}"]

    async def compared(self, times):
        """Until so many answers were compared with those of version 2 in their shadow."""
        await until(lambda: self.versions.figures().get(TRIED, VersionFigures()).overlaps == times)


@pytest.fixture
def rig(three):
    return Rig(BundleStore(three))


async def test_the_stable_version_answers_everybody(rig):
    rig.learn(1)
    assert {await rig.served_by(user) for user in USERS} == {1}
    assert rig.versions.uses() == {1}
    assert rig.versions.stable.bundle.version == "tiny/1"


async def test_a_promoted_version_takes_over_only_once_every_replica_has_it(rig):
    rig.learn(1)
    rig.stages.able = {1}
    rig.learn(2)
    assert (await rig.served_by(), rig.versions.uses()) == (1, {1})
    rig.stages.able = {1, 2}
    rig.learn(2)
    assert (await rig.served_by(), rig.versions.uses()) == (2, {2})


async def test_it_does_not_take_over_while_the_gateway_itself_does_not_hold_it(rig):
    rig.learn(1)
    rig.learn(3)
    assert await rig.served_by() == 1
    rig.hold(3)
    rig.learn(3)
    assert await rig.served_by() == 3


async def test_a_switchboard_that_has_not_heard_of_everybody_changes_nothing(rig):
    rig.learn(1)
    rig.learn(2, settled=False)
    assert await rig.served_by() == 1
    rig.learn(1, HALF, settled=False)
    assert {await rig.served_by(user) for user in USERS} == {1}


@pytest.mark.parametrize("able", [{1, 2}, {1}, set()])
async def test_a_restarted_switchboard_moves_no_user_out_of_a_trial(rig, able):
    rig.learn(1, HALF)
    before = {user: await rig.served_by(user) for user in USERS}
    rig.stages.able = able
    rig.learn(1, HALF, settled=False)
    assert ({user: await rig.served_by(user) for user in USERS}, rig.versions.uses()) == (before, {1, 2})
    rig.learn(1, HALF.model_copy(update={"began": HALF.began + 1}), settled=False)
    assert {await rig.served_by(user) for user in USERS} == {1}, "another trial begins once all are heard of"
    rig.learn(1, HALF)
    rig.learn(1, settled=False)
    assert {await rig.served_by(user) for user in USERS} == {1}, "a trial ends at once"


async def test_a_gateway_that_is_new_takes_what_it_can_before_all_is_known(rig):
    rig.learn(2, settled=False)
    assert await rig.served_by() == 2


async def test_a_gateway_that_is_new_in_the_middle_of_a_rollout_answers_with_what_the_others_do(rig):
    rig.stages.able = set()
    rig.learn(3, settled=False, used={2})
    assert await rig.served_by() == 2


def holding_the_promoted_version_first(rig):
    """The rig as a gateway that starts while version 3 is promoted and 2 is in its place."""
    rig.model_cache.by_version.clear()
    for version in (3, 2):
        rig.hold(version)
    return rig


async def test_a_gateway_that_starts_while_the_promoted_version_cannot_serve_answers_by_one_that_can(rig):
    holding_the_promoted_version_first(rig).stages.able = {2}
    rig.learn(3)
    assert (await rig.served_by(), rig.versions.uses(), rig.encoder(3).asked) == (2, {2}, [])
    rig.stages.able = {2, 3}
    rig.learn(3, used={2})
    assert await rig.served_by() == 3


async def test_what_a_gateway_has_taken_before_it_knew_of_any_replica_gives_way_to_what_replicas_can_serve(rig):
    holding_the_promoted_version_first(rig).stages.able = set()
    rig.learn(3, settled=False)
    rig.learn(3, used={3})
    assert rig.versions.uses() == {3}, "nothing better is known"
    rig.stages.able = {2}
    rig.learn(3, used={3}, settled=False)
    assert rig.versions.uses() == {3}, "not all replicas are heard of"
    rig.learn(3, used={3})
    assert (await rig.served_by(), rig.versions.uses()) == (2, {2})


async def test_one_replica_that_lacks_the_version_that_serves_moves_no_gateway_to_another(rig):
    rig.learn(2)
    rig.stages.able = {1}
    rig.learn(2, used={2})
    assert await rig.served_by() == 2


async def test_a_version_that_a_stage_has_lost_gives_way_to_one_that_all_replicas_hold_until_it_is_back(rig):
    """As where the only encoder starts again while the version is damaged."""
    rig.learn(2)
    rig.stages.able = set()
    rig.learn(2, used={2}, held=())
    assert rig.versions.uses() == {2}, "there is none"
    rig.stages.able = {1}
    rig.learn(2, used={2}, held={1}, settled=False)
    assert rig.versions.uses() == {2}, "not all replicas are heard of"
    rig.learn(2, used={2}, held={1})
    assert (await rig.served_by(), rig.versions.uses()) == (1, {1})
    rig.stages.able = {1, 2}
    rig.learn(2, used={1}, held={1, 2})
    assert (await rig.served_by(), rig.versions.uses()) == (2, {2})


async def test_a_version_on_trial_stands_in_only_where_no_other_can(rig):
    rig.stages.able = {1, 2}
    rig.learn(3, HALF, used={1, 2})
    assert rig.versions.stable.bundle.version == "tiny/1"
    only_tried = Rig(rig.store)
    only_tried.stages.able = {2}
    only_tried.learn(3, HALF)
    assert only_tried.versions.stable.bundle.version == "tiny/2"


async def test_a_version_that_was_given_up_stands_in_only_where_no_earlier_one_can(rig):
    rig.hold(3)
    rig.stages.able = {1, 3}
    rig.learn(2)
    assert rig.versions.stable.bundle.version == "tiny/1"
    rig.stages.able = {3}
    rig.learn(2, held={3})
    assert rig.versions.stable.bundle.version == "tiny/3"


async def test_what_served_goes_on_while_the_promoted_version_cannot_serve(rig):
    rig.learn(1)
    rig.stages.able = {1}
    for _ in range(3):
        rig.learn(2)
    rig.learn(1)
    assert await rig.served_by() == 1


@pytest.mark.parametrize("kind", ["canary", "ab"])
async def test_the_users_of_the_share_get_the_version_on_trial_and_the_others_the_stable_one(rig, kind):
    trial = HALF.model_copy(update={"kind": kind})
    rig.learn(1, trial)
    for _ in range(2):
        assert {user: await rig.served_by(user) for user in USERS} == {user: 1 + trial.includes("default", user) for user in USERS}
    assert rig.versions.uses() == {1, 2}


async def test_a_trial_begins_only_once_everybody_can_serve_it_and_ends_with_the_next_update(rig):
    rig.learn(1)
    rig.stages.able = {1}
    rig.learn(1, HALF)
    assert {await rig.served_by(user) for user in USERS} == {1}
    rig.stages.able = {1, 2}
    rig.learn(1, HALF)
    assert {await rig.served_by(user) for user in USERS} == {1, 2}
    rig.learn(1)
    assert {await rig.served_by(user) for user in USERS} == {1}


async def test_where_no_replica_holds_the_version_another_answers_the_whole_request(rig):
    rig.learn(2)
    rig.stages.gone = {"tiny/2"}
    assert await rig.served_by() == 1
    rig.stages.gone = set()
    assert await rig.served_by() == 2


async def test_a_stream_whose_version_no_replica_holds_ends_with_the_answer_of_another(rig):
    rig.learn(2)
    plain, rig.stages.gone = await rig.ask(), {"tiny/2"}
    parts = [part async for part in rig.versions.stream(RecommendRequest("ada", HISTORY, k=3))]
    assert (parts[-1].model_version, parts[-1].degraded) == ("tiny/1", False)
    assert parts[-1].items == (await rig.ask()).items
    assert parts[-len(plain.stages) - 2 :] == [*parts[-1].stages, parts[-1].items, parts[-1]], "its stages and items are told before it"


async def test_a_degraded_answer_that_is_kept_since_then_does_not_hide_it(three):
    rig = Rig(BundleStore(three), cached=True)
    rig.learn(2)
    rig.stages.gone = {"tiny/2"}
    for _ in range(3):
        assert await rig.served_by() == 1


@pytest.mark.parametrize("later", [HALF.model_copy(update={"kind": "shadow"}), None], ids=["in the shadow", "no longer tried"])
async def test_a_version_in_the_shadow_or_no_longer_tried_stands_in_for_no_other(rig, later):
    rig.learn(1, HALF)
    rig.learn(1, later)
    rig.stages.gone = {"tiny/1"}
    answer = await rig.ask()
    assert (answer.model_version, answer.degraded) == ("tiny/1", True)
    parts = [part async for part in rig.versions.stream(RecommendRequest("ada", HISTORY, k=3))]
    assert (parts[-1].model_version, parts[-1].degraded) == ("tiny/1", True)


async def test_an_earlier_version_stands_in_before_the_one_on_trial(rig):
    rig.hold(3)
    rig.learn(2, Trial(version=3, share=0.001, began=1.0))
    rig.stages.gone = {"tiny/2"}
    assert await rig.served_by() == 1
    rig.stages.gone = {"tiny/1", "tiny/2"}
    assert await rig.served_by() == 3


async def test_what_serves_in_place_of_a_stable_version_that_is_damaged_stands_in_for_the_one_on_trial(rig):
    del rig.model_cache.by_version[1]
    rig.hold(3)
    rig.stages.able = {2, 3}
    rig.learn(1, Trial(version=3, share=1, began=1.0))
    assert await rig.served_by() == 3
    rig.stages.gone = {"tiny/3"}
    assert await rig.served_by() == 2


@pytest.fixture
def generating(tmp_path):
    """Versions 2 and 3, which have a generator each; 3 serves."""
    store = BundleStore(tmp_path / "tiny")
    bundle_with_decoder(store.root, items=20)
    with store.recompile(store.open(2)) as draft:
        draft.decoder = store.open(2).manifest.decoder
    rig = Rig(store)
    rig.stages.generators = {f"tiny/{version}": Naming(store.open(version), 5, 6, 7) for version in (2, 3)}
    rig.hold(3)
    del rig.model_cache.by_version[1]
    rig.learn(3)
    return rig


async def test_where_the_generator_lacks_the_version_another_answers_too(generating):
    answers = [await generating.ask()]
    generating.stages.generators["tiny/3"].error = ModelGone("not tiny/3")
    answers.append(await generating.ask())
    assert [(one.model_version, one.degraded) for one in answers] == [("tiny/3", False), ("tiny/2", False)]


async def test_a_stream_whose_generator_lacks_the_version_ends_with_the_answer_of_another(generating):
    generating.stages.generators["tiny/3"].error = ModelGone("not tiny/3")
    *_, answer = [part async for part in generating.versions.stream(RecommendRequest("ada", HISTORY, k=3))]
    assert (answer.model_version, answer.degraded) == ("tiny/2", False)


async def test_a_version_that_cannot_do_what_is_asked_is_passed_over_and_the_degraded_answer_stays(tmp_path):
    """Else a request that the serving version can answer is refused."""
    store = BundleStore(tmp_path / "tiny")
    bundle_with_decoder(store.root, items=20)
    rig = Rig(store)
    rig.stages.generators = {"tiny/2": Naming(store.open(2), error=ModelGone("not tiny/2"))}
    rig.learn(2)
    answer = await rig.ask(strategy="generative")
    assert (answer.model_version, answer.degraded) == ("tiny/2", True)


async def test_where_nobody_holds_any_version_the_answer_is_degraded_and_still_an_answer(rig):
    rig.learn(2)
    rig.stages.gone = {"tiny/1", "tiny/2"}
    answer = await rig.ask()
    assert (answer.degraded, len(answer.items)) == (True, 3)


async def test_a_degraded_answer_of_another_cause_is_the_answer(rig):
    rig.learn(2)
    rig.encoder(2).error = BROKE
    answer = await rig.ask()
    assert (answer.degraded, answer.model_version) == (True, "tiny/2")
    assert rig.encoder(1).asked == []


async def test_figures_are_kept_of_both_versions_during_a_trial_and_begin_anew_with_the_next(rig):
    await rig.ask()
    rig.learn(1)
    await rig.ask()
    assert rig.versions.figures() == {}
    rig.learn(1, HALF)
    rig.encoder(2).error = BROKE
    for user in USERS:
        await rig.ask(user)
    tried = sum(HALF.includes("default", user) for user in USERS)
    figures = rig.versions.figures()
    counts = {arm: (one.requests, one.degraded) for arm, one in figures.items()}
    assert counts == {Arm(1): (len(USERS) - tried, 0), TRIED: (tried, tried)}
    assert figures[Arm(1)].latency.p95_ms is None, "a user's first answer is timed apart"
    assert figures[Arm(1)].firsts.p95_ms > 0
    for user in USERS:
        await rig.ask(user)
    assert rig.versions.figures()[Arm(1)].latency.p95_ms > 0
    rig.learn(1, HALF.model_copy(update={"began": 2.0}))
    assert rig.versions.figures() == {}


async def test_a_request_that_ends_in_an_error_of_the_version_counts_as_degraded_and_one_that_is_refused_does_not(rig):
    rig.learn(1, HALF)
    rig.encoder(2).error = ZeroDivisionError("in the version's code")
    tried = [user for user in USERS if HALF.includes("default", user)]
    for user in tried:
        with pytest.raises(ZeroDivisionError):
            await rig.ask(user)
        with pytest.raises(ZeroDivisionError):
            [part async for part in rig.versions.stream(RecommendRequest(user, HISTORY, k=3))]
        with pytest.raises(InvalidRequest):
            await rig.ask(user, blocked=frozenset({"no such item"}), strategy="generative")
    figures = rig.versions.figures()[TRIED]
    assert (figures.requests, figures.degraded) == (2 * len(tried), 2 * len(tried))


async def test_a_version_so_slow_that_callers_leave_before_its_answers_is_judged_by_how_long_they_waited(rig):
    rig.learn(1, HALF)
    rig.encoder(2).delay = 3600
    for _ in range(12):
        await asyncio.gather(*(asyncio.wait_for(rig.ask(user), 0.05) for user in USERS), return_exceptions=True)
    figures = rig.versions.figures()
    assert judge(Guard(), figures[Arm(1)], figures[TRIED]).startswith("p95 is")
    assert (figures[TRIED].requests, figures[TRIED].degraded) == (0, 0), "callers may leave for other reasons"


def asks_for_items(rig, user, **more):
    return rig.ask(user, **more)


def asks_for_a_stream(rig, user, **more):
    return whole(rig.versions.stream(RecommendRequest(user, HISTORY, k=3, **more)))


def asks_for_an_order(rig, user, **more):
    return rig.versions.rank(RankingRequest(user, ("1", "2"), HISTORY, **more))


async def asks_and_leaves(rig, user, deadline_ms):
    with suppress(TimeoutError):
        await asyncio.wait_for(rig.ask(user), deadline_ms / 1e3)


@pytest.mark.parametrize("ask", [asks_for_items, asks_for_a_stream, asks_for_an_order, asks_and_leaves])
@pytest.mark.parametrize("version", [1, 2])
async def test_callers_with_too_little_time_neither_end_a_trial_nor_hide_a_bad_version(rig, ask, version):
    rig.learn(1, HALF)
    rig.encoder(1).delay = rig.encoder(2).delay = 0.05
    for _ in range(12):
        await asyncio.gather(*(rig.ask(user) for user in USERS))
    before = rig.versions.figures()
    hurried = next(user for user in USERS if HALF.includes("default", user) is (version == 2))
    for _ in range(200):
        await ask(rig, hurried, deadline_ms=1)
    figures = rig.versions.figures()
    assert judge(Guard(), figures[Arm(1)], figures[TRIED]) == ""
    counts = [{arm: (one.requests, one.degraded, one.latency.buckets) for arm, one in of.items()} for of in (before, figures)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize("slow", [0, 6], ids=["", "one-user-asks-for-what-takes-long"])
@pytest.mark.parametrize("timed", [False, True], ids=["rankings-and-streams-alone", "answers-too"])
@pytest.mark.parametrize("ask", [asks_for_items, asks_for_a_stream, asks_for_an_order])
async def test_a_version_that_is_late_where_the_stable_one_is_not_ends_its_trial(rig, ask, timed, slow):
    rig.learn(1, HALF)
    stable = [user for user in USERS if not HALF.includes("default", user)]
    rig.encoder(1).delay = 0.5
    await asyncio.gather(*(rig.ask(stable[0]) for _ in range(slow * timed)))
    rig.encoder(1).delay, rig.encoder(2).delay = 0.05, 0.3
    for _ in range(2):  # a user's first answer is not timed
        await asyncio.gather(*(rig.ask(user, deadline_ms=70) for user in stable * timed))
    for user in USERS * 2:
        await ask(rig, user, deadline_ms=70 if timed or ask is asks_for_items else 150)
    figures = rig.versions.figures()
    assert "answers are degraded" in judge(Guard(), figures[Arm(1)], figures[TRIED])


async def test_late_answers_count_beside_whichever_version_answers_the_other_users(rig):
    """As where a replica refuses the stable version 3, and gateways answer by 1: that takes 50 ms, where 100 ms would be assumed."""
    rig.learn(3, HALF)
    rig.encoder(1).delay, rig.encoder(2).delay = 0.05, 0.3
    for _ in range(2):
        await asyncio.gather(*(rig.ask(user, deadline_ms=80) for user in USERS))
    figures = rig.versions.figures()
    assert "answers are degraded" in judge(Guard(), figures[Arm(1)], figures[TRIED])


async def whole(stream):
    return [part async for part in stream]


@pytest.mark.parametrize(
    "ask",
    [
        lambda versions, user: versions.recommend(RecommendRequest(user, HISTORY, k=3)),
        lambda versions, user: whole(versions.stream(RecommendRequest(user, HISTORY, k=3))),
        lambda versions, user: versions.rank(RankingRequest(user, ("1", "2"), HISTORY)),
    ],
    ids=["recommended", "streamed", "ranked"],
)
async def test_a_request_that_the_gateway_ends_as_its_time_is_over_counts_as_degraded(rig, ask):
    rig.learn(1, HALF)
    rig.encoder(2).delay = 3600
    messages = iter([{"type": "http.request", "body": b"{}"}])

    async def receive():
        for message in messages:
            return message
        return await asyncio.get_running_loop().create_future()

    async def asked():
        with Connection(receive, receive) as connection:
            await connection.read(GatewaySettings().model_copy(update={"request_within_s": 1.0}), BodyBudget(100))
            await ask(rig.versions, next(user for user in USERS if HALF.includes("default", user)))

    with pytest.raises(TooLate):
        await asked()
    figures = rig.versions.figures()[TRIED]
    assert (figures.requests, figures.degraded) == (1, 1)


@pytest.fixture
def unequal(tmp_path):
    """Version 3 has a decoder and a ranker, 1 has neither, and the ranker of 4 predicts clicks alone."""
    store = BundleStore(tmp_path / "tiny")
    able = bundle_with_ranker(store.root, items=20, decoder=True)
    with store.recompile(able) as draft:
        draft.ranker = RANKER.model_copy(update={"tasks": (Task.CLICK,)})
    rig = Rig(store)
    rig.stages.able = {1, 3, 4}
    rig.stages.generators, rig.stages.rankers = {able.version: Naming(able, 5, 6, 7)}, {able.version: Ascending(able)}
    rig.hold(3)
    rig.hold(4)
    return rig


def recommended(versions, user):
    return versions.recommend(RecommendRequest(user, HISTORY, k=3, strategy="generative"))


async def streamed(versions, user):
    *_, answer = [part async for part in versions.stream(RecommendRequest(user, HISTORY, k=3, strategy="generative"))]
    return answer


def ranked(versions, user):
    return versions.rank(RankingRequest(user, ("1", "2"), HISTORY, weights={Task.RATING: 1.0}))


@pytest.mark.parametrize(("version", "ask"), [(1, recommended), (1, streamed), (4, ranked)])
async def test_what_the_version_on_trial_cannot_do_the_stable_one_answers_and_it_counts_against_the_trial(unequal, version, ask):
    trial = Trial(version=version, share=0.5, began=1.0)
    unequal.learn(3, trial)
    assert {(await ask(unequal.versions, user)).model_version for user in USERS} == {"tiny/3"}
    tried = sum(trial.includes("default", user) for user in USERS)
    counts = {arm: (one.requests, one.degraded) for arm, one in unequal.versions.figures().items()}
    assert counts == {Arm(3): (len(USERS), 0), trial.arm: (tried, tried)}


async def test_what_a_shadow_cannot_do_counts_against_it(unequal, caplog):
    trial = Trial(version=1, kind="shadow", share=1.0, began=1.0)
    unequal.learn(3, trial)
    assert (await recommended(unequal.versions, "ada")).model_version == "tiny/3"
    await until(lambda: unequal.versions.figures().get(trial.arm, VersionFigures()).degraded == 1)
    assert "could not be computed" not in caplog.text


@pytest.mark.parametrize("error", [BROKE, ZeroDivisionError("in the version's code")])
async def test_rankings_that_a_version_cannot_make_count_as_degraded(rig, error):
    rig.learn(1, HALF)
    rig.encoder(2).error = error
    for user in USERS:
        with suppress(ZeroDivisionError):
            await rig.versions.rank(RankingRequest(user, ("1", "2"), HISTORY))
    tried = sum(HALF.includes("default", user) for user in USERS)
    counts = {arm: (one.requests, one.degraded) for arm, one in rig.versions.figures().items()}
    assert counts == {Arm(1): (len(USERS) - tried, 0), TRIED: (tried, tried)}


async def test_what_comes_from_a_cache_says_nothing_of_a_version(three):
    rig = Rig(BundleStore(three), cached=True)
    rig.learn(1, HALF)
    for _ in range(5):
        await rig.ask()
    assert sum(one.requests for one in rig.versions.figures().values()) == 1


FLAGS = Trial(version=1, share=0.5, flags={"cache": False}, began=1.0)


async def test_a_trial_of_flags_has_every_user_served_by_the_stable_version_and_both_arms_measured_apart(rig):
    rig.learn(1, FLAGS)
    assert {await rig.served_by(user) for user in USERS} == {1}
    tried = sum(FLAGS.includes("default", user) for user in USERS)
    assert {arm: one.requests for arm, one in rig.versions.figures().items()} == {Arm(1): len(USERS) - tried, FLAGS.arm: tried}
    assert {user for user in USERS if rig.versions.trial_for("default", user)} == {
        user for user in USERS if FLAGS.includes("default", user)
    }


async def test_nobody_is_on_trial_before_the_trial_has_begun_everywhere(rig):
    rig.learn(1, FLAGS, settled=False)
    assert not any(rig.versions.trial_for("default", user) for user in USERS)


async def test_a_trial_of_flags_counts_what_comes_from_a_cache_too(three):
    rig = Rig(BundleStore(three), cached=True)
    rig.learn(1, FLAGS)
    for _ in range(5):
        await rig.ask()
    [parts async for parts in rig.versions.stream(RecommendRequest("ada", HISTORY, k=3))]
    assert sum(one.requests for one in rig.versions.figures().values()) == 6


def test_few_requests_an_hour_are_enough_to_compare_latencies_in_the_end(monkeypatch):
    monkeypatch.setattr("deployments.trial_figures.monotonic", clock := Clock())
    recorder = VersionRecorder()
    for _ in range(201):
        recorder.answered(SimpleNamespace(degraded=False), RecommendRequest("ada"), 300.0)
        clock.advance(15)
    stable = VersionFigures(200, latency=LatencySummary(200, buckets=(200,)))
    assert "p95 is" in judge(Guard(), stable, recorder.figures())


def test_a_slow_hour_that_only_one_version_has_answered_since_ends_no_trial(monkeypatch):
    """As where the few users of the share sleep while the others go on."""
    monkeypatch.setattr("deployments.trial_figures.monotonic", clock := Clock())
    stable, tried = VersionRecorder(), VersionRecorder()
    for recorder in (stable, tried):
        for _ in range(300):
            recorder.took(RecommendRequest("ada"), 300.0)
    assert judge(Guard(), stable.figures(), tried.figures()) == ""
    for _ in range(12 * 60):
        clock.advance(60)
        stable.took(RecommendRequest("ada"), 10.0)
    assert (stable.figures().latency.p95_ms < 12, tried.figures().latency.p95_ms) == (True, None)
    assert judge(Guard(), stable.figures(), tried.figures()) == ""
    tried.took(RecommendRequest("ada"), 10.0)
    assert sum(tried.figures().latency.buckets) == 1, "nothing of the slow hour comes back"


@pytest.mark.parametrize("kind", ["canary", "shadow"])
def test_a_version_that_is_slow_only_while_it_keeps_no_state_of_a_user_stays_on_trial(monkeypatch, three, kind):
    """As with a large model: a user's first answer encodes the whole history, of which the stable version has kept a state for long."""
    monkeypatch.setattr("deployments.trial_figures.perf_counter", clock := Clock())
    trial, store = HALF.model_copy(update={"kind": kind}), BundleStore(three)
    rollout, models = Rollout(stable=1, trial=trial), [SimpleNamespace(bundle=store.open(version)) for version in (1, 2)]
    figures = TrialFigures(rollout.trial_for)
    figures.update(rollout)
    answer = SimpleNamespace(degraded=False, cache=None, stages=())
    for user in map(str, range(200)):
        answered_by = [trial.includes("default", user)] if kind == "canary" else [False, True][: 1 + trial.includes("default", user)]
        for nth in range(5):
            for tried in answered_by:
                with figures.measured(models[tried], RecommendRequest(user), timed=True) as note:
                    clock.advance(0.205 if tried and nth == 0 else 0.011)
                    note(answer)
    stable, tried = (figures.by_arm()[arm] for arm in (Arm(1), TRIED))
    assert min(sum(stable.latency.buckets), sum(tried.latency.buckets)) >= Guard().fewest_requests
    assert judge(Guard(), stable, tried) == ""
    assert sum(tried.latency.buckets) == tried.requests - tried.requests // 5, "no first answer is timed, and each counts"


SHADOW = Trial(version=2, kind="shadow", share=1.0, began=1.0)


async def test_a_shadow_answers_nobody_and_is_compared_with_the_answer(rig):
    rig.learn(1, SHADOW)
    for times, user in enumerate(USERS[:3], 1):
        assert await rig.served_by(user) == 1
        await rig.compared(times)
    (asked, *_) = rig.encoder(2).asked
    assert asked.model_version == rig.store.open(2).identity
    figures = rig.versions.figures()
    assert (figures[Arm(1)].requests, figures[TRIED].requests, figures[TRIED].overlaps, figures[TRIED].overlap) == (3, 3, 3, 0.0)


@pytest.mark.parametrize("lane", [None, "key ours"])
async def test_a_shadow_reads_the_event_store_in_the_lane_of_the_request_that_it_is_compared_with(three, lane):
    read = []

    async def history(tenant, user_id, limit, until=None):
        read.append((lane_of(tenant), AHEAD.get()))
        return StoredHistory(HISTORY, "v")

    rig = Rig(BundleStore(three), events=SimpleNamespace(name="played", history=history))
    rig.learn(1, SHADOW)
    LANE.set(lane)
    await rig.versions.recommend(RecommendRequest("ada", tenant="shop", k=3))
    await rig.compared(1)
    assert read == [(lane or "shop", False)] * 2


async def test_a_shadow_answers_no_user_where_replicas_hold_no_other_version_either(rig):
    rig.learn(1, SHADOW)
    rig.stages.able = {2}
    rig.learn(1, SHADOW, used={1, 2}, held={2})
    assert {await rig.served_by(user) for user in USERS} == {1}
    new = Rig(rig.store)
    new.stages.able = set()
    new.learn(3, SHADOW, used={2, 3})
    assert {await new.served_by(user) for user in USERS} == {1}, "others compute by it, and answer by one that this gateway lacks"


async def test_overlap_is_the_share_of_items_in_common(rig):
    rig.learn(1, SHADOW)
    await rig.ask(allowed=frozenset({"20", "19", "18", "17"}), blocked=frozenset({"1"}))
    await rig.compared(1)
    assert rig.versions.figures()[TRIED].overlap == 1.0


async def test_two_answers_without_items_have_all_in_common_and_one_without_has_nothing(rig):
    rig.learn(1, SHADOW)
    await rig.ask(allowed=frozenset({"no item"}))
    await rig.compared(1)
    assert rig.versions.figures()[TRIED].overlap == 1.0
    await rig.ask(allowed=frozenset({"25"}))  # version 2 alone has it
    await rig.compared(2)
    assert rig.versions.figures()[TRIED].overlap == 1.0


@pytest.mark.parametrize("broken", [1, 2])
async def test_degraded_answers_of_either_version_are_not_compared_and_count_as_degraded(rig, broken):
    rig.learn(1, SHADOW)
    rig.encoder(broken).error = BROKE
    await rig.ask()
    await until(lambda: rig.versions.figures().get(TRIED, VersionFigures()).requests == 1)
    rig.encoder(broken).error = None
    await rig.ask()
    await rig.compared(1)
    assert {arm.version: (one.requests, one.degraded) for arm, one in rig.versions.figures().items()} == {
        version: (2, int(version == broken)) for version in (1, 2)
    }


async def test_a_shadow_is_not_waited_for_whatever_becomes_of_it(rig, caplog):
    rig.learn(1, SHADOW)
    rig.encoder(2).delay = 3600
    assert await asyncio.wait_for(rig.served_by("a"), 120) == 1
    rig.encoder(2).delay, rig.encoder(2).error = 0, ZeroDivisionError("a bug in the new version")
    assert await rig.served_by("b") == 1
    await until(lambda: "the shadow of an answer could not be computed by tiny/2" in caplog.text)
    await rig.versions.close()


async def test_shadows_are_bounded_and_what_is_beyond_is_answered_all_the_same(rig):
    rig.learn(1, SHADOW)
    rig.encoder(2).delay = 3600
    for user in USERS:
        assert await rig.served_by(user) == 1
    await asyncio.sleep(0)
    assert len(rig.encoder(2).asked) == SHADOWS_AT_ONCE
    await rig.versions.close()


async def test_a_shadow_takes_nothing_from_the_cache_and_leaves_nothing_there(three):
    rig = Rig(BundleStore(three), cached=True)
    rig.learn(1, SHADOW)
    for times in (1, 2):
        await rig.ask()
        await rig.compared(times)
    assert len(rig.encoder(2).asked) == 2
    rig.learn(2)
    assert (await rig.ask()).cache.tier == "computed"


async def test_a_stream_is_of_the_version_that_the_user_gets(rig):
    rig.learn(1, HALF)
    for user in USERS[:8]:
        parts = [part async for part in rig.versions.stream(RecommendRequest(user, HISTORY, k=3))]
        assert parts[-1].model_version == f"tiny/{1 + HALF.includes('default', user)}"


def test_where_each_user_asks_once_a_slow_version_ends_its_trial_too():
    stable, tried = VersionRecorder(), VersionRecorder()
    for user in range(MANY_FIRSTS * Guard().fewest_requests):
        assert judge(Guard(), stable.figures(), tried.figures()) == ""
        stable.took(RecommendRequest(str(user)), 10.0)
        tried.took(RecommendRequest(str(user)), 300.0)
    assert "p95 is" in judge(Guard(), stable.figures(), tried.figures())


def test_where_users_come_back_first_answers_end_no_trial_that_few_have_come_back_to():
    """As of a shadow of one request in ten, which meets most of its users for the first time."""
    stable, tried = VersionRecorder(), VersionRecorder()
    for user in range(MANY_FIRSTS * Guard().fewest_requests):
        for _ in range(2):
            stable.took(RecommendRequest(str(user)), 10.0)
        tried.took(RecommendRequest(str(user)), 300.0)
    assert judge(Guard(), stable.figures(), tried.figures()) == ""


def test_first_answers_of_new_users_keep_no_others_of_a_slow_hour(monkeypatch):
    monkeypatch.setattr("deployments.trial_figures.monotonic", clock := Clock())
    recorder = VersionRecorder()
    for _ in range(300):
        recorder.took(RecommendRequest("ada"), 300.0)
    for hour in range(9):
        clock.advance(3600)
        recorder.took(RecommendRequest(str(hour)), 10.0)
    assert recorder.figures().latency.p95_ms is None


async def test_a_user_that_is_forgotten_was_answered_by_no_version_of_a_trial(rig):
    rig.learn(1, HALF)
    await rig.ask()
    rig.versions.forget("default", "ada")
    await rig.ask()
    (arm,) = rig.versions.figures().values()
    assert (arm.requests, arm.latency.count, arm.firsts.count) == (2, 0, 2)
    await rig.ask()
    (arm,) = rig.versions.figures().values()
    assert (arm.requests, arm.latency.count) == (3, 1)


async def test_forgetting_reaches_every_version_that_is_held(rig):
    told = []
    for version, model in rig.model_cache.by_version.items():
        model.answers = SimpleNamespace(forget=lambda tenant, user, version=version: told.append((version, tenant, user)))
    rig.versions.forget("default", "ada")
    assert told == [(1, "default", "ada"), (2, "default", "ada")]
