"""The programs of examples/ as somebody would run them: against a served model, over a file, by themselves."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.examples import EXAMPLES, example, run
from tests.integration.conftest import Live, behaviours
from tests.waiting import until_right

pytestmark = pytest.mark.cluster
NOW = 1_701_000_000


def test_every_call_of_the_curl_tour_is_answered(live: Live):
    done = until_right(lambda: tour(live.url), lambda done: not ended_by(503, done))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    answers = [json.loads(line) for line in done.stdout.splitlines() if line]
    popular, one, batch, ranked, *rest = answers
    assert [len(answer["items"]) for answer in (popular, one)] == [3, 3]
    assert "similar" in one["items"][0]["explanation"]
    assert len(batch["answers"]) == 2
    assert len(ranked["items"]) == 3
    streamed = [event["type"] for event in rest if "type" in event and "data" in event]
    assert (streamed[0], streamed[-1]) == ("stage", "answer")
    stored, again, known, history, erased, item, found, backends = rest[len(streamed) :]
    assert ([stored["stored"], again["stored"]], again["duplicates"]) == ([1, 0], 1)
    assert known["stages"][0]["stage"] == "history"
    assert (len(history["events"]), erased["events"]) == (1, 1)
    assert item["item_id"] == popular["items"][0]["item_id"]
    assert len(found["items"]) == 3
    assert {stage["stage"] for stage in backends["stages"]} == {"encoder", "generator", "ranker"}


def test_the_curl_tour_ends_at_the_first_error_and_shows_it(live: Live):
    done = tour(f"{live.url}/nowhere")
    assert ended_by(404, done)
    assert json.loads(done.stdout)["title"] == "Not found"


def tour(url: str) -> subprocess.CompletedProcess[str]:
    """The script, of a user of its own."""
    return subprocess.run(["sh", EXAMPLES / "curl.sh", url], capture_output=True, text=True, timeout=600, check=False)


def ended_by(status: int, done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the last call of the script was answered so, which ended it. 503: a part had no turn of a busy machine in time."""
    return done.returncode == 22 and json.loads(done.stdout.splitlines()[-1])["status"] == status


def test_the_python_client_asks_for_everything_both_ways(live: Live):
    shown = run(sys.executable, EXAMPLES / "client.py", live.url).splitlines()
    told = {line.partition(":")[0] for line in shown}
    assert told == {"recommend", "stream", "rank", "send_events", "history", "erase", "refused", "at once"}
    assert "at once: 8 answers" in shown
    assert [line for line in shown if line.startswith("stream")][-1] == "stream: answer"
    assert any(line.startswith("refused: k = 0: ") for line in shown)
    assert any(line.startswith("send_events: {'stored': 2, 'duplicates': 0") for line in shown)


USERS = {f"user-{number}": np.random.default_rng(number).permutation(np.arange(1, 201))[: number + 1].tolist() for number in range(12)}


def test_users_of_a_parquet_file_are_given_what_the_endpoint_gives_them(live: Live, tmp_path: Path):
    pytest.importorskip("pandas", reason="ray.data needs pandas: pip install 'ray[data]'")
    histories = {user: behaviours(*items) for user, items in USERS.items()}
    events = [{"user_id": user, **event} for user, history in histories.items() for event in history]
    np.random.default_rng(0).shuffle(events)
    pq.write_table(pa.Table.from_pylist(events), tmp_path / "events.parquet")
    expected = {user: answer_of(live, user, history) for user, history in histories.items()}
    arguments = ("--model-dir", live.model_dir, "--k", 5, "--request-time", NOW, "--partitions", 2)
    run(sys.executable, EXAMPLES / "score_parquet.py", tmp_path / "events.parquet", tmp_path / "out", *arguments, RAY_ADDRESS="local")
    scored = {row["user_id"]: row for row in pq.read_table(tmp_path / "out").to_pylist()}
    assert {user: row["item_ids"] for user, row in scored.items()} == {user: items for user, (items, _) in expected.items()}
    for user, (_, scores) in expected.items():
        assert scored[user]["scores"] == pytest.approx(scores, abs=1e-5)
        assert not scored[user]["degraded"]


def answer_of(live: Live, user: str, history: list) -> tuple[list[str], list[float]]:
    answer: httpx.Response = live.recommend(user_id=user, behaviours=history, k=5, request_time=NOW)
    items = answer.json()["items"]
    return [item["item_id"] for item in items], [item["score"] for item in items]


def test_requests_through_the_zeromq_door_are_answered_as_over_http(live: Live):
    shown = run(sys.executable, EXAMPLES / "zeromq_client.py", live.door).splitlines()
    assert [line.partition(":")[0] for line in shown] == ["recommend", "rank", "refused", "statistics"]
    assert shown[0].startswith("recommend: [200, 200, 200, 200, 200, 200, 200, 200] ['Item ")
    assert shown[2].startswith("refused: 422 k: ")

    async def ask(request: dict) -> tuple[int, dict]:
        async with example("zeromq_client").Door(live.door) as door:
            return await door.ask("POST /v1/recommend", request)

    request = {"user_id": "ada", "behaviours": behaviours(3, 7, 11), "k": 5, "request_time": NOW, "cache": "bypass"}
    status, answer = asyncio.run(ask(request))
    over_http = live.recommend(**request).json()
    assert (status, [item["item_id"] for item in answer["items"]]) == (200, [item["item_id"] for item in over_http["items"]])
    assert answer["stages"][0]["stage"] == over_http["stages"][0]["stage"] == "encode"
