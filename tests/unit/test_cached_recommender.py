"""Answers from the cache and from stored histories: the real recommender, cache and event store; only the encoder is played."""

import asyncio
import logging

import numpy as np
import pytest
from msgspec.structs import replace

from cluster.cache.memory import MemoryCache
from cluster.cache.shard import CacheShard
from cluster.cache.shared import ShardedCache, SharedSettings
from cluster.cache.shared_notes import SharedNotes
from cluster.cache.tier_values import TierSettings
from cluster.cache.tiered import TieredCache
from cluster.errors import BackendUnavailable, InvalidRequest
from cluster.events.guarded import GuardedHistories
from cluster.events.store import Event, StoredHistory, open_event_store
from cluster.few_lines import TOLD_EVERY_S
from cluster.values import Action, Behaviour, RecommendRequest, SamplingOptions, StageReport
from pipelines.answer_codec import ANSWER_CODEC
from pipelines.answer_key import answer_key, cacheable, version_of
from pipelines.cached_recommender import CachedRecommender
from pipelines.recommend import Recommender
from pipelines.remembered import REQUEST_CODEC, UsualRequests
from pipelines.stored_history import StoredHistories
from tests.fakes.played_stages import Ascending, Descending, bundle_with_ranker
from tests.waiting import passed, until

pytestmark = pytest.mark.virtual_time

NOW = 1_700_000_000
SEEN = (Behaviour("1", NOW), Behaviour("2", NOW + 1))
RATED = Behaviour("1", NOW, Action.RATING, 4.0)
HALF = Behaviour("\ud800", NOW)
ASKED = RecommendRequest("ada", SEEN, k=3)
STORED = RecommendRequest("ada", None, k=3)


@pytest.fixture
async def events(tmp_path):
    store = await open_event_store(f"sqlite:///{tmp_path}/events.db")
    yield store
    await store.close()


class Setting:
    """Everything an answer needs, and a clock that stands still."""

    def __init__(self, root, events=None, limit=1000):
        self.now = float(NOW)
        self.bundle = bundle_with_ranker(root / "models")
        self.encoder, self.ranker = Descending(self.bundle), Ascending(self.bundle)
        self.cache = TieredCache(MemoryCache("s3fifo", 2**20, clock=self.clock), None, TierSettings(), ANSWER_CODEC, clock=self.clock)
        self.store = Watched(events) if events else None
        self.usual = UsualRequests()
        self.answers = CachedRecommender(
            Recommender(self.bundle, self.encoder, rank=self.ranker),
            StoredHistories(self.store, limit),
            self.cache,
            self.bundle.digest,
            self.usual,
        )

    def clock(self):
        return self.now

    def share(self, shard, settings=None):
        """Another gateway, with an empty memory, that shares this one."""
        self.cache = TieredCache(
            MemoryCache("s3fifo", 2**20, clock=self.clock),
            ShardedCache({"0": shard}, settings),
            TierSettings(),
            ANSWER_CODEC,
            clock=self.clock,
        )
        self.answers = CachedRecommender(
            Recommender(self.bundle, self.encoder, rank=self.ranker), StoredHistories(self.store, 100), self.cache, self.bundle.digest
        )


@pytest.fixture
async def setting(tmp_path, events):
    made = Setting(tmp_path, events)
    yield made
    await made.cache.close()


def ids(answer):
    return [scored.item.item_id for scored in answer.items]


async def test_the_second_answer_is_the_first_and_says_where_it_comes_from(setting):
    first = await setting.answers.recommend(ASKED)
    setting.now += 5
    second = await setting.answers.recommend(ASKED)
    assert (first.cache.tier, second.cache.tier, round(second.cache.age_s)) == ("computed", "l1", 5)
    assert replace(second, cache=None) == replace(first, cache=None)
    assert len(setting.encoder.asked) == 1


CHANGED = {
    "user_id": "bob",
    "behaviours": (SEEN[0], replace(SEEN[1], timestamp=NOW + 2)),
    "k": 4,
    "request_time": NOW + 10,
    "exclude_seen": False,
    "blocked": frozenset({"9"}),
    "allowed": frozenset({"9"}),
    "tenant": "other",
    "strategy": "retrieval",
    "diversity": 0.5,
    "freshness": 0.5,
    "explain": True,
    "sampling": SamplingOptions(seed=7),
    "rank": False,
}
"""Another value for each field that an answer depends on."""
UNCHANGED = {"cache": "refresh", "deadline_ms": 50.0, "deadline": 50.0}
"""The same for those that decide whether there is an answer in time, and whether it is kept: not which."""


def key_of(request):
    return answer_key(request, "m", version_of(request.behaviours))


@pytest.mark.parametrize("field", RecommendRequest.__struct_fields__)
def test_a_key_differs_with_each_field_that_changes_the_answer(field):
    assert (field in CHANGED) != (field in UNCHANGED), "a new field stands in one of them"
    other = replace(ASKED, **{field: {**CHANGED, **UNCHANGED}[field]})
    assert other != ASKED
    assert (key_of(other) == key_of(ASKED)) == (field in UNCHANGED)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.5}, {"top_k": 1}, {"top_p": 0.5}, {"seed": 8}, {"samples": 33}],
    ids=SamplingOptions.__struct_fields__,
)
def test_a_key_differs_with_each_option_of_drawing(options):
    drawn = replace(ASKED, sampling=SamplingOptions(seed=7))
    assert key_of(replace(drawn, sampling=replace(drawn.sampling, **options))) != key_of(drawn)


@pytest.mark.parametrize(
    "changes",
    [
        *({field: CHANGED[field]} for field in CHANGED if field != "sampling"),  # which takes a decoder
        {"cache": "bypass"},
        {"cache": "refresh"},
    ],
    ids=" ".join,
)
async def test_whatever_changes_the_answer_is_computed_anew(setting, changes):
    await setting.answers.recommend(ASKED)
    await setting.answers.recommend(replace(ASKED, **changes))
    assert len(setting.encoder.asked) == 2


def test_an_answer_of_another_model_version_has_another_key():
    assert answer_key(ASKED, "ml/1", "v") != answer_key(ASKED, "ml/2", "v")
    assert answer_key(ASKED, "ml/1", "v") != answer_key(ASKED, "ml/1", "w")


def test_the_key_does_not_depend_on_the_order_of_listed_items():
    one, other = (replace(ASKED, blocked=frozenset(listed)) for listed in (["5", "7", "9"], ["9", "7", "5"]))
    assert answer_key(one, "m", "v") == answer_key(other, "m", "v")


def test_a_sent_history_never_has_the_version_of_a_stored_one():
    assert version_of(()).startswith("sent:")


@pytest.mark.parametrize(
    "others",
    [
        [(), (RATED,), (RATED, RATED), (RATED, SEEN[0]), (SEEN[0], RATED)],
        [(replace(RATED, item_id=item),) for item in ("1", "11", "1 ", "é", "e\u0301", "\0")],
        [(replace(RATED, timestamp=at),) for at in (0, 1, NOW, NOW + 1, 2**64, 2**64 + 1)],
        [(replace(RATED, action=action),) for action in Action],
        [(replace(RATED, value=value),) for value in (None, False, True, 0.0, 0, 1.0, 1, "1", 4.0, 4.000001, -1e12, 1e12)],
        [(replace(HALF, item_id=item),) for item in ("\ud800", "\ud801", "\\ud800", "?", "\ud800x")],
        [(Behaviour("1", NOW, value=1.0), Behaviour("1", NOW)), (Behaviour("1", NOW), Behaviour("1", NOW, value=1.0))],
    ],
    ids=["number and order", "item", "timestamp", "action", "value", "half of a surrogate pair", "place"],
)
def test_sent_histories_that_differ_have_different_versions(others):
    assert len(set(map(version_of, others))) == len(others)


def test_a_sent_history_has_the_same_version_in_every_process():
    assert version_of((RATED, SEEN[0])) == "sent:1a97e51db1b4ce8c3223e0b9975070e7"
    assert version_of((HALF,)) == "sent:13d63e40a429455222f112c210e4861f"


def test_a_key_is_the_same_in_every_process_whatever_the_order_in_which_a_set_is_gone_through():
    asked = replace(ASKED, blocked=frozenset(["nine", "items"]), allowed=frozenset(map(str, range(40))))
    assert answer_key(asked, "m", "v").digest == "a288431e71ddbe6bc95d1a2de372001d"


def test_numpys_numbers_and_names_in_a_sent_history_are_those_of_python():
    assert version_of((replace(RATED, item_id=np.str_("1"), value=np.float64(4.0)),)) == version_of((RATED,))


def test_items_drawn_anew_each_time_are_not_cached_and_those_of_a_seed_are():
    drawn = replace(ASKED, sampling=SamplingOptions())
    assert not cacheable(drawn)
    assert cacheable(replace(drawn, sampling=SamplingOptions(seed=7)))


async def test_a_user_alone_is_answered_by_what_is_stored_of_them(setting, events):
    await events.append([Event("ada", behaviour) for behaviour in SEEN])
    by_store, sent = await setting.answers.recommend(STORED), await setting.answers.recommend(ASKED)
    assert ids(by_store) == ids(sent)
    assert [(stage.stage, stage.backend) for stage in by_store.stages][:2] == [("history", "sqlite"), ("encode", "descending")]


async def test_a_new_event_is_in_the_very_next_answer(setting, events):
    await events.append([Event("ada", SEEN[0])])
    before = await setting.answers.recommend(STORED)
    await events.append([Event("ada", Behaviour(ids(before)[0], NOW + 9))])
    after = await setting.answers.recommend(STORED)
    assert ids(before)[0] not in ids(after)
    assert after.cache.tier == "computed"


async def test_as_of_a_time_only_what_had_happened_by_then_counts(setting, events):
    await events.append([Event("ada", Behaviour("50", NOW)), Event("ada", Behaviour("49", NOW + 100))])
    answer = await setting.answers.recommend(replace(STORED, request_time=NOW + 50))
    assert "49" in ids(answer)
    assert "50" not in ids(answer)


async def test_what_came_later_takes_no_place_among_the_latest_events_of_that_time(tmp_path, events):
    setting = Setting(tmp_path, events, limit=3)
    await events.append([Event("ada", Behaviour(item, NOW + at)) for item, at in (("50", 0), ("49", 90), ("48", 91), ("47", 92))])
    answer = await setting.answers.recommend(replace(STORED, request_time=NOW + 50))
    assert [stage.stage for stage in answer.stages] == ["history", "encode"]
    assert "50" not in ids(answer)
    await setting.cache.close()


async def test_an_event_makes_the_users_next_answer_ready(setting, events):
    await setting.answers.recommend(STORED)
    await events.append([Event("ada", SEEN[0])])
    await setting.answers.anticipate("default", "ada")

    async def ready():
        return (await setting.cache.statistics()).computed == 2

    await until(ready, "it is computed in the background")
    assert (await setting.answers.recommend(STORED)).cache.tier == "l1"
    assert len(setting.encoder.asked) == 1


@pytest.mark.parametrize("shared", [False, True])
async def test_an_answer_that_was_not_in_time_keeps_none_from_being_made_ready(setting, events, shared):
    if shared:
        setting.share(CacheShard(MemoryCache(clock=setting.clock), setting.clock))
    await setting.answers.recommend(STORED)
    await events.append([Event("ada", SEEN[0])])
    setting.encoder.delay = 1.0
    assert (await setting.answers.recommend(replace(STORED, deadline_ms=30))).degraded
    await setting.answers.anticipate("default", "ada")
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    answer = await setting.answers.recommend(replace(STORED, deadline_ms=30))
    assert (answer.cache.tier, answer.degraded) == ("l1", False)


@pytest.mark.parametrize("shared", [False, True])
async def test_a_hurried_request_waits_for_no_other_computation_under_way(setting, shared):
    if shared:
        setting.share(CacheShard(MemoryCache(clock=setting.clock), setting.clock))
    setting.encoder.delay = 3.0
    deadlines = (None, 4_000, 4_001, 4_002)
    answers = await asyncio.gather(*(setting.answers.recommend(replace(ASKED, deadline_ms=deadline_ms)) for deadline_ms in deadlines))
    assert [(answer.cache.tier, answer.degraded) for answer in answers] == [("computed", False)] * 4


async def test_nothing_is_anticipated_of_a_user_who_has_asked_for_nothing(setting):
    assert not setting.usual.of("default", "ada")
    await setting.answers.recommend(STORED)
    assert setting.usual.of("default", "ada")
    assert not setting.usual.of("other", "ada")
    setting.answers.forget("default", "ada")
    assert not setting.usual.of("default", "ada")


async def test_what_is_asked_for_as_a_stream_is_anticipated_too(setting):
    assert [part async for part in setting.answers.stream(STORED)]
    assert setting.usual.of("default", "ada")


async def test_a_stream_is_refused_before_the_stored_history_is_told(setting):
    with pytest.raises(InvalidRequest):
        await anext(setting.answers.stream(replace(STORED, strategy="generative")))


async def test_a_degraded_answer_is_kept_for_a_moment_only(setting):
    setting.encoder.error = BackendUnavailable("no encoder")
    assert (await setting.answers.recommend(ASKED)).degraded
    assert (await setting.answers.recommend(ASKED)).cache.tier == "l1"
    setting.encoder.error = None
    setting.now += 2
    answer = await setting.answers.recommend(ASKED)
    assert (answer.degraded, answer.cache.tier) == (False, "computed")


async def test_a_degraded_answer_that_wanted_nothing_kept_is_not_kept_as_a_good_one_may_be_elsewhere(setting):
    setting.encoder.error = BackendUnavailable("no encoder")
    assert (await setting.answers.recommend(replace(ASKED, cache="refresh"))).degraded
    assert (await setting.answers.recommend(ASKED)).cache.tier == "computed"


async def test_who_is_in_a_hurry_takes_what_is_kept_and_joins_nobody_who_is_not(setting):
    setting.encoder.error = None
    slow = asyncio.create_task(setting.answers.recommend(ASKED))
    hurried = replace(ASKED, deadline_ms=50)
    await asyncio.sleep(0)
    assert (await setting.answers.recommend(hurried)).cache.tier == "computed"
    assert (await slow).cache.tier == "computed"
    assert (await setting.answers.recommend(hurried)).cache.tier == "l1"


async def test_a_request_that_lists_many_items_or_is_refused_is_not_remembered(setting):
    await setting.answers.recommend(replace(STORED, blocked=frozenset(map(str, range(101)))))
    with pytest.raises(InvalidRequest):
        await setting.answers.recommend(replace(STORED, strategy="generative"))
    assert not setting.usual.of("default", "ada")


async def _whole(answers, request):
    return await answers.recommend(request)


async def _streamed(answers, request):
    return [part async for part in answers.stream(request)][-1]


@pytest.mark.parametrize("asked_by", [_whole, _streamed])
@pytest.mark.parametrize("erased_while", ["the store is asked", "the encoder computes"])
async def test_a_request_that_outlasts_its_users_erasure_leaves_nothing_of_the_user_in_the_shared_cache(
    setting, events, asked_by, erased_while
):
    await events.append([Event("ada", SEEN[0])])
    shard = CacheShard(MemoryCache(clock=setting.clock), setting.clock)
    shared = ShardedCache({"only": shard}, SharedSettings(deadline_s=60))
    usual = UsualRequests(SharedNotes(shared, REQUEST_CODEC, setting.clock))
    cache = TieredCache(MemoryCache(clock=setting.clock), shared, TierSettings(), ANSWER_CODEC, clock=setting.clock)
    answers = CachedRecommender(
        Recommender(setting.bundle, setting.encoder), StoredHistories(setting.store, 10), cache, setting.bundle.digest, usual
    )
    if early := erased_while == "the store is asked":
        setting.store.told.clear()
    setting.encoder.delay = 1.0
    asked = asyncio.create_task(asked_by(answers, STORED))
    await until(lambda: setting.store.read if early else setting.encoder.asked)
    if early:
        await usual.shared.flush()
        setting.store.erased = True
    answers.forget("default", "ada")
    await cache.invalidate("default", "ada")
    setting.store.told.set()
    await asked
    await usual.shared.flush()
    await cache.flush()
    answers.forget("default", "ada")  # again, now that requests of that time are over: each gateway in its own memory
    cache.forget("default", "ada")
    assert usual.of("default", "ada") is None
    assert shard.memory.entries() == []
    await cache.close()


async def test_a_stale_answer_that_is_streamed_is_computed_anew(setting):
    await setting.answers.recommend(ASKED)
    setting.now += 100
    parts = [part async for part in setting.answers.stream(ASKED)]
    assert parts[-1].cache.stale
    async with asyncio.timeout(120):
        while len(setting.encoder.asked) < 2:  # noqa: ASYNC110 - it is computed in the background
            await asyncio.sleep(0.01)


async def good(setting, events, **asks):
    """An answer to a stored history, and one more event of the user."""
    await events.append([Event("ada", SEEN[0])])
    answer = await setting.answers.recommend(replace(STORED, **asks))
    await events.append([Event("ada", Behaviour(ids(answer)[0], NOW + 9))])
    return answer


async def test_where_no_encoder_answers_the_last_good_answer_is_given_less_what_was_seen_since(setting, events):
    before = await good(setting, events)
    setting.encoder.error = BackendUnavailable("no encoder")
    answer = await setting.answers.recommend(STORED)
    assert (ids(answer)[:-1], len(set(ids(answer)))) == (ids(before)[1:], STORED.k), "a popular item follows in place of the seen one"
    assert (answer.degraded, answer.items[0].stage, answer.items[-1].stage) == (True, before.items[0].stage, "popularity")
    assert [(stage.stage, stage.backend) for stage in answer.stages] == [("history", "sqlite"), ("cached", "l1")]
    assert answer.stages[1].fallback_from[0].reason == "no encoder"
    assert answer.model_version == before.model_version


async def test_an_answer_past_its_time_is_better_than_popular_items(setting):
    before = await setting.answers.recommend(ASKED)
    setting.encoder.error = BackendUnavailable("no encoder")
    setting.now += 100
    assert ids(await setting.answers.recommend(replace(ASKED, cache="refresh"))) == ids(before)
    setting.now += 1000
    answer = await setting.answers.recommend(replace(ASKED, behaviours=SEEN[:1]))
    assert answer.stages[0].stage == "popularity", "by then it is gone"


async def test_what_is_blocked_now_is_left_out_of_the_last_good_answer(setting, events):
    before = await good(setting, events)
    setting.encoder.error = BackendUnavailable("no encoder")
    blocked = replace(STORED, blocked=frozenset(ids(before)[1:2]))
    assert ids(await setting.answers.recommend(blocked))[:-2] == ids(before)[2:]
    nothing = await setting.answers.recommend(replace(STORED, blocked=frozenset(ids(before))))
    assert [stage.stage for stage in nothing.stages] == ["history", "popularity"]


@pytest.mark.parametrize(
    "other", [{"tenant": "other"}, {"user_id": "bob"}, {"k": 4}, {"allowed": frozenset({"7"})}, {"cache": "bypass"}, {"explain": True}]
)
async def test_the_last_good_answer_is_for_the_same_user_and_options_only(setting, other):
    await setting.answers.recommend(ASKED)
    setting.encoder.error = BackendUnavailable("no encoder")
    answer = await setting.answers.recommend(replace(ASKED, behaviours=SEEN[:1], **other))
    assert answer.stages[0].stage == "popularity"


async def test_a_degraded_answer_never_takes_the_place_of_the_last_good_one(setting, events):
    before = await good(setting, events)
    setting.encoder.error = BackendUnavailable("no encoder")
    for number in range(3):
        await events.append([Event("ada", Behaviour(f"{number + 3}", NOW + 10 + number))])
        assert ids(await setting.answers.recommend(STORED))[: STORED.k - 1] == ids(before)[1:]
    setting.encoder.error = None
    assert not (await setting.answers.recommend(STORED)).degraded, "nothing of it was kept"


async def test_a_joined_answer_that_is_not_kept_never_takes_the_place_of_the_last_good_one(setting, events):
    before = await good(setting, events)
    setting.store.told.clear()
    read, both = setting.store.read, asyncio.gather(*(setting.answers.recommend(STORED) for _ in range(2)))
    await until(lambda: setting.store.read == read + 2)
    await events.append([Event("ada", Behaviour("3", NOW + 10))])  # after both have read the version, before the history is read
    setting.store.told.set()
    assert {answer.cache.tier for answer in await both} == {"computed", "joined"}
    setting.encoder.error = BackendUnavailable("no encoder")
    answer = await setting.answers.recommend(STORED)
    assert [stage.stage for stage in answer.stages] == ["history", "cached"]
    assert ids(answer)[:-1] == ids(before)[1:]


async def test_a_newcomer_gets_what_is_popular_though_there_was_an_answer_before(setting):
    await setting.answers.recommend(ASKED)
    answer = await setting.answers.recommend(replace(ASKED, behaviours=()))
    assert (answer.stages[0].stage, answer.degraded) == ("popularity", False)


async def test_popular_items_that_a_newcomer_was_given_are_no_last_good_answer(setting, events):
    given = await setting.answers.recommend(STORED)
    await events.append([Event("ada", Behaviour(one, NOW + 9)) for one in ids(given)[:2]])
    setting.encoder.error = BackendUnavailable("no encoder")
    answer = await setting.answers.recommend(STORED)
    assert ([stage.stage for stage in answer.stages], len(answer.items)) == (["history", "popularity"], STORED.k)


async def test_nor_does_a_newcomer_get_another_historys_answer_where_only_the_ranker_is_broken(setting):
    asked = replace(ASKED, rank=True)
    before = await setting.answers.recommend(asked)
    setting.ranker.error = BackendUnavailable("no ranker")
    answer = await setting.answers.recommend(replace(asked, behaviours=()))
    assert (before.degraded, answer.degraded) == (False, True)
    assert "popularity" in [stage.stage for stage in answer.stages]


async def test_where_the_history_cannot_be_read_the_last_good_answer_is_given(setting, events):
    await events.append([Event("ada", SEEN[0])])
    before = await setting.answers.recommend(STORED)
    setting.store.fails = True
    answer = await setting.answers.recommend(STORED)
    assert ids(answer) == ids(before)
    assert [(stage.stage, stage.backend) for stage in answer.stages] == [("history", "none"), ("cached", "l1")]
    blocking = await setting.answers.recommend(replace(STORED, blocked=frozenset(ids(before)[:1])))
    assert ids(blocking) == ids(before)[1:], "popular items may have been seen"


async def test_who_was_erased_has_no_last_good_answer(setting):
    await setting.answers.recommend(ASKED)
    setting.answers.forget("default", "ada")
    setting.encoder.error = BackendUnavailable("no encoder")
    assert (await setting.answers.recommend(replace(ASKED, behaviours=SEEN[:1]))).stages[0].stage == "popularity"


async def test_a_stream_ends_with_the_last_good_answer_too(setting, events):
    before = await good(setting, events)
    setting.encoder.error = BackendUnavailable("no encoder")
    parts = [part async for part in setting.answers.stream(STORED)]
    assert ids(parts[-1])[:-1] == ids(before)[1:]
    told = [part.stage for part in parts if isinstance(part, StageReport)]
    assert (told[-1], told.count("history")) == ("cached", 1)


async def test_the_version_of_a_history_is_read_once_for_each_request(setting, events):
    await events.append([Event("ada", SEEN[0])])
    for asked, reads in ((STORED, 1), (replace(STORED, deadline_ms=60_000), 1), (replace(STORED, k=5, deadline_ms=60_000), 1)):
        setting.store.versions = 0
        await setting.answers.recommend(asked)
        assert setting.store.versions == reads


async def test_an_answer_that_was_in_time_is_kept_for_requests_with_any_deadline_or_none(setting):
    asked = [replace(ASKED, deadline_ms=deadline_ms) for deadline_ms in (60_000, 60_001, None)]
    assert [(await setting.answers.recommend(one)).cache.tier for one in asked] == ["computed", "l1", "l1"]
    assert len(setting.encoder.asked) == 1


@pytest.mark.parametrize("shared", [False, True])
async def test_a_request_without_a_deadline_waits_for_a_hurried_one_and_takes_no_lesser_answer_from_it(setting, shared):
    if shared:
        setting.share(CacheShard(MemoryCache(clock=setting.clock), setting.clock))
    setting.encoder.delay = 1.0
    hurried, whole = await asyncio.gather(*map(setting.answers.recommend, (replace(ASKED, deadline_ms=50), ASKED)))
    assert (hurried.degraded, whole.degraded, whole.cache.tier) == (True, False, "computed")
    assert (await setting.answers.recommend(replace(ASKED, deadline_ms=50))).cache.tier == "l1"


async def test_a_hurried_answer_that_is_kept_here_is_given_without_a_look_elsewhere_and_counts_as_one_hit(setting):
    shard = CacheShard(MemoryCache(clock=setting.clock), setting.clock)
    setting.share(shard)
    hurried = replace(ASKED, deadline_ms=60_000)
    assert [(await setting.answers.recommend(hurried)).cache.tier for _ in range(3)] == ["computed", "l1", "l1"]
    figures = await setting.cache.statistics()
    assert (figures.l1.hits, figures.l1.misses) == (2, 1)
    assert (figures.l2.hits, figures.l2.misses) == (0, 1)


async def test_a_hurried_answer_from_another_gateway_is_computed_anew_without_the_hurry_once_it_is_stale(setting):
    shard, hurried = CacheShard(MemoryCache(clock=setting.clock), setting.clock), replace(ASKED, deadline_ms=50)
    setting.share(shard)
    await setting.answers.recommend(hurried)
    await setting.cache.flush()
    setting.share(shard)
    setting.now += 100
    setting.encoder.delay = 1.0
    stale = await setting.answers.recommend(hurried)
    assert (stale.cache.tier, stale.cache.stale, stale.degraded) == ("l2", True, False)
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=60)
    answer = await setting.answers.recommend(hurried)
    assert (answer.cache.tier, answer.cache.stale, answer.degraded) == ("l1", False, False)


@pytest.mark.parametrize("answered", [_whole, _streamed], ids=["whole", "stream"])
async def test_an_answer_in_demand_is_computed_ahead_of_its_time_for_requests_with_a_deadline_too(setting, answered):
    stale = {}
    for deadline_ms in (None, 10_000):
        asked = replace(ASKED, user_id=f"in {deadline_ms} ms", deadline_ms=deadline_ms)
        await setting.answers.recommend(asked)  # what a stream computes is not kept
        stale[deadline_ms] = 0
        for _ in range(300):
            stale[deadline_ms] += (await answered(setting.answers, asked)).cache.stale
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
            setting.now += 2
    assert stale == {None: 1, 10_000: 1}, "only the first one's end came before it was in demand"


async def test_an_answer_computed_anew_with_a_deadline_is_given_to_later_requests(setting):
    hurried = replace(ASKED, deadline_ms=60_000)
    await setting.answers.recommend(ASKED)
    setting.now += 5
    assert (await setting.answers.recommend(replace(hurried, cache="refresh"))).cache.tier == "computed"
    setting.now += 5
    answers = (await setting.answers.recommend(hurried), await _streamed(setting.answers, hurried), await setting.answers.recommend(ASKED))
    assert [(answer.cache.tier, round(answer.cache.age_s)) for answer in answers] == [("l1", 5)] * 3


async def test_a_store_that_is_late_costs_a_hurried_request_its_history_and_not_its_answer(setting, events):
    await events.append([Event("ada", SEEN[0])])
    setting.store.delay = 60
    async with asyncio.timeout(120):
        answer = await setting.answers.recommend(replace(STORED, deadline_ms=50))
    assert len(answer.items) == 3
    assert answer.degraded
    assert answer.stages[0].backend == "none"


async def test_who_is_in_a_hurry_does_not_wait_for_a_computation_elsewhere(setting, monkeypatch):
    async def endless(*_, **__):
        await asyncio.sleep(60)

    monkeypatch.setattr(setting.cache, "get_or_compute", endless)
    async with asyncio.timeout(120):
        answer = await setting.answers.recommend(replace(ASKED, deadline_ms=30))
    assert (len(answer.items), answer.degraded) == (3, True)


class Slow(CacheShard):
    """Answers each question for an entry after 90 ms."""

    takes_s = 0.09

    async def mget(self, keys, *, counted=True):
        await asyncio.sleep(self.takes_s)
        return await super().mget(keys, counted=counted)

    async def lease(self, key, holder, seconds, newer_than=0.0):
        await asyncio.sleep(self.takes_s)
        return await super().lease(key, holder, seconds, newer_than)


@pytest.mark.parametrize("answered", [_whole, _streamed], ids=["whole", "stream"])
async def test_a_slow_shared_cache_leaves_a_hurried_request_time_for_its_answer(setting, answered):
    setting.share(Slow(MemoryCache(clock=setting.clock), setting.clock), SharedSettings(deadline_s=0.1))
    setting.encoder.delay = 0.03
    loop = asyncio.get_running_loop()
    for user, deadline_ms in enumerate((60, 100, 200)):
        began = loop.time()
        answer = await answered(setting.answers, replace(ASKED, user_id=str(user), deadline_ms=deadline_ms))
        assert (loop.time() - began <= deadline_ms / 1e3, answer.degraded) == (True, False)


async def test_who_joins_a_request_that_has_less_time_left_is_answered_in_the_own_time(setting):
    setting.encoder.delay = 0.1
    now = asyncio.get_running_loop().time()
    late = asyncio.create_task(setting.answers.recommend(replace(ASKED, deadline_ms=500, deadline=now + 0.05)))
    await until(lambda: setting.encoder.asked)
    joins = await setting.answers.recommend(replace(ASKED, deadline_ms=500, deadline=now + 0.5))
    assert ((await late).degraded, joins.degraded) == (True, False)


async def test_of_many_that_join_one_with_less_time_left_the_second_computes_and_the_others_join_again(setting):
    setting.encoder.delay = 0.1
    now = asyncio.get_running_loop().time()
    late = asyncio.create_task(setting.answers.recommend(replace(ASKED, deadline_ms=500, deadline=now + 0.05)))
    await until(lambda: setting.encoder.asked)
    joined = [setting.answers.recommend(replace(ASKED, deadline_ms=500, deadline=now + 0.5)) for _ in range(20)]
    assert [one.degraded for one in (*await asyncio.gather(*joined), await late)] == [False] * 20 + [True]
    assert len(setting.encoder.asked) == 2


async def test_requests_in_a_hurry_share_one_computation_and_find_out_a_shared_cache_that_hangs(setting):
    shard = Slow(MemoryCache(clock=setting.clock), setting.clock)
    shard.takes_s = 3600
    setting.share(shard, SharedSettings(deadline_s=0.1))
    for second in range(20):
        asked = replace(ASKED, user_id=str(second // 5), deadline_ms=200)
        tiers = [answer.cache.tier for answer in await asyncio.gather(*(setting.answers.recommend(asked) for _ in range(10)))]
        assert sorted(set(tiers)) == (["l1"] if second % 5 else ["computed", "joined"])
    assert len(setting.encoder.asked) == 4
    await until(lambda: setting.cache.shared.health()[0].breaker == "open")


@pytest.mark.parametrize("answered", [_whole, _streamed], ids=["whole", "stream"])
async def test_a_miss_is_counted_once_whether_or_not_there_is_a_deadline(setting, answered):
    for asked in (ASKED, replace(ASKED, user_id="eve", deadline_ms=60_000)):
        before = (await setting.cache.statistics()).l1.misses
        await answered(setting.answers, asked)
        assert (await setting.cache.statistics()).l1.misses == before + 1


@pytest.mark.parametrize("answered", [_whole, _streamed], ids=["whole", "stream"])
async def test_an_answer_found_in_the_shared_cache_is_one_miss_here_with_a_deadline_too(setting, answered):
    shard = CacheShard(MemoryCache(clock=setting.clock), setting.clock)
    setting.share(shard)
    await setting.answers.recommend(ASKED)
    await setting.cache.flush()
    setting.share(shard)
    tiers = [(await answered(setting.answers, replace(ASKED, deadline_ms=60_000))).cache.tier for _ in range(2)]
    figures = await setting.cache.statistics()
    assert (tiers, figures.l1.misses, figures.l1.hits, figures.l2.hits) == (["l2", "l1"], 1, 1, 1)


async def test_what_users_ask_for_is_known_to_every_version_of_the_model(setting):
    usual = UsualRequests()
    first, second = (
        CachedRecommender(Recommender(setting.bundle, setting.encoder), StoredHistories(None, 10), setting.cache, digest, usual)
        for digest in ("1", "2")
    )
    await first.recommend(STORED)
    assert usual.of("default", "ada")
    second.forget("default", None)
    assert not usual.of("default", "ada")


def test_what_is_remembered_is_bounded():
    usual = UsualRequests(limit=2)
    for user in ("ada", "bob", "cyd"):
        usual.note(RecommendRequest(user))
    assert [usual.of("default", user) is not None for user in ("ada", "bob", "cyd")] == [False, True, True]


async def test_while_the_event_store_is_away_one_line_a_minute_tells_it_and_how_many_requests_met_it(setting, caplog):
    setting.store.fails = True
    histories = StoredHistories(GuardedHistories(setting.store, 60.0), 10)
    answers = CachedRecommender(Recommender(setting.bundle, setting.encoder), histories, setting.cache, setting.bundle.digest)
    with caplog.at_level(logging.WARNING, "pipelines"):
        for _ in range(100):
            assert (await answers.recommend(STORED)).degraded
        assert setting.store.versions < 10, "its breaker is open"
        assert len(caplog.records) == 1
        await passed(TOLD_EVERY_S)
        assert (await answers.recommend(STORED)).degraded
    assert "without the cache (99 more before it): the database is down" in caplog.records[-1].getMessage()


class Watched:
    """An event store that counts reads of versions, and fails or is late where a test says so; `told`: what it has read
    of versions gets back.
    """

    def __init__(self, store):
        self.store, self.versions, self.read, self.fails, self.delay = store, 0, 0, False, 0.0
        self.name, self.erased, self.told = store.name, False, asyncio.Event()
        self.told.set()

    async def version(self, tenant, user_id):
        self.versions += 1
        await self._as_told()
        version = await self.store.version(tenant, user_id)
        self.read += 1
        await self.told.wait()
        return version

    async def history(self, tenant, user_id, limit, until=None):
        await self._as_told()
        return StoredHistory("", ()) if self.erased else await self.store.history(tenant, user_id, limit, until)

    async def _as_told(self):
        await asyncio.sleep(self.delay)
        if self.fails:
            raise BackendUnavailable("the database is down")


class BrokenStore:
    name = "broken"

    async def version(self, tenant, user_id):
        raise BackendUnavailable("the database is down")

    async def history(self, tenant, user_id, limit, until=None):
        raise BackendUnavailable("the database is down")


async def test_a_broken_event_store_degrades_the_answer_and_says_why(tmp_path):
    setting = Setting(tmp_path, BrokenStore())
    answer = await setting.answers.recommend(STORED)
    assert answer.degraded
    assert len(answer.items) == 3
    assert answer.cache is None
    assert "the database is down" in answer.stages[0].fallback_from[0].reason
    await setting.cache.close()


async def test_without_an_event_store_a_user_alone_gets_what_is_popular(tmp_path):
    setting = Setting(tmp_path)
    answer = await setting.answers.recommend(STORED)
    assert (answer.degraded, answer.stages[0].stage, answer.stages[1].stage) == (False, "history", "popularity")
    await setting.cache.close()


async def test_an_invalid_request_is_refused_each_time(setting):
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="generative needs a decoder"):
            await setting.answers.recommend(replace(ASKED, strategy="generative"))


async def test_a_stream_of_a_kept_answer_ends_with_that_answer(setting):
    kept = await setting.answers.recommend(ASKED)
    parts = [part async for part in setting.answers.stream(ASKED)]
    assert replace(parts[-1], cache=None) == replace(kept, cache=None)
    assert parts[: len(kept.stages)] == list(kept.stages)
    assert len(setting.encoder.asked) == 1


@pytest.mark.parametrize("explain", [False, True])
async def test_the_items_of_a_kept_answer_are_one_part_of_its_stream(setting, explain):
    """An event loop that is given them one by one writes each of a thousand explained items before it does anything else."""
    kept = await setting.answers.recommend(asked := replace(ASKED, explain=explain))
    *parts, _ = [part async for part in setting.answers.stream(asked)]
    assert parts == [*kept.stages, kept.items]


async def test_a_stream_over_a_stored_history_says_whose_it_is(setting, events):
    await events.append([Event("ada", SEEN[0])])
    parts = [part async for part in setting.answers.stream(STORED)]
    assert (parts[0].stage, parts[-1].stages[0].stage) == ("history", "history")


async def test_answers_travel_as_json_without_loss(setting):
    answer = await setting.answers.recommend(replace(ASKED, explain=True, blocked=frozenset({"no such item"})))
    answer = replace(answer, cache=None)
    assert ANSWER_CODEC.decode(ANSWER_CODEC.encode(answer)) == answer


@pytest.mark.parametrize("payload", [b"", b"\x80\x04", b"{}", b'{"user_id": 1}'])
def test_what_is_no_answer_is_not_decoded(payload):
    with pytest.raises(ValueError, match="not an answer"):
        ANSWER_CODEC.decode(payload)
