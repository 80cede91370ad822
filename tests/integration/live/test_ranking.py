"""Given candidates in a user's order, on a real Ray Serve; and the ranker as the last stage of a recommendation."""

import httpx
import pytest

from tests.integration.conftest import Live, behaviours, everywhere
from tests.integration.live.test_state import tell, user  # noqa: F401 - the fixture
from tests.waiting import until_right

pytestmark = pytest.mark.cluster
CANDIDATES = [str(item) for item in range(1, 101)]


def rank(live: Live, **message) -> httpx.Response:
    return httpx.post(f"{live.url}/v1/rank", json={"user_id": "ada", "candidates": CANDIDATES, **message}, timeout=120)


def served(answer) -> list[tuple[str, str]]:
    return [(stage["stage"], stage["backend"]) for stage in answer["stages"]]


def test_candidates_are_ranked_with_titles_and_predictions(live: Live):
    answer = rank(live, behaviours=behaviours(3, 14, 15)).json()
    assert served(answer) == [("rank", "onnxruntime")]
    assert sorted(item["item_id"] for item in answer["items"]) == sorted(CANDIDATES)
    scores = [item["score"] for item in answer["items"]]
    assert scores == sorted(scores, reverse=True)
    assert answer["items"][0]["predictions"].keys() == {"click", "rating", "purchase"}
    assert answer["items"][0]["title"] == f"Item {answer['items'][0]['item_id']}"
    assert (answer["degraded"], answer["model_version"]) == (False, "tiny-hstu/2")


def test_every_engine_ranks_alike_and_the_encoder_where_there_is_none(live: Live):
    message = {"behaviours": behaviours(3, 14, 15), "request_time": 1_700_100_000}
    first = rank(live, **message).json()
    with live.switched("ranker", onnxruntime="disable"):
        second = rank(live, **message).json()
        assert served(second) == [("rank", "torch")]
        assert [item["item_id"] for item in second["items"]] == [item["item_id"] for item in first["items"]]
        with live.switched("ranker", torch="disable"):
            third = rank(live, **message).json()
            assert served(third) == [("rank", "none"), ("encode", "onnxruntime")]
            assert "switched off" in str(third["stages"][0]["fallback_from"])
            assert len(third["items"]) == len(CANDIDATES)
    # it is loaded beside the calls, and comes back when it is
    until_right(lambda: rank(live, **message).json(), lambda back: served(back) == [("rank", "onnxruntime")])


def test_what_is_stored_of_the_user_counts_and_is_forgotten_when_they_are_erased(live: Live, user):  # noqa: F811
    newcomer = rank(live, user_id=user).json()
    tell(live, user, *range(20, 60))
    known = rank(live, user_id=user).json()
    assert served(known)[0][0] == "history"
    assert [one["score"] for one in known["items"]] != [one["score"] for one in newcomer["items"]]
    everywhere(lambda: httpx.delete(f"{live.url}/v1/users/{user}/history", timeout=120))
    again = rank(live, user_id=user).json()
    assert [one["item_id"] for one in again["items"]] == [one["item_id"] for one in newcomer["items"]]


def test_the_ranker_is_the_last_stage_of_a_recommendation_that_asks_for_it(live: Live):
    ranked = live.recommend(behaviours=behaviours(3, 14, 15), rank=True, k=5).json()
    assert [stage for stage, _ in served(ranked)] == ["encode", "rank"]
    assert {item["stage"] for item in ranked["items"]} == {"rank"}
    assert [stage for stage, _ in served(live.recommend(behaviours=behaviours(3, 14, 15), k=5).json())] == ["encode"]


def test_more_candidates_than_are_taken_are_refused(live: Live):
    response = rank(live, candidates=["1"] * 2049)
    assert response.status_code == 422
    assert "2048" in response.text
