"""The line for what took long: whose stages, how many a second, and nothing of users."""

import logging

import pytest
from msgspec.structs import replace

from cluster.few_lines import MOST_PER_S
from cluster.values import CacheReport, Recommendation, SkippedBackend, StageReport
from deployments.telemetry.logs import PACKAGES, SlowAnswers, join_serves_log, logger

STAGES = (
    StageReport("encode", "torch", 6.25, (SkippedBackend("onnxruntime", "boom", failed=True),)),
    StageReport("blend", "log-linear", 0.5),
)
ANSWER = Recommendation(user_id="ada", items=(), stages=STAGES, model_version="m/1", degraded=True)


@pytest.fixture
def lines(caplog, monkeypatch):
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.WARNING, logger.name):
        yield caplog


def test_a_line_says_who_served_which_stage_in_what_time_and_names_no_user(lines):
    SlowAnswers().note(ANSWER, 1.5, slow_ms=1000)
    (line,) = lines.records
    assert line.getMessage() == "an answer took 1500 ms: encode by torch in 6.2 ms, not onnxruntime, blend by log-linear in 0.5 ms"
    assert (line.duration_ms, line.degraded, line.model_version) == (1500.0, True, "m/1")
    assert "ada" not in str(vars(line))


@pytest.mark.parametrize("tier", ["l1", "l2"])
def test_an_answer_that_had_been_kept_is_told_with_its_tier_and_without_the_time_of_its_computation(lines, tier):
    SlowAnswers().note(replace(ANSWER, cache=CacheReport(tier, age_s=60.0)), 1.5, slow_ms=1000)
    (line,) = lines.records
    assert line.getMessage() == f"an answer ({tier}) took 1500 ms: encode by torch, not onnxruntime, blend by log-linear"
    assert (line.tier, line.stages) == (tier, ["encode by torch, not onnxruntime", "blend by log-linear"])


def test_an_answer_that_waited_for_another_requests_computation_is_told_as_joined_with_the_time_of_each_stage(lines):
    SlowAnswers().note(replace(ANSWER, cache=CacheReport("joined")), 1.5, slow_ms=1000)
    (line,) = lines.records
    assert line.getMessage() == "an answer (joined) took 1500 ms: encode by torch in 6.2 ms, not onnxruntime, blend by log-linear in 0.5 ms"
    assert line.tier == "joined"


def test_an_answer_that_was_computed_for_its_request_has_the_time_of_each_stage(lines):
    for cache in (CacheReport("computed"), None):
        SlowAnswers().note(replace(ANSWER, cache=cache), 1.5, slow_ms=1000)
    assert [line.tier for line in lines.records] == ["computed", "none"]
    assert all("blend by log-linear in 0.5 ms" in line.getMessage() for line in lines.records)


def test_what_is_quick_enough_or_not_asked_for_is_not_told(lines):
    SlowAnswers().note(ANSWER, 0.999, slow_ms=1000)
    SlowAnswers().note(ANSWER, 60.0, slow_ms=None)
    assert not lines.records


def test_of_more_than_ten_a_second_the_others_are_counted(lines):
    now = 100.0
    slow = SlowAnswers(clock=lambda: now)
    for _ in range(MOST_PER_S + 3):
        slow.note(ANSWER, 2.0, slow_ms=1000)
    assert len(lines.records) == MOST_PER_S
    now = 101.0
    slow.note(ANSWER, 2.0, slow_ms=1000)
    slow.note(ANSWER, 2.0, slow_ms=1000)
    assert ["(3 more before it)" in line.getMessage() for line in lines.records[MOST_PER_S:]] == [True, False]


def test_outside_of_a_replica_nobodys_log_is_changed():
    before = [(logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in PACKAGES]
    join_serves_log()
    assert [(logging.getLogger(name).handlers, logging.getLogger(name).propagate) for name in PACKAGES] == before
