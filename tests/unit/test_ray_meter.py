"""What Ray is told of a process: histograms as Prometheus has them, and what counters grew by; nothing is lost while Ray fails."""

import logging
import re
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import prometheus_client
import pytest
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Observation
from opentelemetry.sdk.metrics import MeterProvider

from cluster import metrics as m
from cluster.metrics import METRICS, Kind
from deployments.dashboards.expressions import OVERFLOWS
from deployments.telemetry import ray_meter
from deployments.telemetry.ray_meter import ALL_AT_EVERY, HAND_OVER_EVERY_S, Histogram, RayMeter

HISTOGRAMS = [metric for metric in METRICS.values() if metric.kind is Kind.HISTOGRAM]
ASKED = {"route": "/v1/recommend", "outcome": "2xx"}


class Ray:
    """In place of Ray's metrics: what was told, in order. `broken`: instrument -> what it raises."""

    def __init__(self):
        self.told, self.broken = [], {}

    def Counter(self, name, description, tag_keys):  # noqa: N802 - as in Ray
        return SimpleNamespace(inc=partial(self._tell, name, tag_keys))

    def Gauge(self, name, description, tag_keys):  # noqa: N802
        return SimpleNamespace(set=partial(self._tell, name, tag_keys))

    def _tell(self, name, tag_keys, value, tags):
        assert set(tags) == set(tag_keys)  # Ray raises where one is missing
        for value_of_tag in tags.values():
            value_of_tag.encode("ascii")  # as Ray does
        if served(name) in self.broken:
            raise self.broken[served(name)]
        self.told.append((served(name), tags, value))

    def again(self):
        told, self.told = self.told, []
        return told

    def series(self):
        """Each series as it was told last."""
        return {(name, frozenset(tags.items())): value for name, tags, value in self.told}


def served(name):
    return re.sub("_+", "_", name)


@pytest.fixture
def ray():
    return Ray()


@pytest.fixture
def meter(ray):
    return RayMeter(ray)


# ---- histograms


@pytest.mark.parametrize("metric", HISTOGRAMS, ids=lambda metric: metric.name)
def test_a_histogram_is_told_as_prometheus_s_own_client_would_serve_it(metric, ray, meter):
    registry, labels = prometheus_client.CollectorRegistry(), {label: f"a {label}" for label in metric.labels}
    theirs = prometheus_client.Histogram(metric.name, metric.help, metric.labels, registry=registry, buckets=metric.buckets)
    theirs = theirs.labels(**labels) if labels else theirs
    below, last = metric.buckets[0] / 2, metric.buckets[-1]
    for value in (*metric.buckets, below, *(bound * 1.0001 for bound in metric.buckets), 2 * last, 0.0):  # on each bound, and beside it
        theirs.observe(value)
        meter.observe(metric, value, **labels)
    meter.hand_over()
    samples = [sample for family in registry.collect() for sample in family.samples if not sample.name.endswith("_created")]
    assert ray.series() == {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert {f"ray_{name}" for name, _, _ in ray.told} == set(metric.series)


def test_a_bucket_counts_all_that_is_not_above_its_bound(ray, meter):
    for value in (0.0005, 0.001, 0.0011, 7.0, 100.0):
        meter.observe(m.HTTP_DURATION, value, **ASKED)
    meter.hand_over()
    counts = {tags["le"]: value for name, tags, value in ray.told if name.endswith("_bucket")}
    assert [counts[le] for le in ("0.001", "0.002", "5.0", "10.0", "+Inf")] == [2, 3, 3, 4, 5]


def test_the_sum_is_that_of_what_was_seen(ray, meter):
    for _ in range(3):
        meter.observe(m.BATCH_SIZE, 5, stage="encoder")
        meter.hand_over()
    assert ray.series()["genrec_batch_size_requests_sum", frozenset({("stage", "encoder")})] == 15


def test_series_are_those_that_were_seen_whatever_the_order_of_their_labels(ray, meter):
    meter.observe(m.HTTP_DURATION, 0.1, route="/v1/rank", outcome="2xx")
    meter.observe(m.HTTP_DURATION, 0.1, outcome="2xx", route="/v1/rank")
    meter.hand_over()
    assert [value for name, _, value in ray.told if name.endswith("_count")] == [2]
    assert len(ray.told) == len(m.SECONDS) + len(["+Inf", "count", "sum"])


def test_a_read_while_a_histogram_is_told_finds_no_bucket_that_counts_more_than_a_greater_one(ray, meter):
    for _ in range(2):
        for value in (0.0001, 0.3, 60.0):
            meter.observe(m.STAGE_DURATION, value, stage="encode", backend="torch")
        meter.hand_over()
    now = defaultdict(float)
    for name, tags, value in ray.told:
        if name.endswith("_bucket"):
            now[float(tags["le"])] = value
            counts = [now[bound] for bound in sorted(now)]
            assert counts == sorted(counts)


def test_a_second_tells_what_has_changed_and_every_fifth_all(ray, meter, monkeypatch):
    monkeypatch.setattr(ray_meter, "sleep", lambda _: next(seconds))
    meter.observe(m.ADMISSION_WAIT, 1.0)
    told, everything = [], len(m.SHORT_SECONDS) + len(["+Inf", "count", "sum"])

    def pass_by():
        yield
        for second in range(1, 2 * ALL_AT_EVERY + 1):
            told.append(len(ray.again()))
            if second == ALL_AT_EVERY + 1:
                meter.observe(m.ADMISSION_WAIT, 1.0)  # in the last bucket but one, with 2.5 and +Inf above it
            yield
        raise KeyboardInterrupt

    seconds = pass_by()
    with pytest.raises(KeyboardInterrupt):
        meter.hand_over_forever()
    assert told == [everything, 0, 0, 0, everything, 0, len(["1.0", "2.5", "+Inf", "count", "sum"]), 0, 0, everything]
    assert ALL_AT_EVERY * HAND_OVER_EVERY_S < 10  # what Ray's agent shows was told within two of its intervals, of 10 s each


def test_threads_lose_no_observation(ray, meter):
    def observe(_):
        for _ in range(2000):
            meter.observe(m.BATCH_WAIT, 0.5, stage="encoder")
            meter.add(m.CACHE_EVICTIONS)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(observe, range(4)))
    meter.hand_over()
    series, encoder = ray.series(), ("stage", "encoder")
    assert series["genrec_batch_wait_seconds_bucket", frozenset({encoder, ("le", "0.5")})] == 8000
    assert series["genrec_batch_wait_seconds_sum", frozenset({encoder})] == 4000
    assert series["genrec_cache_evictions_total", frozenset()] == 8000


# ---- counters


def test_a_counter_is_told_what_it_grew_by(ray, meter):
    for grown in (2, 0, 3):
        meter.add(m.REFUSALS, grown, route="other", status="503")
        meter.hand_over()
    assert ray.told == [("genrec_admission_refusals_total", {"route": "other", "status": "503"}, grown) for grown in (2, 3)]


# ---- Ray fails


@pytest.fixture
def warnings(caplog):
    """Of the logger that Serve cuts off from others."""
    logger = logging.getLogger("ray.serve")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)


def test_what_ray_did_not_take_is_told_when_it_is_back_and_the_rest_meanwhile(ray, meter, warnings):
    lost = "genrec_admission_refusals_total", "genrec_admission_wait_seconds_bucket"
    ray.broken = dict.fromkeys(lost, ConnectionError("gone"))
    for _ in range(2):
        meter.add(m.REFUSALS, route="other", status="503")
        meter.add(m.CACHE_EVICTIONS)
        meter.observe(m.ADMISSION_WAIT, 5.0)
        meter.hand_over(everything=False)
    assert not {name for name, _, _ in ray.told} & set(lost)
    assert sum(value for name, _, value in ray.told if name == "genrec_cache_evictions_total") == 2
    assert ray.series()["genrec_admission_wait_seconds_sum", frozenset()] == 10
    ray.broken = {}
    ray.again()
    meter.hand_over(everything=False)
    assert {name for name, _, _ in ray.told} == set(lost)
    assert ray.series()[lost[0], frozenset({("route", "other"), ("status", "503")})] == 2
    assert ray.series()[lost[1], frozenset({("le", "+Inf")})] == 2


def test_names_that_are_no_ascii_and_gauges_that_ray_does_not_take_stop_no_replica(ray, meter, warnings):
    meter.set(m.BACKEND_LOADED, 1, stage="encoder", backend="größe")
    meter.add(m.HTTP_REQUESTS, route="/café", status="200")
    meter.hand_over()
    assert [tags for _, tags, _ in ray.told] == [{"route": "/caf\\xe9", "status": "200"}, {"stage": "encoder", "backend": "gr\\xf6\\xdfe"}]
    assert not warnings.records
    ray.broken["genrec_backend_loaded_state"] = RuntimeError("no agent")
    meter.set(m.BACKEND_LOADED, 1, stage="encoder", backend="torch")
    meter.hand_over()
    assert len(warnings.records) == 1


def test_a_gauge_costs_its_setter_no_call_into_ray_and_is_handed_over_as_often_as_it_is_set(ray, meter):
    for running in (3, 5):
        meter.set(m.ADMISSION_RUNNING, running)
    assert not ray.told
    for told in ([(m.ADMISSION_RUNNING.name, {}, 5)], []):  # Ray's agent forgets one that is set no longer
        meter.hand_over()
        assert ray.again() == told


def test_a_failure_is_logged_once_of_each_kind(ray, meter, warnings):
    for error in (ConnectionError("gone"), ConnectionError("gone again"), UnicodeEncodeError("ascii", "é", 0, 1, "no")):
        ray.broken = {"genrec_cache_evictions_total": error}
        meter.add(m.CACHE_EVICTIONS)
        meter.hand_over()
    first, second = (record.getMessage() for record in warnings.records)
    assert "genrec_cache_evictions_total" in first
    assert "ConnectionError('gone')" in first
    assert "UnicodeEncodeError" in second


# ---- Ray's agent


def test_a_node_serves_every_bucket_after_many_restarts_of_its_replicas():
    """OpenTelemetry's limit, with the exporter that Ray's agent has."""
    registry, lives, routes = prometheus_client.CollectorRegistry(), range(20), range(8)
    node, shown = MeterProvider([PrometheusMetricReader(registry=registry)]).get_meter("agent"), {}
    for life in lives:
        for route in routes:
            seen = Histogram.empty(m.HTTP_DURATION, (("route", f"/{route}"), ("outcome", "2xx"), ("replica", f"{life}")))
            seen.observe(0.03)
            for (name, labels), value in seen.gauges():
                shown.setdefault(name, []).append(Observation(value, dict(labels)))
    for name, observations in shown.items():
        node.create_observable_gauge(f"ray_{name}", unit="1", callbacks=[lambda _, found=observations: found])
    families = {family.name: family.samples for family in registry.collect()}
    counts = {name: len(families[name]) for name in m.HTTP_DURATION.series}
    series = len(lives) * len(routes)
    assert counts == dict(zip(m.HTTP_DURATION.series, ((len(m.SECONDS) + 1) * series, series, series), strict=True))


def test_what_a_node_serves_no_more_of_a_metric_is_one_series_by_which_the_alert_finds_it():
    """Of a name OpenTelemetry keeps 2,000 sets of labels for good, those of replicas that are gone among them."""
    registry, lives = prometheus_client.CollectorRegistry(), range(2500)
    node = MeterProvider([PrometheusMetricReader(registry=registry)]).get_meter("agent")
    told = [Observation(2, {"route": "/v1/rank", "status": "200", "replica": f"{life}"}) for life in lives]
    node.create_observable_counter(m.HTTP_REQUESTS.scraped, unit="1", callbacks=[lambda _: told])
    samples = [one for family in registry.collect() for one in family.samples if one.name == m.HTTP_REQUESTS.scraped]
    (beyond,) = (one for one in samples if not one.labels["replica"])
    assert (len(samples), beyond.value) == (2000 + 1, 2 * 500)
    assert f'otel_metric_overflow="{beyond.labels["otel_metric_overflow"]}"' in OVERFLOWS
    assert not any(one.labels["otel_metric_overflow"] for one in samples if one is not beyond)
