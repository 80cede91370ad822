"""The latency histogram: exact to a bucket, mergeable, and about recent calls."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.traffic.latency import LAST_BUCKET, LatencyRecorder, LatencySummary, bucket_of, merge, upper_bound_ms

DURATIONS = st.lists(st.floats(0.011, 1e5), min_size=1, max_size=200)


def recorded(durations: list[float]) -> LatencySummary:
    recorder = LatencyRecorder(now=0)
    for duration in durations:
        recorder.record(duration, now=1)
    return recorder.summary(now=1)


@given(DURATIONS)
def test_percentiles_are_within_one_bucket_of_the_exact_ones(durations: list[float]):
    summary = recorded(durations)
    for share, found in ((50, summary.p50_ms), (95, summary.p95_ms), (99, summary.p99_ms)):
        exact = float(np.percentile(durations, share, method="inverted_cdf"))
        assert exact * 0.99 <= found <= exact * 10 ** (1 / 16) * 1.01 + 0.0005


@given(DURATIONS, DURATIONS)
def test_merging_two_replicas_equals_one_that_served_everything(first: list[float], second: list[float]):
    merged, whole = merge([recorded(first), recorded(second)]), recorded(first + second)
    assert (merged.count, merged.buckets) == (whole.count, whole.buckets)
    assert merged.p99_ms == whole.p99_ms


@given(st.floats(0, 1e12))
def test_every_duration_has_a_bucket_whose_bound_it_does_not_exceed(duration: float):
    bucket = bucket_of(duration)
    assert 0 <= bucket <= LAST_BUCKET
    assert duration <= upper_bound_ms(bucket) * (1 + 1e-6) or bucket == LAST_BUCKET


def test_there_are_no_percentiles_without_calls():
    summary = LatencyRecorder(now=0).summary(now=5)
    assert (summary.count, summary.p50_ms, summary.p99_ms, summary.per_second) == (0, None, None, 0)
    assert merge([]) == LatencySummary()


def test_throughput_is_that_of_the_last_half_minute():
    recorder = LatencyRecorder(now=0)
    for second in range(100, 130):
        recorder.record(1, now=second, calls=20)
    assert recorder.summary(now=129).per_second == pytest.approx(20)
    assert recorder.summary(now=144).per_second == pytest.approx(10, abs=1)
    assert recorder.summary(now=200).per_second == 0


def test_throughput_of_a_new_replica_counts_only_the_time_it_has_run():
    recorder = LatencyRecorder(now=1000)
    recorder.record(1, now=1002, calls=10)
    assert recorder.summary(now=1002).per_second == pytest.approx(5)


def test_percentiles_forget_old_calls_once_new_ones_came_and_stay_while_there_are_none():
    recorder = LatencyRecorder(now=0, window_s=60)
    recorder.record(1000, now=1, calls=100)
    assert recorder.summary(now=10_000).p50_ms == pytest.approx(1000, rel=0.16)
    for now in (61, 122):
        recorder.record(1, now=now)
    assert recorder.summary(now=122).p99_ms == pytest.approx(1, rel=0.16)
    assert recorder.summary(now=122).count == 102


def test_percentiles_of_a_replica_that_was_idle_are_those_of_the_calls_since():
    recorder = LatencyRecorder(now=50, window_s=5)
    for now in (50, 56):
        recorder.record(400, now=now)
    recorder.record(5, now=3600)
    assert recorder.summary(now=3600).p95_ms == pytest.approx(5, rel=0.16)
    recorder.record(1, now=3605)
    assert recorder.summary(now=3605).p95_ms == pytest.approx(5, rel=0.16)


def test_shows_plain_numbers():
    shown = recorded([1.0, 2.0]).as_json()
    assert set(shown) == {"p50_ms", "p95_ms", "p99_ms", "throughput_per_s"}
    assert all(math.isfinite(value) for value in shown.values())
