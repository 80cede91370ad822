"""The pipeline on a real bundle, with the encoder stage played by a function the test controls."""

import asyncio
import threading
import time

import pytest

from cluster.engines.skipped import NoBackendAnswered
from cluster.errors import BackendFailed, InvalidRequest
from cluster.values import Behaviour, RecommendRequest, SkippedBackend
from pipelines.recommend import Recommender
from pipelines.rerank import rerank
from tests.bundles import make_bundle
from tests.fakes.played_stages import Descending

pytestmark = pytest.mark.virtual_time


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return make_bundle(tmp_path_factory.mktemp("models") / "tiny", items=50)


def behaviours(*item_ids, start=1000):
    return tuple(Behaviour(item_id, start + i) for i, item_id in enumerate(item_ids))


def ids(answer):
    return [scored.item.item_id for scored in answer.items]


async def test_answers_titled_items_and_names_who_served(bundle):
    answer = await Recommender(bundle, Descending(bundle)).recommend(RecommendRequest("u", behaviours("1", "2"), k=3))
    assert ids(answer) == ["50", "49", "48"]
    assert answer.items[0].item.title == "Item 50"
    assert [(stage.stage, stage.backend) for stage in answer.stages] == [("encode", "descending")]
    assert answer.model_version == bundle.version == "tiny/1"
    assert not answer.degraded


async def test_leaves_out_what_was_seen_and_what_is_blocked_and_still_fills_k(bundle):
    request = RecommendRequest("u", behaviours("50", "48"), k=3, blocked=frozenset({"49"}))
    assert ids(await Recommender(bundle, Descending(bundle)).recommend(request)) == ["47", "46", "45"]


async def test_seen_items_may_come_back_when_asked_for(bundle):
    request = RecommendRequest("u", behaviours("50"), k=1, exclude_seen=False)
    assert ids(await Recommender(bundle, Descending(bundle)).recommend(request)) == ["50"]


async def test_recommends_only_what_is_allowed(bundle):
    request = RecommendRequest("u", behaviours("50"), k=10, allowed=frozenset({"7", "50", "9", "no such item"}))
    answer = await Recommender(bundle, Descending(bundle)).recommend(request)
    assert ids(answer) == ["9", "7"]
    assert answer.unknown_items == ("no such item",)


async def test_of_long_lists_the_unknown_items_alone_are_put_in_order(bundle):
    compared = []

    class Id(str):
        __slots__ = ()

        def __lt__(self, other):
            compared.extend((self, other))
            return str.__lt__(self, other)

    blocked, allowed = (frozenset(map(Id, [*range(1, 40), *unknown])) for unknown in (("y", "x"), ("z", "x")))
    answer = await Recommender(bundle, Descending(bundle)).recommend(RecommendRequest("u", blocked=blocked, allowed=allowed))
    assert answer.unknown_items == ("x", "y", "z")
    assert set(compared) == {"x", "y", "z"}


async def test_behaviours_reach_the_encoder_in_the_order_of_time(bundle):
    encoder = Descending(bundle)
    shuffled = (Behaviour("3", 30), Behaviour("1", 10), Behaviour("nobody knows", 15), Behaviour("2", 20))
    answer = await Recommender(bundle, encoder).recommend(RecommendRequest("u", shuffled, request_time=40))
    (asked,) = encoder.asked
    assert asked.sequence.items.tolist() == [1, 2, 3]
    assert asked.sequence.timestamps.tolist() == [10, 20, 30]
    assert asked.sequence.request_time == 40
    assert answer.unknown_items == ("nobody knows",)


@pytest.mark.parametrize("history", [(), behaviours("unknown")])
async def test_a_newcomer_gets_what_is_popular_and_that_is_no_degradation(bundle, history):
    encoder = Descending(bundle)
    answer = await Recommender(bundle, encoder).recommend(RecommendRequest("u", history, k=2))
    assert ids(answer) == ["1", "2"]
    assert answer.stages[0].backend == "popularity"
    assert "no behaviour" in answer.stages[0].fallback_from[0].reason
    assert not answer.degraded
    assert encoder.asked == []


async def test_popularity_answers_when_no_encoder_does_and_says_why(bundle):
    encoder = Descending(bundle, error=BackendFailed("no encoder could answer (torch: out of memory)"))
    answer = await Recommender(bundle, encoder).recommend(RecommendRequest("u", behaviours("1"), k=2))
    assert ids(answer) == ["2", "3"]
    assert answer.degraded
    assert answer.stages[0].fallback_from[0].reason == "no encoder could answer (torch: out of memory)"


async def test_popularity_names_every_backend_that_was_passed_over(bundle):
    skipped = (SkippedBackend("onnxruntime", "switched off by the operator"), SkippedBackend("torch", "out of memory", failed=True))
    answer = await Recommender(bundle, Descending(bundle, error=NoBackendAnswered("encoder", skipped))).recommend(
        RecommendRequest("u", behaviours("1"), k=2)
    )
    assert answer.stages[0].fallback_from == skipped
    assert answer.degraded


async def test_an_encoder_that_is_late_is_given_up_with_the_callers_time_and_that_is_no_fault_of_its_own(bundle):
    encoder = Descending(bundle, delay=60)
    answer = await Recommender(bundle, encoder).recommend(RecommendRequest("u", behaviours("1"), k=2, deadline_ms=30))
    assert ids(answer) == ["2", "3"]
    assert answer.degraded
    (late,) = answer.stages[0].fallback_from
    assert (late.backend, late.failed) == ("encoder", False)
    assert late.reason.startswith("it was not done within")


async def test_the_encoder_is_told_what_is_left_of_the_time_and_at_most_its_own_limit(bundle):
    for left_s, least, most in ((None, 3.0, 3.0), (60.0, 3.0, 3.0), (2.0, 1.0, 2.0)):
        encoder, now = Descending(bundle), time.monotonic()
        request = RecommendRequest("u", behaviours("1"), deadline=None if left_s is None else now + left_s)
        await Recommender(bundle, encoder, deadline_s=3.0).recommend(request)
        assert least <= encoder.seconds[0] <= most


async def test_nobody_is_asked_when_the_time_is_over_and_there_is_an_answer_all_the_same(bundle):
    encoder = Descending(bundle)
    answer = await Recommender(bundle, encoder).recommend(RecommendRequest("u", behaviours("1"), k=2, deadline=time.monotonic() - 1))
    assert ids(answer) == ["2", "3"]
    assert answer.stages[0].fallback_from[0].reason == "no time was left for it"
    assert encoder.asked == []


async def test_a_timeout_inside_the_encoder_is_not_taken_for_the_end_of_the_callers_time(bundle):
    with pytest.raises(TimeoutError, match="of something else"):
        await Recommender(bundle, Descending(bundle, error=TimeoutError("of something else"))).recommend(
            RecommendRequest("u", behaviours("1"), deadline_ms=60_000)
        )


async def test_the_encoder_is_told_whose_catalogue_the_indices_are_of(bundle):
    encoder = Descending(bundle)
    await Recommender(bundle, encoder).recommend(RecommendRequest("u", behaviours("1")))
    assert encoder.asked[0].model_version == bundle.identity


async def test_an_answer_of_another_model_version_is_not_used(bundle):
    answer = await Recommender(bundle, Descending(bundle, version="tiny/2")).recommend(RecommendRequest("u", behaviours("1"), k=2))
    assert answer.stages[0].backend == "popularity"
    assert answer.degraded
    assert "tiny/2" in answer.stages[0].fallback_from[0].reason


async def test_an_engine_that_broke_marks_the_answer_degraded_but_an_absent_one_does_not(bundle):
    absent, broke = SkippedBackend("tensorrt", "not installed"), SkippedBackend("onnxruntime", "it broke", failed=True)
    for skipped, degraded in (((absent,), False), ((absent, broke), True)):
        answer = await Recommender(bundle, Descending(bundle, skipped=skipped)).recommend(RecommendRequest("u", behaviours("1")))
        assert answer.degraded is degraded


async def test_a_bug_in_our_own_code_is_not_taken_for_an_engine_failure(bundle):
    with pytest.raises(ZeroDivisionError):
        await Recommender(bundle, Descending(bundle, error=ZeroDivisionError())).recommend(RecommendRequest("u", behaviours("1")))


async def test_a_behaviour_after_the_request_is_refused_with_its_place(bundle):
    request = RecommendRequest("u", (Behaviour("1", 10), Behaviour("2", 99)), request_time=50)
    with pytest.raises(InvalidRequest, match=r"behaviours\[1\].timestamp: 99 is after request_time \(50\)"):
        await Recommender(bundle, Descending(bundle)).recommend(request)


async def test_a_caller_whose_clock_is_ahead_is_served(bundle):
    encoder = Descending(bundle)
    await Recommender(bundle, encoder).recommend(RecommendRequest("u", (Behaviour("1", 4_000_000_000),)))
    assert encoder.asked[0].sequence.request_time == 4_000_000_000


async def test_k_larger_than_the_catalogue_returns_all_there_is(bundle):
    answer = await Recommender(bundle, Descending(bundle)).recommend(RecommendRequest("u", behaviours("1"), k=1000))
    assert len(answer.items) == 49


async def test_plain_retrieval_asks_for_no_more_than_is_needed_and_a_choice_for_a_pool(bundle):
    for more, top_n in (
        ({}, 5),
        ({"diversity": 0.5}, 33),
        ({"freshness": 0.5}, 33),
        ({"explain": True}, 33),
        ({"strategy": "unified"}, 33),
    ):
        encoder = Descending(bundle)
        request = RecommendRequest("u", behaviours("1", "2"), k=2, blocked=frozenset({"3"}), **more)
        await Recommender(bundle, encoder, pool=30).recommend(request)
        assert encoder.asked[0].top_n == top_n, more


async def test_generative_is_refused_where_there_is_no_decoder(bundle):
    with pytest.raises(InvalidRequest, match="generative needs a decoder, and tiny/1 has none; leave strategy out"):
        await Recommender(bundle, Descending(bundle)).recommend(RecommendRequest("u", behaviours("1"), strategy="generative"))


async def test_unified_without_a_decoder_is_retrieval_and_says_why(bundle):
    answer = await Recommender(bundle, Descending(bundle)).recommend(RecommendRequest("u", behaviours("1"), k=2, strategy="unified"))
    assert ids(answer) == ["50", "49"]
    assert [(stage.stage, stage.backend) for stage in answer.stages] == [("encode", "descending"), ("generate", "none")]
    assert answer.stages[1].fallback_from[0].reason == "tiny/1 has no decoder"
    assert not answer.degraded


async def test_freshness_prefers_items_that_are_new_at_the_time_of_the_request(bundle):
    encoder, now = Descending(bundle), int(bundle.first_seen[1]) + 10  # item i is first seen i - 1 seconds after item 1
    request = RecommendRequest("u", (Behaviour("1", 0),), k=50, request_time=now + 365 * 86400, freshness=1.0, explain=True)
    answer = await Recommender(bundle, encoder).recommend(request)
    assert sorted(ids(answer)) == sorted(str(i) for i in range(2, 51))
    assert 0 < answer.items[0].explanation.freshness < 1e-3
    ages = [one.explanation.freshness for one in answer.items]
    assert ages == sorted(ages, reverse=True)


async def test_diversity_reorders_and_keeps_each_items_score(bundle):
    plain, diverse = [
        await Recommender(bundle, Descending(bundle)).recommend(RecommendRequest("u", behaviours("1"), k=49, diversity=diversity))
        for diversity in (0.0, 0.9)
    ]
    assert ids(plain) != ids(diverse)
    assert ids(plain)[0] == ids(diverse)[0]
    assert {one.item.item_id: one.score for one in plain.items} == {one.item.item_id: one.score for one in diverse.items}


class Choosing:
    """The choice of items, each made once the loop has had its turn. `threads`: where they began; `most`: how many were made at a time."""

    def __init__(self, monkeypatch):
        self.loop, self.turn = asyncio.get_running_loop(), threading.Event()
        self.threads, self.running, self.most = [], 0, 0
        monkeypatch.setattr("pipelines.answering.rerank", self)

    def __call__(self, *asked, **options):
        self.threads.append(threading.get_ident())
        self.running += 1
        self.most = max(self.most, self.running)
        self.loop.call_soon_threadsafe(self.turn.set)
        assert self.turn.wait(10), "the loop was held, which was to set it"
        self.running -= 1
        return rerank(*asked, **options)


@pytest.mark.parametrize("option", [{"diversity": 0.5}, {"explain": True}], ids=str)
async def test_a_choice_among_many_items_leaves_the_loop_to_others_and_one_is_made_at_a_time(tmp_path, monkeypatch, option):
    large, choosing = make_bundle(tmp_path / "large", items=1000), Choosing(monkeypatch)
    recommender = Recommender(large, Descending(large))
    asked = [recommender.recommend(RecommendRequest(f"u{n}", (), k=1000, **option)) for n in range(3)]
    assert [len(answer.items) for answer in await asyncio.gather(*asked)] == [1000] * 3
    assert (len(choosing.threads), choosing.most) == (3, 1)


async def test_a_choice_of_ten_items_needs_no_thread(tmp_path, monkeypatch):
    large, choosing = make_bundle(tmp_path / "large", items=1000), Choosing(monkeypatch)
    choosing.turn.set()
    request = RecommendRequest("u", behaviours("1", "2"), k=10, diversity=0.5, explain=True)
    assert len((await Recommender(large, Descending(large)).recommend(request)).items) == 10
    assert choosing.threads == [threading.get_ident()]
