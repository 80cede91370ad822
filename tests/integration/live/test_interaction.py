"""Many users at once through the endpoint: each gets their own answer, whoever stands beside them in a batch or breaks meanwhile."""

import asyncio

import httpx
import numpy as np
import pytest

from tests.integration.breakable import POISON
from tests.integration.conftest import Live, behaviours

pytestmark = pytest.mark.cluster
USERS = 60


def request_of(user: int) -> dict:
    """A history of a length and with items of its own."""
    rng = np.random.default_rng(user)
    items = rng.choice(np.arange(1, 201), size=int(rng.integers(1, 40)), replace=False)
    return {"user_id": f"user-{user}", "behaviours": behaviours(*items.tolist()), "request_time": 1_701_000_000, "k": 10, "cache": "bypass"}


def items_of(answer) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


def ask_alone(live: Live, requests: list[dict]) -> list[dict]:
    return [live.recommend(**request).json() for request in requests]


def test_concurrent_users_get_what_each_gets_alone(live: Live):
    requests = [request_of(user) for user in range(USERS)]
    alone = ask_alone(live, requests)
    together = asyncio.run(live.ask_together(requests))
    assert [r.text for r in together if r.status_code != 200] == []
    for request, expected, response in zip(requests, alone, together, strict=True):
        answer = response.json()
        assert answer["user_id"] == request["user_id"]
        assert items_of(answer) == items_of(expected)
        assert [i["score"] for i in answer["items"]] == pytest.approx([i["score"] for i in expected["items"]], abs=1e-5)
    assert len({tuple(items_of(answer)) for answer in alone}) > USERS / 2, "the model tells users apart"


def test_a_batch_answers_in_order_what_single_calls_answer(live: Live):
    requests = [request_of(user) for user in range(20)]
    response = httpx.post(f"{live.url}/v1/recommend:batch", json={"requests": requests}, timeout=300)
    answers = response.json()["answers"]
    assert [answer["user_id"] for answer in answers] == [request["user_id"] for request in requests]
    assert [items_of(answer) for answer in answers] == [items_of(answer) for answer in ask_alone(live, requests)]


def test_a_bad_request_fails_alone_among_good_ones(live: Live):
    requests = [request_of(user) for user in range(USERS)]
    for user in range(0, USERS, 7):
        requests[user] = {**requests[user], "k": -user - 1}
    statuses = [response.status_code for response in asyncio.run(live.ask_together(requests))]
    assert statuses == [422 if user % 7 == 0 else 200 for user in range(USERS)]


def test_a_request_that_breaks_an_engine_never_fails_those_beside_it(live: Live):
    requests = [request_of(user) for user in range(USERS)]
    poisoned = {user: {**requests[user], "behaviours": behaviours(1, 2, start=POISON)} for user in (5, 31)}
    responses = asyncio.run(live.ask_together([poisoned.get(user, request) for user, request in enumerate(requests)]))
    assert [r.text for r in responses if r.status_code != 200] == []
    served = {user: response.json()["stages"][-1] for user, response in enumerate(responses)}
    assert {served[user]["backend"] for user in poisoned} == {"torch"}
    assert all(served[user]["fallback_from"][-1]["reason"] == "broke: RuntimeError" for user in poisoned)
    assert {user: stage for user, stage in served.items() if stage["backend"] != "onnxruntime" and user not in poisoned} == {}


def test_all_engines_that_run_here_recommend_the_same(live: Live):
    requests = [request_of(user) for user in range(USERS)]
    with_onnxruntime = ask_alone(live, requests)
    with live.switched(onnxruntime="disable"):
        with_torch = ask_alone(live, requests)
    assert {answer["stages"][-1]["backend"] for answer in with_onnxruntime} == {"onnxruntime"}
    assert {answer["stages"][-1]["backend"] for answer in with_torch} == {"torch"}
    assert [items_of(answer) for answer in with_onnxruntime] == [items_of(answer) for answer in with_torch]


def test_switching_an_engine_off_and_on_under_load_loses_no_request(live: Live):
    async def load_and_switch():
        requests = [request_of(user) for user in range(USERS)] * 5
        load = asyncio.create_task(live.ask_together(requests))
        for to in ("disable", "enable", "disable", "enable"):
            await asyncio.to_thread(live.switch, "onnxruntime", to)
        return await load

    with live.switched(onnxruntime="enable"):  # whatever happens: the other tests here expect its answers
        responses = asyncio.run(load_and_switch())
    assert [r.text for r in responses if r.status_code != 200] == []
    assert {response.json()["stages"][-1]["backend"] for response in responses} <= {"onnxruntime", "torch"}


def test_what_was_served_is_counted_for_each_engine(live: Live):
    before = live.backends()["onnxruntime"]["calls"]
    asyncio.run(live.ask_together([request_of(user) for user in range(25)]))
    live.eventually(lambda _: live.backends()["onnxruntime"]["calls"] >= before + 25)
    shown = live.backends()["onnxruntime"]
    assert 0 < shown["p50_ms"] <= shown["p95_ms"] <= shown["p99_ms"]
    assert shown["breakers"] == {"closed": shown["replicas"]}
