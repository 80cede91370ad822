"""Answers from the cache and from stored histories: the real recommender, cache and event store; only the encoder is played."""

import asyncio
from dataclasses import replace

import pytest

from cluster.cache.memory import MemoryCache
from cluster.cache.tier_values import TierSettings
from cluster.cache.tiered import TieredCache
from cluster.errors import BackendUnavailable, InvalidRequest
from cluster.events.store import Event, open_event_store
from cluster.values import Behaviour, RecommendRequest, SamplingOptions
from pipelines.answer_key import answer_key, cacheable, version_of
from pipelines.answers import ANSWER_CODEC, Answers
from pipelines.recommend import Recommender
from pipelines.stored_history import StoredHistories
from tests.bundles import make_bundle
from tests.fake_stages import Descending

NOW = 1_700_000_000
SEEN = (Behaviour("1", NOW), Behaviour("2", NOW + 1))
ASKED = RecommendRequest("ada", SEEN, k=3)
STORED = RecommendRequest("ada", None, k=3)


@pytest.fixture
async def events(tmp_path):
    store = await open_event_store(f"sqlite:///{tmp_path}/events.db")
    yield store
    await store.close()


class Setting:
    """Everything an answer needs, and a clock that stands still."""

    def __init__(self, root, events=None):
        self.now = float(NOW)
        self.bundle = make_bundle(root / "models", items=50)
        self.encoder = Descending(self.bundle)
        self.cache = TieredCache(MemoryCache("s3fifo", 2**20, clock=self.clock), None, TierSettings(), ANSWER_CODEC, clock=self.clock)
        self.answers = Answers(Recommender(self.bundle, self.encoder), StoredHistories(events, 1000), self.cache, self.bundle.digest)

    def clock(self):
        return self.now


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


@pytest.mark.parametrize(
    "other",
    [
        replace(ASKED, tenant="other"),
        replace(ASKED, user_id="bob"),
        replace(ASKED, k=4),
        replace(ASKED, behaviours=SEEN[:1]),
        replace(ASKED, behaviours=(SEEN[0], replace(SEEN[1], timestamp=NOW + 2))),
        replace(ASKED, exclude_seen=False),
        replace(ASKED, blocked=frozenset({"9"})),
        replace(ASKED, allowed=frozenset({"9"})),
        replace(ASKED, request_time=NOW + 10),
        replace(ASKED, diversity=0.5),
        replace(ASKED, explain=True),
        replace(ASKED, cache="bypass"),
        replace(ASKED, cache="refresh"),
    ],
    ids=lambda request: str(request)[:0] or None,
)
async def test_whatever_changes_the_answer_is_computed_anew(setting, other):
    await setting.answers.recommend(ASKED)
    await setting.answers.recommend(other)
    assert len(setting.encoder.asked) == 2


def test_an_answer_of_another_model_version_has_another_key():
    assert answer_key(ASKED, "ml/1", "v") != answer_key(ASKED, "ml/2", "v")
    assert answer_key(ASKED, "ml/1", "v") != answer_key(ASKED, "ml/1", "w")


def test_the_key_does_not_depend_on_the_order_of_listed_items():
    one, other = (replace(ASKED, blocked=frozenset(listed)) for listed in (["5", "7", "9"], ["9", "7", "5"]))
    assert answer_key(one, "m", "v") == answer_key(other, "m", "v")


def test_a_sent_history_never_has_the_version_of_a_stored_one():
    assert version_of(()).startswith("sent:")


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


async def test_an_event_makes_the_users_next_answer_ready(setting, events):
    await setting.answers.recommend(STORED)
    await events.append([Event("ada", SEEN[0])])
    await setting.answers.anticipate("default", "ada")
    async with asyncio.timeout(5):
        while not setting.encoder.asked:  # noqa: ASYNC110 - it is computed in the background
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
    assert (await setting.answers.recommend(STORED)).cache.tier == "l1"
    assert len(setting.encoder.asked) == 1


async def test_nothing_is_anticipated_of_a_user_who_has_asked_for_nothing(setting):
    assert not setting.answers.expects("default", "ada")
    await setting.answers.recommend(STORED)
    assert setting.answers.expects("default", "ada")
    assert not setting.answers.expects("other", "ada")
    setting.answers.forget("default", "ada")
    assert not setting.answers.expects("default", "ada")


async def test_a_degraded_answer_is_kept_for_a_moment_only(setting):
    setting.encoder.error = BackendUnavailable("no encoder")
    assert (await setting.answers.recommend(ASKED)).degraded
    assert (await setting.answers.recommend(ASKED)).cache.tier == "l1"
    setting.encoder.error = None
    setting.now += 2
    answer = await setting.answers.recommend(ASKED)
    assert (answer.degraded, answer.cache.tier) == (False, "computed")


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
    assert not setting.answers.expects("default", "ada")


async def test_a_stale_answer_that_is_streamed_is_computed_anew(setting):
    await setting.answers.recommend(ASKED)
    setting.now += 100
    parts = [part async for part in setting.answers.stream(ASKED)]
    assert parts[-1].cache.stale
    async with asyncio.timeout(5):
        while len(setting.encoder.asked) < 2:  # noqa: ASYNC110 - it is computed in the background
            await asyncio.sleep(0.01)


class BrokenStore:
    name = "broken"

    async def version(self, tenant, user_id):
        raise BackendUnavailable("the database is down")

    async def history(self, tenant, user_id, limit):
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
