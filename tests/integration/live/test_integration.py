"""The whole pipeline on a real Ray Serve: recommendations, every fallback in turn, and the way back."""

import csv
import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.clusters import SharedCluster
from tests.integration.breakable import switch
from tests.integration.conftest import Live, behaviours
from tests.waiting import json_of, until_right

pytestmark = pytest.mark.cluster
HISTORY = {"behaviours": behaviours(3, 14, 15, 92, 65), "request_time": 1_700_100_000}


def served_by(answer) -> str:
    return answer["stages"][-1]["backend"]


def reasons(answer) -> dict[str, str]:
    return {skipped["backend"]: skipped["reason"] for skipped in answer["stages"][-1]["fallback_from"]}


@contextmanager
def broken(live: Live, name: str):
    switch(live.model_dir, name).touch()
    try:
        yield
    finally:
        switch(live.model_dir, name).unlink()


@contextmanager
def away(directory: Path, elsewhere: Path):
    shutil.move(directory, elsewhere)
    try:
        yield
    finally:
        shutil.move(elsewhere, directory)


def test_recommends_titled_items_and_says_who_served(live: Live):
    response = live.recommend(**HISTORY, k=7)
    assert response.status_code == 200
    answer = response.json()
    assert len(answer["items"]) == 7
    assert all(item["title"] == f"Item {item['item_id']}" for item in answer["items"])
    assert not {"3", "14", "15", "92", "65"} & {item["item_id"] for item in answer["items"]}
    assert (served_by(answer), answer["degraded"], answer["model_version"]) == ("onnxruntime", False, "tiny-hstu/2")


def test_the_proxys_limits_hold_for_what_serve_configures(live: Live, fast: SharedCluster):
    port = fast.node.plan.node_environment(0)["RAY_SERVE_HAPROXY_STATS_PORT"]
    rows = list(csv.DictReader(httpx.get(f"http://127.0.0.1:{port}/stats;csv", timeout=120).text.removeprefix("# ").splitlines()))
    limit_of = {(row["pxname"], row["svname"].partition("-")[0]): row["slim"] for row in rows}
    assert limit_of["http_frontend", "FRONTEND"] == "4000"
    assert {limit for (_, server), limit in limit_of.items() if server == "SERVE_REPLICA_genrec"} <= {"1024"}
    assert "1024" in limit_of.values()
    assert {("genrec_callers", "BACKEND"), ("genrec_addresses", "BACKEND")} <= limit_of.keys()


def test_each_engine_in_turn_gives_way_to_the_next_and_the_first_choice_returns_by_itself(live: Live, tmp_path):
    engines = live.model_dir / "2" / "tensorrt"
    with live.constant_traffic(**HISTORY) as answers:
        healthy = live.eventually(lambda answer: served_by(answer) == "onnxruntime", **HISTORY)
        assert "NVIDIA GPU" in reasons(healthy)["tensorrt"]

        with away(engines, tmp_path / "tensorrt"):
            answer = live.eventually(lambda answer: "missing" in reasons(answer)["tensorrt"], **HISTORY)
            assert served_by(answer) == "onnxruntime"
            assert "genrec compile" in reasons(answer)["tensorrt"]
            with broken(live, "onnxruntime"):
                answer = live.eventually(lambda answer: served_by(answer) != "onnxruntime", **HISTORY)
                assert (served_by(answer), answer["degraded"]) == ("torch", True)
                assert "broke: RuntimeError" in reasons(answer)["onnxruntime"]
                assert [item["item_id"] for item in answer["items"]] == [item["item_id"] for item in healthy["items"]]
                with broken(live, "torch"):
                    answer = live.eventually(lambda answer: served_by(answer) != "torch", **HISTORY)
                    assert (served_by(answer), answer["degraded"]) == ("popularity", True)
                    assert {"tensorrt", "onnxruntime", "torch"} <= reasons(answer).keys()
                    assert "broke: RuntimeError" in reasons(answer)["torch"]
                    assert [item["item_id"] for item in answer["items"][:3]] == ["1", "2", "4"], "the most popular but those seen"
                live.eventually(lambda answer: served_by(answer) == "torch", **HISTORY)
        back = live.eventually(lambda answer: served_by(answer) == "onnxruntime" and "NVIDIA" in reasons(answer)["tensorrt"], **HISTORY)
        same = [{**item, "score": pytest.approx(item["score"], abs=1e-5)} for item in healthy["items"]]  # kept states move it by 1e-7
        assert (back["items"], back["degraded"]) == (same, False)
    assert len(answers) > 20
    assert {answer.status_code for answer in answers} == {200}


def wait_until_shown(live: Live, holds):
    """What GET /v1/backends says of onnxruntime, as soon as it is so: breakers are reported at once, counts every two seconds."""
    return until_right(lambda: live.backends()["onnxruntime"], holds)


def test_the_first_choice_returns_without_any_traffic(live: Live):
    with broken(live, "onnxruntime"):
        live.eventually(lambda answer: served_by(answer) == "torch", **HISTORY)
        wait_until_shown(live, lambda shown: shown["reasons"])
    shown = wait_until_shown(live, lambda shown: not shown["reasons"])
    assert shown["breakers"].keys() == {"closed"}
    answer = live.recommend(**HISTORY).json()
    assert (served_by(answer), answer["degraded"]) == ("onnxruntime", False)


def test_a_backend_from_outside_the_tree_serves_where_the_others_are_switched_off(live: Live):
    assert live.backends()["mean"]["import_string"] == "own_backend:MeanEncoder"
    with live.switched(mean="enable", onnxruntime="disable", torch="disable"):
        answer = live.eventually(lambda answer: served_by(answer) == "mean", **HISTORY)  # once it is loaded
        assert reasons(answer)["torch"] == "switched off by the operator"
        assert not answer["degraded"]


def test_an_operator_has_another_engine_asked_first_and_the_order_comes_back(live: Live):
    with live.switched(torch="first"):
        answer = live.recommend(**HISTORY).json()
        assert (served_by(answer), reasons(answer), answer["degraded"]) == ("torch", {}, False)
        assert live.backends()["torch"]["rank"] == 0
        with live.switched(mean="first"):
            live.eventually(lambda answer: served_by(answer) == "mean", **HISTORY)
            assert live.backends()["torch"]["rank"] > 0
    assert served_by(live.eventually(lambda answer: served_by(answer) == "onnxruntime", **HISTORY)) == "onnxruntime"


def test_the_last_fallback_takes_over_where_everything_is_switched_off(live: Live):
    with live.switched(onnxruntime="disable", torch="disable"):
        answer = live.recommend(**HISTORY).json()
        assert (served_by(answer), answer["degraded"]) == ("popularity", True)


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"colour": "blue"}, "colour"),
        ({"k": 0}, "k"),
        ({"k": 10**30}, "k"),
        ({"k": "many"}, "k"),
        ({"user_id": ""}, "user_id"),
        ({"behaviours": "none"}, "behaviours"),
        ({"behaviours": [{"item_id": "1"}]}, "behaviours[0].timestamp"),
        ({"behaviours": [{"item_id": "1", "timestamp": -5}]}, "behaviours[0].timestamp"),
        ({"behaviours": [{"item_id": "1", "timestamp": 1_700_000_000_000}]}, "behaviours[0].timestamp"),
        ({"behaviours": [{"item_id": "1", "timestamp": 5, "action": "sneeze"}]}, "behaviours[0].action"),
        ({"behaviours": behaviours(1), "request_time": 0}, "behaviours[0].timestamp"),
        ({"request_time": -1}, "request_time"),
        ({"tenant": "a b"}, "tenant"),
        ({"behaviours": behaviours(*[1] * 10_001)}, "behaviours"),
    ],
)
def test_bad_input_is_answered_422_with_the_field(live: Live, request_fields, field):
    response = live.recommend(**request_fields)
    assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")
    problem = response.json()
    assert field in [error["field"] for error in problem["errors"]], problem
    assert all(error["problem"] for error in problem["errors"])


def test_nan_and_a_million_behaviours_are_refused(live: Live):
    nan = '{"user_id": "ada", "behaviours": [{"item_id": "1", "timestamp": 5, "value": NaN}]}'
    many, million = (
        json.dumps({"user_id": "ada", "behaviours": [{"item_id": "1", "timestamp": 5}] * count}) for count in (2 * 10**4, 10**6)
    )
    for body, status in ((nan, 422), (many, 422), ("{", 422), ("", 422), (million, 413)):
        response = httpx.post(f"{live.url}/v1/recommend", content=body, headers={"content-type": "application/json"}, timeout=60)
        assert (response.status_code, response.headers["content-type"]) == (status, "application/problem+json"), response.text[:200]


@pytest.mark.parametrize(
    "request_fields",
    [
        {},
        {"behaviours": []},
        {"behaviours": behaviours(999_999)},
        {"behaviours": behaviours(1, 999_999, 2)},
        {"behaviours": behaviours(*[7] * 500)},
        {"behaviours": behaviours(1), "allowed": []},
        {"behaviours": behaviours(1), "allowed": ["no such item"], "blocked": ["no such item"]},
        {"behaviours": behaviours(1), "k": 1000},
    ],
)
def test_unusual_input_gets_a_sensible_answer(live: Live, request_fields):
    response = live.recommend(**request_fields)
    assert response.status_code == 200, response.text
    assert not response.json()["degraded"]


def test_the_interface_documents_itself_with_examples(live: Live):
    schema = httpx.get(f"{live.url}/openapi.json", timeout=120).json()
    wanted = {"/v1/recommend", "/v1/recommend:batch", "/v1/backends", "/healthz", "/readyz"}
    assert wanted <= schema["paths"].keys()
    example = schema["components"]["schemas"]["RecommendIn"]["examples"][0]
    assert live.recommend(**{**example, "user_id": "an example from the documentation"}).status_code == 200
    assert "swagger" in httpx.get(f"{live.url}/docs", timeout=120).text.lower()
    assert httpx.get(f"{live.url}/healthz", timeout=120).json() == {"status": "ok"}
    assert json_of(f"{live.url}/readyz")["ready"] is True
    assert httpx.get(f"{live.url}/v1/items/17", timeout=120).json()["title"] == "Item 17"
    assert httpx.get(f"{live.url}/v1/items/none", timeout=120).status_code == 404


def test_a_model_without_a_decoder_says_so_and_is_ready(live: Live):
    reasons = {name: backend["reasons"] for name, backend in live.backends("generator").items()}
    assert all("no decoder" in reason for (reason,) in reasons.values()), reasons
    assert json_of(f"{live.url}/readyz")["ready"]
