"""Retrieval, generation and both together, with each stage played by an object the test controls."""

import re

import numpy as np
import pytest
from msgspec.structs import replace

from cluster.bundle import BlendRecord
from cluster.engines.skipped import NoBackendAnswered, OutOfTime
from cluster.errors import BackendFailed, BackendUnavailable, BundleError, DeadlineExceeded, InvalidRequest
from cluster.values import Behaviour, RecommendRequest, SamplingOptions, SkippedBackend
from pipelines.recommend import Recommender
from tests.fakes.played_stages import Descending, Naming, bundle_with_decoder

pytestmark = pytest.mark.virtual_time


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundle_with_decoder(tmp_path_factory.mktemp("models") / "tiny")


def behaviours(*item_ids, start=1000):
    return tuple(Behaviour(item_id, start + i) for i, item_id in enumerate(item_ids))


def request(*item_ids, **more):
    return RecommendRequest("u", behaviours(*item_ids or ("1", "2")), **more)


def ids(answer):
    return [scored.item.item_id for scored in answer.items]


def served(answer):
    return [(stage.stage, stage.backend) for stage in answer.stages]


async def test_a_model_with_a_decoder_blends_both_lists_unless_told_otherwise(bundle):
    answer = await Recommender(bundle, Descending(bundle), Naming(bundle, 7, 49)).recommend(request(k=3))
    assert served(answer) == [("encode", "descending"), ("generate", "naming"), ("blend", "log-linear")]
    assert ids(answer)[0] == "49"  # near the top of both lists
    assert "7" in ids(await Recommender(bundle, Descending(bundle), Naming(bundle, 7, 49)).recommend(request(k=48)))
    assert {one.stage for one in answer.items} == {"blend"}
    assert [one.score for one in answer.items] == sorted((one.score for one in answer.items), reverse=True)
    assert not answer.degraded


async def test_the_blends_pool_is_as_large_as_configured_however_much_was_seen(bundle):
    """The rule was fitted with pools of that size."""
    for seen in (("1", "2"), ("50", "1", "2", "3")):
        answer = await Recommender(bundle, Descending(bundle), Naming(bundle), pool=5).recommend(request(*seen, k=4))
        shares = np.exp(np.arange(5) * -0.02 / 0.05)  # each cosine is 1/50 below the one before
        assert answer.items[0].score == pytest.approx(0.5 * np.log(1 / shares.sum()) - 0.5, rel=1e-4)


async def test_retrieval_asks_no_generator(bundle):
    generator = Naming(bundle, 7)
    answer = await Recommender(bundle, Descending(bundle), generator).recommend(request(k=2, strategy="retrieval"))
    assert ids(answer) == ["50", "49"]
    assert served(answer) == [("encode", "descending")]
    assert generator.asked == []


async def test_generative_answers_with_what_the_decoder_names_only(bundle):
    answer = await Recommender(bundle, Descending(bundle), Naming(bundle, 7, 9, 8)).recommend(request(k=2, strategy="generative"))
    assert ids(answer) == ["7", "9"]
    assert [one.stage for one in answer.items] == ["generate"] * 2
    assert answer.items[0].score == pytest.approx(-np.log(2))
    assert served(answer) == [("encode", "descending"), ("generate", "naming")]


async def test_the_generator_is_prompted_with_the_last_states_and_their_events(bundle):
    generator, sampling = Naming(bundle, 7), SamplingOptions(samples=4, seed=1)
    asked = request("1", "2", "3", "4", k=30, blocked=frozenset({"9"}), allowed=frozenset({"7", "8"}), tenant="t", sampling=sampling)
    encoder = Descending(bundle)
    await Recommender(bundle, encoder, generator, beam=20).recommend(asked)
    (got,) = generator.asked
    assert got.state.states.shape == (3, 4)
    assert got.state.sequence.items.tolist() == [2, 3, 4]
    assert got.state.sequence.timestamps.tolist() == [1001, 1002, 1003]
    assert got.state.sequence.request_time == encoder.asked[0].sequence.request_time
    assert (got.k, got.beam, got.tenant, got.sampling) == (30, 30, "t", sampling)
    assert got.blocked.tolist() == [1, 2, 3, 4, 9]
    assert got.among.tolist() == [7, 8]


@pytest.mark.parametrize(("strategy", "states"), [("retrieval", False), ("generative", True), ("unified", True)])
async def test_the_encoder_is_asked_for_states_where_a_decoder_is_prompted_with_them(bundle, strategy, states):
    encoder = Descending(bundle)
    recommender = Recommender(bundle, encoder, Naming(bundle, 7))
    await recommender.recommend(request("1", strategy=strategy))
    async for _ in recommender.stream(request("1", strategy=strategy)):
        pass
    assert [one.states for one in encoder.asked] == [states] * 2


@pytest.mark.parametrize(("k", "width"), [(3, 20), (30, 30), (1000, 50)])
async def test_the_beam_is_as_wide_as_the_answer_and_no_wider_than_the_catalogue(bundle, k, width):
    generator = Naming(bundle, 7)
    await Recommender(bundle, Descending(bundle), generator, beam=20).recommend(request(k=k))
    assert (generator.asked[0].k, generator.asked[0].beam) == (width, width)


async def test_of_an_encoder_that_gives_a_state_for_each_event_the_decoder_is_prompted_with_the_last(bundle):
    class Generous(Descending):
        async def __call__(self, request, within_s):
            answer = await super().__call__(request, within_s)
            states = np.arange(len(request.sequence) * 4, dtype=np.float32).reshape(-1, 4)
            return replace(answer, result=replace(answer.result, states=states))

    generator = Naming(bundle, 49)
    await Recommender(bundle, Generous(bundle), generator).recommend(request(*map(str, range(1, 13))))
    assert bundle.prompt_length == 8
    assert generator.asked[0].state.states[:, 0].tolist() == [4 * row for row in range(4, 12)]
    assert generator.asked[0].state.sequence.items.tolist() == list(range(5, 13))


@pytest.mark.parametrize(
    ("asks", "width"),
    [
        ({"k": 10, "diversity": 0.5}, 30),
        ({"k": 10, "freshness": 0.5}, 30),
        ({"k": 10}, 20),
        ({"k": 3, "diversity": 0.5}, 20),
        ({"k": 15, "diversity": 0.5}, 40),
        ({"k": 45, "diversity": 0.5}, 45),
        ({"k": 10, "diversity": 0.5, "strategy": "unified"}, 20),
    ],
)
async def test_where_diversity_chooses_among_generated_items_alone_there_are_more_of_them_than_are_asked_for(bundle, asks, width):
    generator = Naming(bundle, *range(3, 51))
    asked = request(**{"strategy": "generative", **asks})
    answer = await Recommender(bundle, Descending(bundle), generator, beam=20, pool=40).recommend(asked)
    assert (generator.asked[0].k, generator.asked[0].beam) == (width, width)
    assert len(answer.items) == asked.k


async def test_the_generator_is_told_whose_catalogue_the_indices_are_of(bundle):
    generator = Naming(bundle, 7)
    await Recommender(bundle, Descending(bundle), generator).recommend(request())
    assert generator.asked[0].model_version == bundle.identity


async def test_to_draw_items_and_generate_none_is_refused_with_the_cure(bundle):
    asked = request(strategy="retrieval", sampling=SamplingOptions())
    with pytest.raises(InvalidRequest, match="ask for strategy unified or generative") as caught:
        await Recommender(bundle, Descending(bundle), Naming(bundle, 7)).recommend(asked)
    assert caught.value.field == "sampling"
    for strategy in (None, "unified", "retrieval"):
        with pytest.raises(InvalidRequest, match="has no decoder; leave sampling out, or train a decoder"):
            await Recommender(bundle, Descending(bundle), None).recommend(replace(asked, strategy=strategy))


@pytest.mark.parametrize("strategy", ["unified", "retrieval", "generative"])
async def test_no_strategy_recommends_what_was_seen_blocked_or_not_allowed(bundle, strategy):
    asked = request("50", "7", k=10, strategy=strategy, blocked=frozenset({"9"}), allowed=frozenset({"7", "8", "9", "10", "50"}))

    class Careless(Naming):
        def generated(self, request):
            generated = super().generated(request)
            return type(generated)(np.append(request.blocked, generated.items), np.append(-0.1 * request.blocked, generated.log_probs))

    for generator in (Naming(bundle, 7, 8, 9, 10), Careless(bundle, 8, 10)):
        assert sorted(ids(await Recommender(bundle, Descending(bundle), generator).recommend(asked))) == ["10", "8"]


@pytest.mark.parametrize("strategy", ["unified", "generative"])
@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        ({"error": NoBackendAnswered("generator", (SkippedBackend("vllm", "out of memory", failed=True),))}, "out of memory"),
        ({"error": NoBackendAnswered("generator", (OutOfTime("vllm", "no answer at the deadline"),))}, "no answer at the deadline"),
        ({"error": NoBackendAnswered("generator", ())}, None),
        ({"error": BackendFailed("it raised KeyError")}, "it raised KeyError"),
        ({"error": BackendUnavailable("no replica answered")}, "no replica answered"),
        ({"error": DeadlineExceeded("too late to begin")}, "too late to begin"),
        ({"version": "tiny/9"}, "the generator serves tiny/9, this gateway {}: a new version is being rolled out"),
    ],
    ids=["none answered", "out of time", "none to ask", "failed", "unavailable", "too late", "other version"],
)
async def test_where_the_generator_fails_the_retrieved_items_are_the_answer(bundle, strategy, broken, reason):
    answer = await Recommender(bundle, Descending(bundle), Naming(bundle, 7, **broken)).recommend(request(k=2, strategy=strategy))
    assert ids(answer) == ["50", "49"]
    assert [one.stage for one in answer.items] == ["encode"] * 2
    assert served(answer) == [("encode", "descending"), ("generate", "none")]
    assert [one.reason for one in answer.stages[1].fallback_from] == ([reason.format(bundle.identity)] if reason else [])
    assert answer.degraded


async def test_a_generator_that_is_late_is_given_up_with_the_callers_time(bundle):
    generator = Naming(bundle, 7, delay=60)
    answer = await Recommender(bundle, Descending(bundle), generator).recommend(request(k=2, deadline_ms=20))
    assert ids(answer) == ["50", "49"]
    (late,) = answer.stages[1].fallback_from
    assert re.fullmatch(r"it was not done within \d+ ms", late.reason)
    assert not late.failed
    assert answer.degraded
    assert 0 < generator.seconds[0] < 0.02


async def test_the_generator_is_told_the_shorter_of_the_callers_time_and_ours(bundle):
    for deadline_ms, seconds in ((None, 3.0), (1000, 1.0), (60_000, 3.0)):
        generator = Naming(bundle, 7)
        await Recommender(bundle, Descending(bundle), generator, generation_deadline_s=3.0).recommend(request(deadline_ms=deadline_ms))
        assert generator.seconds == [pytest.approx(seconds, rel=0.2)]
        assert generator.seconds[0] <= seconds


async def test_the_generator_gets_what_the_encoder_has_left_of_the_callers_time(bundle):
    generator = Naming(bundle, 7)
    await Recommender(bundle, Descending(bundle, delay=0.2), generator).recommend(request(deadline_ms=2000))
    assert 0 < generator.seconds[0] < 1.9
    late = Naming(bundle, 7)
    answer = await Recommender(bundle, Descending(bundle, delay=60), late).recommend(request(k=2, deadline_ms=30))
    assert served(answer) == [("popularity", "popularity"), ("generate", "none")]
    assert late.asked == []


async def test_an_encoder_without_states_leaves_the_generator_out_and_is_named(bundle):
    generator = Naming(bundle, 7)
    answer = await Recommender(bundle, Descending(bundle, states=False), generator).recommend(request(k=2))
    assert ids(answer) == ["50", "49"]
    (skipped,) = answer.stages[1].fallback_from
    assert skipped.reason == "descending gives no user states, which a decoder is prompted with"
    assert not skipped.failed
    assert answer.degraded
    assert generator.asked == []


@pytest.mark.parametrize("strategy", [None, "unified", "generative"])
async def test_a_newcomer_gets_what_is_popular_whatever_the_strategy_and_that_is_no_degradation(bundle, strategy):
    answer = await Recommender(bundle, Descending(bundle), Naming(bundle, 7)).recommend(RecommendRequest("u", k=2, strategy=strategy))
    assert ids(answer) == ["1", "2"]
    assert served(answer) == [("popularity", "popularity"), ("generate", "none")]
    assert not answer.degraded


async def test_popularity_answers_when_the_encoder_fails_too(bundle):
    generator = Naming(bundle, 7)
    encoder = Descending(bundle, error=BackendFailed("gone"))
    answer = await Recommender(bundle, encoder, generator).recommend(request(k=2, strategy="generative"))
    assert ids(answer) == ["3", "4"]
    assert answer.degraded
    assert generator.asked == []


async def test_an_engine_of_the_generator_that_broke_marks_the_answer_degraded_but_an_absent_one_does_not(bundle):
    absent, broke = SkippedBackend("vllm", "not installed"), SkippedBackend("vllm", "it broke", failed=True)
    for skipped, degraded in ((absent, False), (broke, True)):
        answer = await Recommender(bundle, Descending(bundle), Naming(bundle, 7, skipped=(skipped,))).recommend(request())
        assert answer.degraded is degraded
        assert answer.stages[1].fallback_from == (skipped,)


async def test_a_bug_in_our_own_code_is_not_taken_for_a_failure_of_the_generator(bundle):
    for error in (ZeroDivisionError(), TimeoutError("of something else")):
        with pytest.raises(type(error)):
            await Recommender(bundle, Descending(bundle), Naming(bundle, 7, error=error)).recommend(request())


async def test_a_decoder_that_names_nothing_leaves_retrievals_order(bundle):
    answer = await Recommender(bundle, Descending(bundle), Naming(bundle)).recommend(request(k=3))
    assert ids(answer) == ["50", "49", "48"]


async def test_the_manifests_blend_is_what_merges(tmp_path):
    for weight, first in ((0.0, "50"), (1.0, "7")):
        record = BlendRecord(weights={"generator": weight, "temperature": 0.05, "margin": 1.0}, fitted_on="validation")
        bundle = bundle_with_decoder(tmp_path / f"w{weight:g}", blend=record)
        answer = await Recommender(bundle, Descending(bundle), Naming(bundle, 7)).recommend(request(k=1))
        assert ids(answer) == [first]


async def test_a_blend_that_no_rule_can_have_is_refused_at_the_start(tmp_path):
    for weights in ({"w": 0.5}, {"generator": 1.5, "temperature": 0.05, "margin": 1.0}):
        bundle = bundle_with_decoder(tmp_path / str(len(weights)), blend=BlendRecord(weights=weights, fitted_on="validation"))
        with pytest.raises(BundleError, match="the manifest's blend has"):
            Recommender(bundle, Descending(bundle), Naming(bundle))


async def test_an_explanation_has_the_score_of_every_stage_that_found_the_item(bundle):
    asked = request("1", "2", "3", "4", k=5, explain=True, freshness=0.1)
    answer = await Recommender(bundle, Descending(bundle), Naming(bundle, 7, 49), pool=5).recommend(asked)
    why = {one.item.item_id: one.explanation for one in answer.items}
    assert {"50", "49", "7"} < set(why)
    assert (why["49"].retrieval, why["49"].generation) == pytest.approx((49 / 50, 2 * np.log(0.5)))
    assert (why["50"].retrieval, why["50"].generation) == (1.0, None)
    assert (why["7"].retrieval, why["7"].generation) == (None, pytest.approx(np.log(0.5)))
    assert all(one.explanation.blended == one.score for one in answer.items)
    assert all(one.freshness is not None and one.popularity is None for one in why.values())
    assert all(len(one.similar) == 3 and {s.item.item_id for s in one.similar} <= {"1", "2", "3", "4"} for one in why.values())


@pytest.mark.parametrize("strategy", ["unified", "retrieval", "generative"])
async def test_to_explain_changes_nothing_but_the_explanations(bundle, strategy):
    recommender = Recommender(bundle, Descending(bundle), Naming(bundle, 7, 49, 12), pool=20)
    plain, explained = [await recommender.recommend(request(k=5, strategy=strategy, explain=explain)) for explain in (False, True)]
    assert [(one.item, one.score, one.stage) for one in plain.items] == [(one.item, one.score, one.stage) for one in explained.items]
    assert [one.explanation for one in plain.items] == [None] * len(plain.items)
    assert all(one.explanation for one in explained.items)


async def test_a_newcomers_items_are_explained_by_their_popularity(bundle):
    answer = await Recommender(bundle, Descending(bundle), Naming(bundle)).recommend(RecommendRequest("u", k=1, explain=True))
    why = answer.items[0].explanation
    assert why.popularity == answer.items[0].score
    assert (why.retrieval, why.generation, why.blended, why.freshness, why.similar) == (None, None, None, None, ())
