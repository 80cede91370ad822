"""More requests than can be served. The engine takes a known time for each, as an accelerator would, so that the processor, which the load
shares with the server, is not what is short.
"""

import time
from collections.abc import Iterator

import pytest

from benchmarks.load import BoolArray, Phase, Results
from tests.chaos.engines import counted
from tests.chaos.rows import Row
from tests.chaos.served import Served, served
from tests.clusters import SharedCluster

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]  # in short: tests/unit/test_edge.py
REQUEST_S = 0.04
PACED = {
    "encoder": {
        "order": ["paced"],
        "backends": {"paced": "tests.chaos.engines:Paced"},
        "options": {"paced": {"request_s": REQUEST_S}},
    },
    "generator": {"order": ["torch_beam"]},
}
TIMES = 10
RECOVERED_WITHIN_S = 5.0
BODY = {"strategy": "retrieval", "cache": "bypass"}


@pytest.fixture(scope="module")
def paced(model, cluster: SharedCluster, tmp_path_factory) -> Iterator[Served]:
    with served(cluster, tmp_path_factory.mktemp("paced"), model.path.parent, PACED, body=BODY) as serving:
        yield serving


def test_ten_times_the_load_is_answered_at_capacity_and_the_rest_is_told_to_come_back(
    paced: Served, record, long: bool, run: int, deadline_s: float
):
    seconds = 60.0 if long else 15.0
    capacity = paced.capacity(clients=32)
    must = (
        "goodput >= 95 % of capacity; accepted p99 <= the deadline; the rest 503/429 + Retry-After with p99 <= 50 ms; normal <= 5 s after"
    )
    with record(Row(f"{TIMES}x overload for 60 s", must, run)) as row:
        phases = [Phase("before", 0.5 * capacity, 5), Phase("overload", TIMES * capacity, seconds), Phase("after", 0.5 * capacity, 15)]
        computed = counted(paced.model_dir, "paced")
        with paced.load(*phases, timeout_s=40) as load:
            row.mark(5, f"{TIMES}x")
            row.mark(5 + seconds, "0.5x")
            results = load.results()
        during, after = results.phase("overload"), results.phase("after")
        steady = during.between(5 + 2, 5 + seconds)  # less the time in which queues fill
        rejected = during.where(during.rejected)
        good = steady.where(whole(steady))
        row.took(results, capacity_per_s=capacity, overload=during.summary(), stages=during.named("stages"))
        row.figures["requests the engine computed, whole answers"] = (
            counted(paced.model_dir, "paced") - computed,
            len(results.where(whole(results))),
        )
        row.figures["p50 of the rejected, ms"] = rejected.percentile_of_all(50)
        row.claim("neither answered nor told to come back", during.failed.sum(), most=0)
        row.claim("whole answers a second / capacity", len(good) / steady.span / capacity, least=0.95, timing=True)
        row.claim("p99 of the accepted, s", during.percentile(99) / 1e3, most=deadline_s)
        row.claim("share rejected", len(rejected) / len(during), least=0.5)
        row.claim("p99 of the rejected, ms", rejected.percentile_of_all(99), most=50, timing=True)
        late = after.where(~whole(after) | (after.latency > 1.0))
        recovered = float(late.due.max()) - 5 - seconds if len(late) else 0.0
        row.claim("seconds until all was as before", recovered, most=RECOVERED_WITHIN_S, timing=True)


def whole(results: Results) -> BoolArray:
    return results.ok & ~results.degraded


def test_clients_that_try_again_and_replicas_that_die_do_not_multiply_the_work(
    model, cluster: SharedCluster, record, long: bool, run: int, tmp_path
):
    """One of two encoders dies again and again under its requests, every client tries once more: what the engines are asked, beside
    what was answered. The other one stays, or nothing would be left to try again on."""
    seconds = 30.0 if long else 20.0
    with (
        record(Row("retry storm", "amplification <= 1.2x (retry budget 20 %)", run)) as row,
        served(cluster, tmp_path, model.path.parent, PACED, replicas={"encoder": 2}, body=BODY) as serving,
    ):
        capacity = serving.capacity(clients=32)
        before = counted(serving.model_dir, "paced")
        with serving.load(Phase("storm", 0.7 * capacity, seconds), retries=1, retry_pause_s=0.0) as load:
            while load.now < seconds:
                time.sleep(1.0)
                able = serving.running("encoder")
                if victims := [one for one in serving.replicas("encoder") if one.pid in able][1:]:
                    row.mark(load.now, "kill -9 an encoder")
                    victims[0].kill()
            results = load.results()
        asked = counted(serving.model_dir, "paced") - before
        row.took(results, engine_requests=asked, capacity_per_s=capacity)
        row.claim("requests the engines were asked / requests answered", asked / max(1, results.ok.sum()), most=1.2)
        row.claim("requests the engines were asked", asked, least=1)
        row.claim("encoders killed", len(row.marks), least=2)
        row.claim("failed requests after one client retry", results.failed.sum(), most=0)
