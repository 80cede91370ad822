"""The generative stage on a real Ray Serve: vLLM and torch_beam behind one endpoint, streams, deadlines, and an engine that is killed."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from integrations.vllm import library
from tests.bundles import make_generative_bundle
from tests.clusters import SharedCluster, fixed
from tests.documents import ROOT
from tests.integration.conftest import PATIENT, Live, behaviours
from tests.waiting import json_of, until_right

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
HISTORY = {"behaviours": behaviours(3, 14, 15, 92, 65), "request_time": 1_700_100_000}
SETTINGS = {
    "encoder": {"order": ["torch"]},
    "generator": {
        "order": ["vllm", "torch_beam"],
        "options": {"vllm": {"dtype": "float32", "kv_cache_bytes": 32 * 2**20, "max_num_seqs": 64}, "torch_beam": {"threads": 1}},
        "breaker": {"failures_to_open": 3, "pause_s": 0.5, "growth": 1.0, "longest_pause_s": 0.5},
        "probe_interval_s": 1.0,
    },
    "gateway": PATIENT,
}


@dataclass(frozen=True)
class Generative(Live):
    """A served model with a decoder."""

    def engine(self) -> int | None:
        """vLLM's engine process of the generator's replica, None where there is none.

        Told by its title or, where setproctitle did not manage to set it, which happens, as what multiprocessing spawned.
        """
        for one in descendants(self.serving.running("generator")):
            with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
                command = Path(f"/proc/{one}/cmdline").read_bytes()
                if b"EngineCore" in command or b"multiprocessing.spawn" in command:
                    return one
        return None


def descendants(processes: set[int]) -> set[int]:
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    found = set(processes)
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


@pytest.fixture(scope="module")
def served(default: SharedCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Generative]:
    """A small decoder behind a real Serve; ready means that vLLM is loaded, where it is installed."""
    model_dir = tmp_path_factory.mktemp("generative") / "tiny"
    make_generative_bundle(model_dir)
    with default.application(fixed(), {"model_dir": str(model_dir), **SETTINGS}) as serving:
        yield Generative(serving.url, model_dir, serving)


@pytest.fixture
def with_vllm(served: Generative) -> Generative:
    if problem := library.obstacle():
        pytest.skip(problem)
    return served


def generated_by(answer: dict[str, Any]) -> str:
    return stage_of(answer, "generate")["backend"]


def stage_of(answer: dict[str, Any], name: str) -> dict[str, Any]:
    return next(stage for stage in answer["stages"] if stage["stage"] == name)


def items_of(answer: dict[str, Any]) -> list[str]:
    return [item["item_id"] for item in answer["items"]]


def test_the_answer_names_vllm_and_blends_what_was_retrieved_and_generated(with_vllm: Generative):
    answer = with_vllm.recommend(**HISTORY, k=7).json()
    assert [stage["stage"] for stage in answer["stages"]] == ["encode", "generate", "blend"]
    assert (generated_by(answer), stage_of(answer, "generate")["fallback_from"], answer["degraded"]) == ("vllm", [], False)
    assert len(answer["items"]) == 7
    assert not {"3", "14", "15", "92", "65"} & set(items_of(answer))
    assert all(item["title"] == f"Item {item['item_id']}" for item in answer["items"])


def test_all_stages_are_ready_and_listed(served: Generative):
    ready = json_of(f"{served.url}/readyz")
    assert {stage["stage"]: stage["ready"] for stage in ready["stages"]} == {"encoder": True, "generator": True, "ranker": True}
    assert served.stages().keys() == {"encoder", "generator", "ranker"}
    assert [backend["rank"] for backend in served.backends("generator").values()] == [0, 1]
    assert served.backends("generator")["torch_beam"]["available_on"] == 1


def test_vllm_and_torch_beam_give_the_same_items(with_vllm: Generative):
    users = [{**HISTORY, "behaviours": behaviours(*range(first, first + length))} for first, length in ((1, 1), (5, 4), (40, 20))]
    asked = [{**user, "strategy": "generative", "k": 10} for user in users]
    by_vllm = [with_vllm.recommend(**request).json() for request in asked]
    with with_vllm.switched("generator", vllm="disable"):
        by_torch = [with_vllm.recommend(**request).json() for request in asked]
    assert {generated_by(answer) for answer in by_vllm} == {"vllm"}
    assert {generated_by(answer) for answer in by_torch} == {"torch_beam"}
    assert not any(answer["degraded"] for answer in by_torch), "what an operator switches off is no failure"
    for one, other in zip(by_vllm, by_torch, strict=True):
        assert items_of(one) == items_of(other)
        assert [item["score"] for item in one["items"]] == pytest.approx([item["score"] for item in other["items"]], abs=1e-3)
    assert len({tuple(items_of(answer)) for answer in by_vllm}) == len(users), "the model tells users apart"


def test_each_strategy_asks_the_stages_it_needs(served: Generative):
    answers = {name: served.recommend(**HISTORY, strategy=name, k=5).json() for name in ("retrieval", "generative", "unified")}
    stages = {name: [stage["stage"] for stage in answer["stages"]] for name, answer in answers.items()}
    assert stages == {"retrieval": ["encode"], "generative": ["encode", "generate"], "unified": ["encode", "generate", "blend"]}
    assert {name: {item["stage"] for item in answer["items"]} for name, answer in answers.items()} == {
        "retrieval": {"encode"}, "generative": {"generate"}, "unified": {"blend"},
    }  # fmt: skip
    assert served.recommend(**HISTORY).json()["items"][:5] == answers["unified"]["items"]


def test_only_what_is_allowed_is_generated(served: Generative):
    answer = served.recommend(**HISTORY, strategy="generative", allowed=["7", "3", "11"], blocked=["11"]).json()
    assert items_of(answer) == ["7"]


def test_without_any_generator_the_retrieved_items_are_the_answer(served: Generative):
    retrieved = served.recommend(**HISTORY, strategy="retrieval").json()
    with served.switched("generator", vllm="disable", torch_beam="disable"):
        answer = served.recommend(**HISTORY).json()
    assert (items_of(answer), answer["degraded"]) == (items_of(retrieved), True)
    assert {skipped["reason"] for skipped in stage_of(answer, "generate")["fallback_from"]} == {"switched off by the operator"}


def test_drawn_items_come_from_torch_beam_since_vllm_declines(with_vllm: Generative):
    answer = with_vllm.recommend(**HISTORY, strategy="generative", sampling={"samples": 16, "seed": 7}).json()
    (skipped,) = stage_of(answer, "generate")["fallback_from"]
    assert (generated_by(answer), answer["degraded"]) == ("torch_beam", False)
    assert (skipped["backend"], skipped["failed"]) == ("vllm", False)
    assert "sampling" in skipped["reason"]


def test_a_deadline_that_cannot_be_met_is_answered_all_the_same_and_flagged(served: Generative):
    for _ in range(5):
        response = served.recommend(**HISTORY, deadline_ms=1)
        answer = response.json()
        assert (response.status_code, answer["degraded"], len(answer["items"])) == (200, True, 10)
        assert generated_by(answer) == "none"
    after = served.recommend(**HISTORY).json()
    assert not after["degraded"], "a caller in a hurry opens no breaker"


@pytest.mark.parametrize("accept", ["text/event-stream", "application/x-ndjson"])
def test_the_answer_streams_in_both_formats(served: Generative, accept: str):
    asked = {"user_id": "ada", **HISTORY, "strategy": "generative", "k": 10}
    plain = served.recommend(**asked).json()
    with httpx.stream("POST", f"{served.url}/v1/recommend", json=asked, headers={"accept": accept}, timeout=120) as response:
        assert (response.status_code, response.headers["content-type"].partition(";")[0]) == (200, accept)
        events = list(read_events(response, accept))
    names = [name for name, _ in events]
    assert names == ["stage", *["item"] * names.count("item"), "stage", "answer"]
    streamed = {event["item_id"] for name, event in events if name == "item"}
    answer = events[-1][1]
    assert set(items_of(answer)) <= streamed
    assert answer["items"] == [{**item, "score": pytest.approx(item["score"], abs=1e-5)} for item in plain["items"]]
    assert events[-2][1] == stage_of(answer, "generate")


def read_events(response: httpx.Response, accept: str) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in response.iter_lines():
        if accept == "application/x-ndjson":
            event = json.loads(line)
            yield event["type"], event["data"]
        elif line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line:
            yield name, json.loads(line.removeprefix("data: "))


def test_the_example_client_shows_stages_items_and_reasons(served: Generative):
    command = [sys.executable, str(ROOT / "examples" / "recommend.py"), served.url]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
    stages = [line.partition(":")[0] for line in shown.splitlines() if line.endswith(" ms")]
    assert stages == ["encode", "generate", "blend"]
    assert (shown.count("  found by encode: Item "), shown.count("   near Item ")) == (3, 3)


def test_a_stream_that_cannot_begin_is_a_problem(served: Generative):
    future = {"user_id": "ada", "behaviours": behaviours(1), "request_time": 0}
    response = httpx.post(f"{served.url}/v1/recommend", json=future, headers={"accept": "text/event-stream"}, timeout=120)
    assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")


def test_thirty_two_users_at_once_get_what_each_gets_alone(served: Generative):
    requests = [request_of(user) for user in range(32)]
    alone = [served.recommend(**request).json() for request in requests]
    together = asyncio.run(served.ask_together(requests))
    assert [r.text for r in together if r.status_code != 200] == []
    for request, expected, response in zip(requests, alone, together, strict=True):
        answer = response.json()
        assert (answer["user_id"], answer["degraded"]) == (request["user_id"], False)
        assert (items_of(answer), generated_by(answer)) == (items_of(expected), generated_by(expected))


def request_of(user: int) -> dict[str, Any]:
    rng = np.random.default_rng(user)
    items = rng.choice(np.arange(1, 201), size=int(rng.integers(1, 20)), replace=False)
    return {"user_id": f"user-{user}", "behaviours": behaviours(*items.tolist()), "request_time": 1_701_000_000, "strategy": "generative"}


def test_a_killed_engine_costs_nobody_an_answer_and_comes_back_by_itself(with_vllm: Generative):
    healthy = with_vllm.eventually(lambda answer: generated_by(answer) == "vllm", **HISTORY)
    killed, _ = until_right(lambda: (with_vllm.engine(), with_vllm.backends("generator")["vllm"]), lambda seen: seen[0])
    with with_vllm.constant_traffic(**HISTORY) as answers:
        until_right(lambda: len(answers), lambda number: number >= 5)
        os.kill(killed, signal.SIGKILL)
        answer = with_vllm.eventually(lambda answer: generated_by(answer) == "torch_beam", **HISTORY)
        (skipped,) = stage_of(answer, "generate")["fallback_from"]
        assert (answer["degraded"], skipped["backend"], skipped["failed"]) == (True, "vllm", True)
        assert items_of(answer) == items_of(healthy)
        back = with_vllm.eventually(lambda answer: generated_by(answer) == "vllm", **HISTORY)
        assert (items_of(back), back["degraded"]) == (items_of(healthy), False)
    assert {response.status_code for response in answers} == {200}
    assert {items for response in answers if (items := tuple(items_of(response.json())))} == {tuple(items_of(healthy))}
    assert until_right(with_vllm.engine, bool) != killed


@pytest.mark.chaos
def test_an_engine_that_hangs_is_found_out_and_loaded_anew(with_vllm: Generative):
    hurried = {**HISTORY, "deadline_ms": 1000}
    with_vllm.eventually(lambda answer: generated_by(answer) == "vllm", **HISTORY)
    os.kill(until_right(with_vllm.engine, bool), signal.SIGSTOP)
    with with_vllm.constant_traffic(**hurried) as answers:
        patient = {**HISTORY, "deadline_ms": 10_000}  # what torch_beam needs on a busy machine
        with_vllm.eventually(lambda answer: generated_by(answer) == "torch_beam", **patient)
    assert {response.status_code for response in answers} == {200}
    assert {generated_by(response.json()) for response in answers} <= {"none", "torch_beam"}, "nothing comes from an engine that hangs"
    assert all(response.json()["degraded"] for response in answers)
    back = with_vllm.eventually(lambda answer: generated_by(answer) == "vllm", **HISTORY)
    assert not back["degraded"]
