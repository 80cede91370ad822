"""Ranking given candidates, and the ranker as the last stage of a recommendation, with each stage played by an object the test controls."""

import numpy as np
import pytest

from cluster.config import Settings
from cluster.engines.skipped import NoBackendAnswered
from cluster.errors import BackendFailed, InvalidRequest
from cluster.ranking import RankingRequest, Task
from cluster.values import Behaviour, RecommendRequest, SkippedBackend
from deployments.replicas.ranker import RankerModel
from pipelines.rank import CandidateRanker
from pipelines.recommend import Recommender
from pipelines.scoring import combined
from pipelines.stored_history import StoredHistories
from tests.bundles import make_bundle
from tests.fakes.played_stages import RANKER, Ascending, Descending, Naming, bundle_with_ranker
from tests.unit.test_strategies import ids, served

BROKEN = SkippedBackend("torch", "made to fail", failed=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return bundle_with_ranker(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def last(tmp_path_factory):
    """Whose ranker is the last stage of every recommendation, and which has a decoder."""
    return bundle_with_ranker(tmp_path_factory.mktemp("models") / "tiny", last_stage=True, decoder=True)


def ranker_of(bundle, rank, encode=None, **more):
    encode = encode or Descending(bundle)
    return CandidateRanker(bundle, StoredHistories(None, 100), encode, rank, **{"deadline_s": 5.0, "ranking_deadline_s": 2.0, **more})


def asked(*candidates, **more):
    return RankingRequest("u", candidates, **{"behaviours": (Behaviour("1", 1000), Behaviour("2", 1001)), **more})


async def test_orders_the_candidates_and_says_what_is_predicted_of_each(bundle):
    answer = await ranker_of(bundle, Ascending(bundle)).rank(asked("30", "1", "7"))
    assert ids(answer) == ["1", "7", "30"]
    assert answer.items[0].predictions == pytest.approx({"click": 0.98, "rating": 1.0, "purchase": 0.02})
    assert answer.items[0].score == pytest.approx(0.98)
    assert served(answer) == [("rank", "ascending")]
    assert (answer.degraded, answer.model_version, answer.unknown_items) == (False, bundle.version, ())


async def test_predictions_go_by_the_names_of_tasks(bundle):
    answer = await ranker_of(bundle, Ascending(bundle)).rank(asked("30", "1"))
    assert {type(task) for item in answer.items for task in item.predictions} == {str}


async def test_the_ranker_is_asked_about_the_user_and_items_of_the_history_are_candidates_too(bundle):
    stage = Ascending(bundle)
    await ranker_of(bundle, stage).rank(asked("2", "40", tenant="shop", request_time=5000))
    (got,) = stage.asked
    assert (got.sequence.items.tolist(), got.sequence.request_time, got.candidates.tolist()) == ([1, 2], 5000, [2, 40])
    assert (got.user_id, got.tenant, got.model_version) == ("u", "shop", bundle.identity)


async def test_unknown_candidates_are_named_and_those_given_twice_ranked_once(bundle):
    answer = await ranker_of(bundle, Ascending(bundle)).rank(asked("30", "nonsense", "30", "7"))
    assert ids(answer) == ["7", "30"]
    assert answer.unknown_items == ("nonsense",)


@pytest.mark.parametrize(
    ("weights", "order"),
    [
        ({Task.CLICK: 1.0}, ["7", "8", "30"]),
        ({Task.RATING: 1.0}, ["8", "30", "7"]),  # 7 has the lowest rating: worth nothing
        ({Task.PURCHASE: 1.0}, ["30", "8", "7"]),
        ({Task.CLICK: 1.0, Task.PURCHASE: 0.0}, ["7", "8", "30"]),
        ({Task.CLICK: 1.0, Task.RATING: 2.0}, ["8", "30", "7"]),
    ],
)
async def test_the_weights_say_what_counts(bundle, weights, order):
    assert ids(await ranker_of(bundle, Ascending(bundle)).rank(asked("7", "8", "30", weights=weights))) == order


def test_the_score_is_what_showing_the_item_is_worth():
    predictions = np.array([[0.5, 3.0, 0.1], [0.25, 5.0, 0.8]], np.float32)
    np.testing.assert_allclose(combined(predictions, RANKER, {Task.CLICK: 1, Task.RATING: 0.5, Task.PURCHASE: 2}), [0.725, 0.775])
    np.testing.assert_allclose(combined(predictions, RANKER, {Task.PURCHASE: 1}), [0.05, 0.2])


@pytest.mark.parametrize(
    ("weights", "field"), [({Task.CART: 1.0}, "weights.cart"), ({Task.CLICK: 0.0}, "weights"), ({}, "weights")], ids=str
)
async def test_weights_that_mean_nothing_are_refused(bundle, weights, field):
    with pytest.raises(InvalidRequest) as refused:
        await ranker_of(bundle, Ascending(bundle)).rank(asked("1", weights=weights))
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("stage", "within_s", "reason"),
    [
        ({"error": NoBackendAnswered("ranker", (BROKEN,))}, 60, "made to fail"),
        ({"error": BackendFailed("it broke")}, 60, "it broke"),
        ({"version": "tiny/9"}, 60, "tiny/9"),
        ({"delay": 0.2}, 0.05, "50 ms"),
    ],
    ids=["nobody", "broken", "another version", "late"],
)
async def test_the_encoder_orders_the_candidates_where_no_ranker_answers(bundle, stage, within_s, reason):
    answer = await ranker_of(bundle, Ascending(bundle, **stage), ranking_deadline_s=within_s).rank(asked("30", "1", "7"))
    assert ids(answer) == ["30", "7", "1"]
    assert served(answer) == [("rank", "none"), ("encode", "descending")]
    assert reason in answer.stages[0].fallback_from[0].reason
    assert answer.degraded
    assert answer.items[0].predictions == {}


async def test_popularity_orders_them_where_the_encoder_does_not_either(bundle):
    encode = Descending(bundle, error=BackendFailed("gone"))
    answer = await ranker_of(bundle, Ascending(bundle, error=BackendFailed("gone")), encode).rank(asked("30", "1", "7"))
    assert ids(answer) == ["1", "7", "30"]
    assert served(answer) == [("rank", "none"), ("popularity", "popularity")]


async def test_a_model_without_a_ranker_is_ranked_by_its_encoder_and_is_not_degraded(tmp_path):
    plain = make_bundle(tmp_path / "plain", items=50)
    answer = await ranker_of(plain, Ascending(plain)).rank(asked("30", "1", "7", weights={Task.LIKE: 1.0}))
    assert ids(answer) == ["30", "7", "1"]
    assert "no ranker" in answer.stages[0].fallback_from[0].reason
    assert not answer.degraded


async def test_the_ranker_orders_the_best_of_a_recommendation_where_it_is_asked_to(bundle):
    recommender = Recommender(bundle, Descending(bundle), rank=Ascending(bundle), rank_pool=10)
    request = RecommendRequest("u", (Behaviour("1", 1000),), k=3, rank=True)
    answer = await recommender.recommend(request)
    assert ids(answer) == ["41", "42", "43"]  # of the best ten, which are 50 to 41
    assert served(answer) == [("encode", "descending"), ("rank", "ascending")]
    assert {one.stage for one in answer.items} == {"rank"}
    assert ids(await recommender.recommend(RecommendRequest("u", (Behaviour("1", 1000),), k=3))) == ["50", "49", "48"]


async def test_it_does_so_by_itself_where_training_found_that_better(last):
    recommender = Recommender(last, Descending(last), Naming(last, 7, 49), rank=Ascending(last), rank_pool=10)
    answer = await recommender.recommend(RecommendRequest("u", (Behaviour("1", 1000),), k=3))
    assert [stage for stage, _ in served(answer)] == ["encode", "generate", "blend", "rank"]
    assert "rank" not in [stage for stage, _ in served(await recommender.recommend(RecommendRequest("u", k=3, behaviours=(), rank=False)))]


@pytest.mark.parametrize(
    ("asks", "width"),
    [
        ({"strategy": "generative", "rank": True}, 30),
        ({"strategy": "generative", "rank": True, "k": 40}, 40),
        ({"strategy": "generative", "rank": False}, 20),
        ({"strategy": "unified", "rank": True}, 20),
    ],
)
async def test_where_the_ranker_orders_generated_items_alone_there_are_as_many_as_its_pool(last, asks, width):
    generator = Naming(last, *range(3, 51))
    recommender = Recommender(last, Descending(last), generator, generator.stream, rank=Ascending(last), beam=20, rank_pool=30)
    request = RecommendRequest("u", (Behaviour("1", 1000),), **{"k": 3, **asks})
    await recommender.recommend(request)
    async for _ in recommender.stream(request):
        pass
    assert [(one.k, one.beam) for one in generator.asked] == [(width, width)] * 2


async def test_an_answer_longer_than_the_pool_is_ranked_whole(bundle):
    recommender = Recommender(bundle, Descending(bundle), rank=Ascending(bundle), rank_pool=5)
    answer = await recommender.recommend(RecommendRequest("u", (Behaviour("1", 1000),), k=20, rank=True))
    assert ids(answer) == [str(item) for item in range(31, 51)]


async def test_what_was_found_stays_in_its_order_where_no_ranker_answers(last):
    recommender = Recommender(last, Descending(last), Naming(last, 7, 49), rank=Ascending(last, error=BackendFailed("it broke")))
    answer = await recommender.recommend(RecommendRequest("u", (Behaviour("1", 1000),), k=3))
    without = await recommender.recommend(RecommendRequest("u", (Behaviour("1", 1000),), k=3, rank=False))
    assert ids(answer) == ids(without)
    assert served(answer)[-1] == ("rank", "none")
    assert (answer.degraded, without.degraded) == (True, False)


async def test_a_recommendation_explains_its_ranking(bundle):
    recommender = Recommender(bundle, Descending(bundle), rank=Ascending(bundle), rank_pool=10)
    answer = await recommender.recommend(RecommendRequest("u", (Behaviour("1", 1000),), k=2, rank=True, explain=True))
    explained = answer.items[0].explanation
    assert (explained.ranking, explained.retrieval) == (pytest.approx(1 - 41 / 50), pytest.approx(41 / 50))


async def test_asking_for_a_ranker_that_the_model_lacks_is_refused(tmp_path):
    plain = make_bundle(tmp_path / "plain", items=50)
    with pytest.raises(InvalidRequest, match="needs a ranker"):
        await Recommender(plain, Descending(plain), rank=Ascending(plain)).recommend(RecommendRequest("u", behaviours=(), rank=True))


async def test_the_deadline_of_the_whole_answer_leaves_the_ranker_what_is_left(bundle):
    stage = Ascending(bundle)
    await ranker_of(bundle, stage).rank(asked("1", deadline_ms=300.0))
    assert 0 < stage.seconds[0] <= 0.3


async def test_a_ranker_that_leaves_out_a_task_is_passed_over(bundle):
    settings = Settings.model_validate({"ranker": {"backends": {"own": "tests.broken_backends:ForgetsATask"}, "order": ["own"]}})
    model = RankerModel(settings, bundle)

    async def rank(request, within_s):
        return model.answer_of(await model.submit(request))

    answer = await ranker_of(bundle, rank).rank(asked("30", "1", "7"))
    assert (ids(answer), answer.degraded) == (["30", "7", "1"], True)
    assert "predicts 2 things of a candidate; the model's record names 3" in answer.stages[0].fallback_from[0].reason
    model.controller.close()
