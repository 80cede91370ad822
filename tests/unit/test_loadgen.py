"""LoadGen before the endpoint: what its summary says, which rates are tried, and that it hears of every sample."""

import re
import sys
import threading
from collections import Counter
from types import SimpleNamespace

import pytest

from benchmarks import loadgen
from benchmarks.load import NO_ANSWER
from benchmarks.loadgen import DEGRADED, TOO_SHORT, Endpoint, Found, NoLoadGen, Summary, Trial, library, long_enough, report, trial
from benchmarks.reporting import Machine
from benchmarks.serving import largest
from tests.ports import free_port
from tests.unit.test_load import http, server
from tests.waiting import eventually

SERVER = """
================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Server
Mode     : PerformanceOnly
Completed samples per second    : 811.53
Result is : INVALID
  Performance constraints satisfied : NO
  Min duration satisfied : Yes
  Min queries satisfied : Yes
  Early stopping satisfied: NO
Recommendations:
 * Reduce target QPS to improve latency.

================================================
Additional Stats
================================================
Scheduled samples per second : 820.11
50.00 percentile latency (ns)   : 4200000
99.00 percentile latency (ns)   : 131500000
99.90 percentile latency (ns)   : 200000000

================================================
Test Parameters Used
================================================
samples_per_query : 1
target_qps : 820
"""
OFFLINE = "Scenario : Offline\nSamples per second: 1040.25\nResult is : VALID\n  Min duration satisfied : Yes\n"


def test_a_summary_tells_the_verdict_and_what_was_not_met():
    said = Summary.parse(SERVER)
    assert (said.valid, said.unmet, said.per_s) == (False, ("Performance constraints", "Early stopping"), 811.53)
    assert said.percentiles_ms == {50.0: 4.2, 99.0: 131.5, 99.9: 200.0}
    assert Summary.parse(OFFLINE) == Summary(True, (), 1040.25, {})


def test_a_summary_without_a_result_is_shown():
    with pytest.raises(ValueError, match=r"no result.*ended early"):
        Summary.parse("the test ended early")


@pytest.mark.parametrize(("bound", "found"), [(900, 890.625), (100, 93.75), (2000, 984.375), (1, 0)])
def test_rates_are_halved_towards_the_largest_that_holds(bound, found):
    tried = []

    def holds(rate):
        tried.append(rate)
        return rate <= bound

    assert largest(holds, 1000, 6) == found
    assert (len(tried), tried[0]) == (6, 500)


def test_a_run_is_valid_where_every_sample_was_answered_whole():
    said = Summary.parse(OFFLINE)
    assert Trial(1, said, {200: 5}).valid
    short = Trial(1, said, {200: 5, 503: 2, DEGRADED: 1})
    assert not short.valid
    assert short.verdict() == "VALID (2 answered 503; 1 degraded)"
    assert Trial(1, Summary.parse(SERVER), {200: 5}).verdict() == "INVALID (not met: Performance constraints, Early stopping)"


def test_offline_is_run_again_with_more_samples_where_they_were_too_few_for_its_duration():
    asked, short = [], Summary(False, (TOO_SHORT,), 200.0, {})
    long_enough(lambda rate: asked.append(rate) or Trial(rate, short if len(asked) < 2 else Summary.parse(OFFLINE), {200: 1}), 100.0)
    assert asked == [120.0, 240.0]
    asked.clear()
    assert long_enough(lambda rate: asked.append(rate) or Trial(rate, short, {200: 1}), 100.0).said == short
    assert len(asked) == 3


def test_where_loadgen_is_not_installed_it_is_said_how_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mlperf_loadgen", None)
    with pytest.raises(NoLoadGen, match="pip install mlcommons-loadgen"):
        library()
    with pytest.raises(SystemExit, match="pip install mlcommons-loadgen"):
        loadgen.main(model_dir=tmp_path)


def ended(url: str, samples: int, **options) -> tuple[list[int], Counter]:
    """The ids of samples in the order in which they ended, and what they came to."""
    done, lock = [], threading.Lock()

    def complete(ids: list[int]) -> None:
        with lock:
            done.extend(ids)

    with Endpoint(url, ['{"user_id": "a"}', '{"user_id": "b"}'], complete, **options) as endpoint:
        endpoint.issue([SimpleNamespace(id=100 + number, index=number % 2) for number in range(samples)])
        eventually(lambda: len(done) == samples, "every sample has ended")
        return done, endpoint.came_to


def test_every_sample_ends_whatever_becomes_of_its_request():
    answers = http("200 OK"), http("503 Busy"), http("200 OK", b'{"degraded":true}'), http("200 OK")
    with server(*answers) as url:
        done, came_to = ended(url, 7, open_at_most=1)
    assert done == list(range(100, 107))
    assert came_to == {200: 5, 503: 1, DEGRADED: 1}
    assert ended(f"http://127.0.0.1:{free_port()}", 2)[1] == {NO_ANSWER: 2}


def test_a_batch_carries_several_samples_and_ends_them_together():
    with server(http("503 Busy"), http("200 OK")) as url:
        done, came_to = ended(url, 10, size=4, open_at_most=1)
    assert done == list(range(100, 110))
    assert came_to == {503: 4, 200: 6}


def test_the_page_says_that_it_is_no_official_result_and_shows_every_run():
    said, offline = Summary.parse(SERVER), Summary.parse(OFFLINE)
    found = Found({size: Trial(1500, offline, {200: 9}) for size in loadgen.OPEN}, [Trial(820, said, {200: 9})], 0.0)
    machine = Machine("2026-01-01", "a processor", 2, 0.1, 0.2, {"Python": "3"}, "python -m benchmarks.loadgen")
    page = report({"retrieval": found}, machine, placement="colocated", seconds=30, bound_ms=100, kept=True)
    assert re.search(r"No official MLPerf result: each run takes 30 s at least where MLPerf asks for 600", page)
    assert "| retrieval | 1040.2 | 1040.2 | none |" in page
    assert "| Server | single requests | 820.0 | 811.5 | 4.2 | 131.5 | INVALID (not met: Performance constraints, Early stopping) |" in page
    assert "`python -m benchmarks.loadgen`" in page


@pytest.mark.parametrize(("scenario", "size"), [("Server", 1), ("Offline", 1), ("Offline", 32)])
def test_loadgen_itself_runs_over_an_endpoint(scenario, size):
    pytest.importorskip("mlperf_loadgen", reason="LoadGen is not installed; run: pip install mlcommons-loadgen")
    with server(http("200 OK")) as url:
        found = trial(url, ["{}"] * 8, scenario, 100.0, seconds=0.5, bound_ms=60_000, size=size)
    assert found.came_to.keys() == {200}
    assert found.came_to[200] >= 50
    assert found.said.per_s > 0
