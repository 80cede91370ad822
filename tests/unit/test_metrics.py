"""Every metric is declared once, under a name that Prometheus and Ray take; what records it and what shows it keep to the declaration."""

import json
import re
from dataclasses import replace
from pathlib import Path

import prometheus_client
import pytest
import yaml
from fastapi import APIRouter, FastAPI
from httpx import ASGITransport, AsyncClient
from starlette.exceptions import HTTPException

from cluster import metrics as m
from cluster.cache.entry import CacheStatistics
from cluster.cache.shared import ShardHealth
from cluster.cache.tier_values import TierStatistics
from cluster.config import GatewaySettings
from cluster.engines.skipped import OutOfTime
from cluster.engines.snapshots import BackendSnapshot, StageSnapshot
from cluster.errors import ConfigError
from cluster.events.store import Event
from cluster.metrics import METRICS, SILENT, Kind, Metric, Totals
from cluster.ranking import Ranking, RankingRequest
from cluster.traffic.breaker import BreakerState
from cluster.traffic.latency import LatencySummary
from cluster.values import (
    Action,
    Behaviour,
    CacheReport,
    Item,
    Recommendation,
    RecommendRequest,
    ScoredItem,
    SkippedBackend,
    StageReport,
)
from deployments.dashboards.alerts import ALERTS
from deployments.dashboards.boards import BOARDS
from deployments.dashboards.build import HERE, files
from deployments.dashboards.expressions import OVERFLOWS, gauge, quantile, rate
from deployments.http.edge import Edge, EdgeStatistics
from deployments.http.interface import HttpInterface
from deployments.shown_items import CLOCKS_DIFFER_S, MOST_ITEMS, Followed, ShownItems
from deployments.telemetry.metrics import GatewayRecorder, StageRecorder, meter, reason_kind
from tests.noted import Noted

EVERY = sorted(METRICS.values(), key=lambda metric: metric.name)
FORBIDDEN = {"user", "user_id", "tenant", "item", "item_id", "path", "key", "query", "message", "error"}
SERIES = re.compile(r"\bray_genrec_\w+")
QUERIES = [
    (f"{board.title}: {panel.title}", legend, expr)
    for board in BOARDS.values()
    for row in board.rows.values()
    for panel in row
    for legend, expr in panel.queries.items()
]
QUERIES += [(alert.name, "", alert.expr) for alert in ALERTS]


# ---- declarations


@pytest.mark.parametrize("metric", EVERY, ids=lambda metric: metric.name)
def test_a_declared_metric_is_one_that_prometheus_takes(metric):
    kinds = {Kind.COUNTER: prometheus_client.Counter, Kind.GAUGE: prometheus_client.Gauge, Kind.HISTOGRAM: prometheus_client.Histogram}
    registry = prometheus_client.CollectorRegistry()
    given = {"buckets": metric.buckets} if metric.buckets else {}
    made = kinds[metric.kind](metric.scraped, metric.help, metric.labels, registry=registry, **given)
    made = made.labels(*metric.labels) if metric.labels else made
    made.observe(1) if metric.kind is Kind.HISTOGRAM else made.inc()
    text = prometheus_client.generate_latest(registry).decode()
    assert all(re.search(rf"^{series}[ {{]", text, re.MULTILINE) for series in metric.series)
    assert metric.help.endswith(".")
    assert not FORBIDDEN & set(metric.labels)


def test_every_declaration_is_in_the_table_under_its_own_name():
    declared = [value for value in vars(m).values() if isinstance(value, Metric)]
    assert len(declared) == len(METRICS)
    assert all(METRICS[metric.name] is metric for metric in declared)


@pytest.mark.parametrize(
    ("kind", "name", "labels", "buckets", "said"),
    [
        (Kind.COUNTER, "genrec_things", (), (), "counters end with _total"),
        (Kind.GAUGE, "genrec_things_total", (), (), "counters end with _total"),
        (Kind.GAUGE, "things_bytes", (), (), "is not called genrec_"),
        (Kind.GAUGE, "genrec_things_ms", (), (), "ends with no unit"),
        (Kind.GAUGE, "genrec_things_bytes", ("replica",), (), "are taken"),
        (Kind.GAUGE, "genrec_things_bytes", ("a-b",), (), "are no names"),
        (Kind.HISTOGRAM, "genrec_things_seconds", (), (), "histograms have some"),
        (Kind.HISTOGRAM, "genrec_things_seconds", (), (2.0, 1.0), "ascending"),
        (Kind.COUNTER, "genrec_things_total", (), (1.0,), "others none"),
    ],
)
def test_a_wrong_declaration_is_refused_with_its_values(kind, name, labels, buckets, said):
    with pytest.raises(ConfigError, match=said):
        Metric(kind, name, "help.", labels, buckets)


def test_what_is_recorded_otherwise_than_declared_is_refused():
    noted = Noted()
    with pytest.raises(ConfigError, match="has \\['route', 'status'\\]"):
        noted.add(m.HTTP_REQUESTS, route="/")
    with pytest.raises(ConfigError, match="recorded as a gauge"):
        noted.set(m.HTTP_REQUESTS, 1, route="/", status="200")
    with pytest.raises(ConfigError, match="declare it"):
        noted.add(Metric(Kind.COUNTER, "genrec_else_total", "Else."))


def test_outside_of_a_replica_nothing_is_recorded():
    assert meter() is SILENT


# ---- dashboards and alerts


def test_the_files_are_those_that_the_declarations_make():
    assert {name: (HERE / name).read_text() for name in files()} == files(), "run: python -m deployments.dashboards.build"


@pytest.mark.parametrize(("where", "legend", "expr"), QUERIES, ids=[f"{where} [{legend}]" for where, legend, _ in QUERIES])
def test_a_query_asks_for_declared_metrics_and_shows_labels_that_it_keeps(where, legend, expr):
    series = {name for metric in EVERY for name in metric.series}
    asked = SERIES.findall(expr)
    assert asked or expr == OVERFLOWS, "which is of all metrics"
    assert set(asked) <= series
    kept = {label.strip() for by in re.findall(r"by \(([^)]*)\)", expr) for label in by.split(",")}
    assert set(re.findall(r"{{(\w+)}}", legend)) <= kept
    assert expr.count("(") == expr.count(")")
    assert expr.count("{") == expr.count("}")


def test_every_metric_is_on_a_dashboard_or_in_an_alert():
    shown = {name for _, _, expr in QUERIES for name in SERIES.findall(expr)}
    assert not [metric.name for metric in EVERY if not shown & set(metric.series)]


def test_an_expression_over_what_is_not_declared_is_refused():
    with pytest.raises(ConfigError, match="no labels \\['tenant'\\]"):
        rate(m.HTTP_REQUESTS, "tenant")
    with pytest.raises(ConfigError, match="only histograms"):
        quantile(m.HTTP_REQUESTS, 0.5)
    with pytest.raises(ConfigError, match="not a gauge"):
        gauge(m.HTTP_REQUESTS)
    with pytest.raises(ConfigError, match="has no rate"):
        rate(m.BREAKER)


def test_an_expression_may_tell_applications_and_replicas_apart():
    assert gauge(m.MODEL_VERSION, "application", how="max") == "max by (application) (ray_genrec_model_version_number)"
    assert rate(m.CACHE_FAILURES, window="5m", replica="a") == 'sum (rate(ray_genrec_cache_failures_total{replica=~"a"}[5m]))'


def test_an_alert_says_what_to_do_and_uses_only_labels_that_its_expression_keeps():
    rules = yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"][0]["rules"]
    assert [rule["alert"] for rule in rules] == [alert.name for alert in ALERTS]
    assert len({alert.name for alert in ALERTS}) == len(ALERTS)
    for rule in rules:
        said = rule["annotations"]["summary"] + rule["annotations"]["description"]
        kept = {label.strip() for by in re.findall(r"by \(([^)]*)\)", rule["expr"]) for label in by.split(",")}
        assert set(re.findall(r"\$labels\.(\w+)", said)) <= kept
        assert rule["annotations"]["description"]


def test_a_dashboard_has_no_two_panels_of_one_number_and_none_outside_of_the_grid():
    for name in BOARDS:
        panels = json.loads((Path(HERE) / f"{name}.json").read_text())["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


# ---- recorders


def answer(*items, stages=(), tier=None, degraded=False, unknown=()):
    scored = tuple(ScoredItem(Item(item, item), 1.0, "encode") for item in items)
    return Recommendation("ada", scored, tuple(stages), "tiny/1", degraded, tuple(unknown), CacheReport(tier) if tier else None)


def asked(*items):
    return RecommendRequest("ada", behaviours=tuple(Behaviour(item, 1) for item in items))


def test_a_computed_answer_counts_its_stages_and_whom_they_passed_over():
    noted = Noted()
    skipped = (SkippedBackend("tensorrt", "no GPU"), SkippedBackend("onnxruntime", "broke: x", failed=True))
    GatewayRecorder(noted).ran([StageReport("encode", "torch", 20.0, skipped)])
    assert noted.seen["genrec_stage_duration_seconds", (("backend", "torch"), ("stage", "encode"))] == [0.02]
    assert noted.total(m.FALLBACKS, stage="encode", backend="tensorrt", reason="unavailable") == 1
    assert noted.total(m.FALLBACKS, reason="broken") == 1


@pytest.mark.parametrize("tier", ["computed", "l1", "l2", "joined"])
def test_an_answer_counts_as_it_is_given_and_its_stages_do_not_again(tier):
    noted = Noted()
    GatewayRecorder(noted).answered(asked("1"), answer("2", stages=[StageReport("encode", "torch", 20.0)], tier=tier), 0.001)
    assert noted.total(m.ANSWERS, tier=tier, degraded="false") == 1
    assert list(noted.seen) == [("genrec_answer_duration_seconds", (("tier", tier),))]


@pytest.mark.parametrize("degraded", [True, False])
def test_a_ranking_is_counted_by_whether_it_is_degraded(degraded):
    noted, request = Noted(), RankingRequest("ada", ("1", "2"))
    GatewayRecorder(noted).ranked(request, Ranking("ada", (), (), "tiny/1", degraded))
    assert noted.total(m.RANKINGS, degraded=str(degraded).lower()) == noted.total(m.RANKINGS) == 1
    assert noted.total(m.ANSWERS) == 0


def test_unknown_items_and_users_are_counted_against_what_was_named():
    noted = Noted()
    popular = [StageReport("popularity", "popularity", 0.1)]
    GatewayRecorder(noted).answered(asked("1", "1", "x"), answer("2", stages=popular, unknown=["x"]))
    GatewayRecorder(noted).answered(asked("1"), answer("2", stages=popular, degraded=True))  # popular because an engine broke
    assert (noted.total(m.ITEMS_NAMED), noted.total(m.ITEMS_UNKNOWN), noted.total(m.USERS_UNKNOWN)) == (3, 1, 1)


def test_the_kinds_of_reasons_are_few():
    reasons = (SkippedBackend("a", "gone", failed=True), OutOfTime("a", "late"), SkippedBackend("a", "switched off"))
    assert [reason_kind(one) for one in reasons] == ["broken", "late", "unavailable"]


def test_what_the_edge_and_the_callers_count_is_taken_over_once():
    noted, edge = Noted(), EdgeStatistics("a", running=2, waiting=1, places=8, entries=0, refused={})
    recorder = GatewayRecorder(noted)
    calls = {"encoder": {"requests": 10.0, "copies": 2.0, "hedges": 1.0, "refused": 1.0}}
    recorder.look(edge, calls, version=3, wanted=3)
    recorder.look(edge, calls, version=3, wanted=3)
    assert noted.values["genrec_admission_waiting_requests", ()] == 1
    assert noted.total(m.STAGE_CALLS, call="first") == 10
    assert noted.total(m.STAGE_CALLS, call="copy") == 2
    assert noted.total(m.HEDGES) == noted.total(m.RETRIES_REFUSED) == 1


def test_the_shared_cache_is_not_counted_by_every_gateway():
    noted = Noted()
    l1, l2 = CacheStatistics(hits=5, stale_hits=2, misses=4, entries=3), CacheStatistics(hits=1000, misses=1000, entries=70)
    GatewayRecorder(noted).look_at_cache(TierStatistics(l1, l2, (), 4, 1, 2, 0, 0, ()))
    assert noted.total(m.CACHE_LOOKUPS) == 9
    assert noted.total(m.CACHE_LOOKUPS, result="stale") == 2
    assert noted.values["genrec_cache_kept_entries", (("tier", "l2"),)] == 70


def test_a_cache_with_fewer_shards_than_before_has_no_new_failures():
    noted = Noted()
    recorder, empty = GatewayRecorder(noted), CacheStatistics()
    for failures in ({"cache-0": 3}, {"cache-0": 3, "cache-1": 5}, {"cache-0": 4}, {"cache-0": 4, "cache-1": 1}):
        shards = tuple(ShardHealth(name, BreakerState.CLOSED, 100, count, 0, "") for name, count in failures.items())
        recorder.look_at_cache(TierStatistics(empty, None, shards, 0, 0, 0, 0, 2, ()))
    assert noted.total(m.CACHE_FAILURES) == 2 + 4 + 5 + 1


def test_shards_that_are_not_asked_any_more_are_counted():
    noted, empty = Noted(), CacheStatistics()
    shards = tuple(ShardHealth(state.name, state, 100, 3, 0, "") for state in BreakerState)
    GatewayRecorder(noted).look_at_cache(TierStatistics(empty, None, shards, 0, 0, 0, 0, 0, ()))
    assert noted.values[m.CACHE_LEFT_ALONE.name, ()] == 2, "the open one and the half-open one"


def snapshot(**changes):
    figures = {"calls": 10, "failures": 1, "fallbacks": 2, "kept": {}, "breaker": BreakerState.CLOSED} | changes
    return StageSnapshot(
        "encoder", "", (BackendSnapshot("torch", "m:T", True, "", True, 0, True, last_error="", latency=LatencySummary(), **figures),)
    )


def test_backends_are_counted_through_a_change_of_models():
    noted = Noted()
    recorder = StageRecorder("encoder", noted)
    for version, calls in (("tiny/1", 10), ("tiny/1", 12), ("tiny/2", 3), ("tiny/1", 12), ("tiny/1", 1)):  # at last loaded anew
        recorder.count(version, snapshot(calls=calls))
    assert noted.total(m.BACKEND_REQUESTS, stage="encoder", backend="torch") == 12 + 3 + 1


def test_breakers_queues_and_kept_states_are_shown():
    noted = Noted()
    recorder = StageRecorder("encoder", noted)
    kept = {"users": 3.0, "used_bytes": 30.0, "device_bytes": 12.0, "hits": 2.0, "asked_rows": 10.0, "hit_rows": 4.0, "odd": 1.0}
    shown = snapshot(breaker=BreakerState.OPEN, kept=kept)
    recorder.count("tiny/1", shown)
    recorder.show(shown, {"vllm": {"waiting": 7.0, "kv_cache_usage": 0.5, "prefix_cache_hits": 1.0}})
    torch, vllm = (("backend", "torch"), ("stage", "encoder")), (("backend", "vllm"), ("stage", "encoder"))
    assert noted.values["genrec_backend_breaker_state", torch] == 2
    assert noted.values["genrec_state_kept_users", torch] == 3
    assert noted.values["genrec_state_used_bytes", torch] == 30 + 12
    assert noted.values["genrec_queue_waiting_requests", vllm] == 7
    assert noted.values["genrec_kv_cache_usage_ratio", vllm] == 0.5
    assert (noted.total(m.STATE_ROWS), noted.total(m.STATE_ROWS_FOUND)) == (10, 4)
    recorder.count("tiny/1", snapshot(kept={}))  # it says nothing for a moment
    recorder.count("tiny/1", shown)
    assert noted.total(m.STATE_ROWS) == 10
    assert noted.total(m.STATE_LOOKUPS, result="hit") == 2


@pytest.mark.parametrize("changes", [{"enabled": False}, {"rank": None}], ids=["switched off", "left out"])
def test_the_breaker_of_a_backend_that_is_not_asked_raises_no_alert(changes):
    """It gets no trial, and would stay half open for good."""
    noted, shown = Noted(), snapshot(breaker=BreakerState.HALF_OPEN)
    StageRecorder("encoder", noted).show(replace(shown, backends=tuple(replace(one, **changes) for one in shown.backends)), {})
    assert noted.values["genrec_backend_breaker_state", (("backend", "torch"), ("stage", "encoder"))] == 0


def test_a_batch_tells_its_size_its_padding_and_its_requests_waits():
    noted = Noted()
    StageRecorder("encoder", noted).batch([10, 5], [0.001, 0.002])
    (size,), (padding,), waits = (
        noted.seen[name, (("stage", "encoder"),)]
        for name in ("genrec_batch_size_requests", "genrec_batch_padding_ratio", "genrec_batch_wait_seconds")
    )
    assert (size, padding, waits) == (2, 0.25, [0.001, 0.002])


def test_totals_begin_anew_with_what_they_count():
    noted = Noted()
    totals = Totals(noted)
    for total in (5, 5, 7, 2):
        totals.count(m.CACHE_FAILURES, total)
    assert noted.total(m.CACHE_FAILURES) == 5 + 2 + 2


# ---- quality online


def test_an_event_on_a_recommended_item_is_followed_once():
    shown = ShownItems(window_s=100)
    shown.show("shop", "ada", ["1", "2"], "tiny/1", now=1000)
    assert shown.follow("shop", "ada", "1", 1010, now=1010) == (Followed.YES, "tiny/1")
    assert shown.follow("shop", "ada", "1", 1011, now=1011)[0] is Followed.NO
    assert shown.follow("shop", "ada", "9", 1011, now=1011)[0] is Followed.NO


@pytest.mark.parametrize(
    ("tenant", "user", "timestamp", "now"),
    [("shop", "bob", 1010, 1010), ("else", "ada", 1010, 1010), ("shop", "ada", 1200, 1200), ("shop", "ada", 500, 1010)],
    ids=["another user", "another tenant's", "too late", "happened before"],
)
def test_an_event_that_says_nothing_of_a_recommendation_is_not_counted(tenant, user, timestamp, now):
    shown = ShownItems(window_s=100)
    shown.show("shop", "ada", ["1"], "tiny/1", now=1000)
    assert shown.follow(tenant, user, "1", timestamp, now)[0] is Followed.UNKNOWN


def test_an_event_that_is_sent_late_followed_what_was_shown_before_it_and_what_was_shown_since_may_still_be_followed():
    shown = ShownItems(window_s=1000)
    shown.show("shop", "ada", ["1", "2"], "tiny/1", now=1000)
    shown.show("shop", "ada", ["1", "3"], "tiny/2", now=1100)
    assert shown.follow("shop", "ada", "1", 1010, now=1120) == (Followed.YES, "tiny/1")
    assert shown.follow("shop", "ada", "1", 1011, now=1121)[0] is Followed.NO
    assert shown.follow("shop", "ada", "1", 1130, now=1130) == (Followed.YES, "tiny/2")


def test_whoever_goes_on_asking_goes_on_being_counted():
    shown = ShownItems(window_s=100)
    for now in range(1000, 2000, 40):
        shown.show("shop", "ada", [f"{now}", "always"], "tiny/1", now)
        assert shown.follow("shop", "ada", f"{now}", now + 1, now=now + 1) == (Followed.YES, "tiny/1")
    assert shown.follow("shop", "ada", "1000", now + 2, now=now + 2)[0] is Followed.NO


def test_the_memory_of_what_was_shown_is_bounded_and_forgets_who_is_erased():
    shown = ShownItems(users=2)
    for user in ("a", "b", "c"):
        shown.show("shop", user, list(map(str, range(MOST_ITEMS + 10))), "tiny/1", now=1000)
    assert len(shown) == 2
    assert shown.follow("shop", "c", f"{MOST_ITEMS}", 1000, now=1000)[0] is Followed.NO
    assert shown.follow("shop", "c", f"{MOST_ITEMS - 1}", 1000, now=1000)[0] is Followed.YES
    shown.forget("shop", "c")
    assert shown.follow("shop", "c", "100", 1000, now=1000)[0] is Followed.UNKNOWN
    shown.forget()
    assert not len(shown)


def test_shows_whose_items_were_all_followed_make_room_as_others_do():
    shown = ShownItems()
    for number in range(2000):
        shown.show("shop", "ada", [f"{number}"], "tiny/1", now=1000 + number / 2)
        assert shown.follow("shop", "ada", f"{number}", 1000 + number / 2, now=1000 + number / 2)[0] is Followed.YES
    latest = 1000 + (2000 - MOST_ITEMS) / 2
    assert shown.follow("shop", "ada", "0", latest, now=2000)[0] is Followed.NO
    assert shown.follow("shop", "ada", "0", latest - CLOCKS_DIFFER_S - 1, now=2000)[0] is Followed.UNKNOWN, "from before what is kept"


def test_of_a_long_answer_the_best_items_are_remembered():
    shown = ShownItems()
    for _ in range(2):
        shown.show("shop", "ada", list(map(str, range(MOST_ITEMS + 300))), "tiny/1", now=1000)
    assert shown.follow("shop", "ada", "0", 1001, now=1001) == (Followed.YES, "tiny/1")
    assert shown.follow("shop", "ada", "0", 1002, now=1002)[0] is Followed.NO


def test_what_flags_on_trial_brought_is_counted_apart(monkeypatch):
    noted = Noted()
    recorder = GatewayRecorder(noted)
    monkeypatch.setattr("deployments.telemetry.metrics.time", lambda: 1000.0)
    recorder.answered(asked("1"), answer("2", "3"), flags="strategy=retrieval")
    recorder.happened(Event("ada", Behaviour("2", 1001, Action.CLICK)))
    answers = [labels for name, labels in noted.sums if name == m.ANSWERS.name]
    assert answers == [(("degraded", "false"), ("tier", "none"))], "a node serves 2,000 series of a name, and versions go on"
    assert noted.total(m.RECOMMENDED, model_version="tiny/1 strategy=retrieval") == 2
    assert noted.total(m.FOLLOWED, action="click", model_version="tiny/1 strategy=retrieval") == 1


def test_events_are_counted_by_what_was_done(monkeypatch):
    noted = Noted()
    recorder = GatewayRecorder(noted)
    monkeypatch.setattr("deployments.telemetry.metrics.time", lambda: 1000.0)
    recorder.answered(asked("1"), answer("2", "3"))
    for item in ("2", "2", "7"):
        recorder.happened(Event("ada", Behaviour(item, 1001, Action.CLICK)))
    assert noted.total(m.FOLLOWED, action="click", model_version="tiny/1") == 1
    assert noted.total(m.NOT_FOLLOWED, action="click") == 2
    recorder.forget("default", "ada")
    recorder.happened(Event("ada", Behaviour("3", 1001, Action.CLICK)))
    assert noted.total(m.FOLLOWED) == 1
    assert noted.total(m.NOT_FOLLOWED) == 2


# ---- HTTP


class Refusing(Edge):
    """An edge that turns away a request that has a header, before the routes."""

    async def serve(self, routes, scope, connection):
        if any(name == b"refuse" for name, _ in scope.get("headers", ())):
            await connection.send({"type": "http.response.start", "status": 503, "headers": []})
            await connection.send({"type": "http.response.body", "body": b""})
        elif not any(name == b"leave" for name, _ in scope.get("headers", ())):
            with connection:
                await routes.answer(scope, connection)


@pytest.fixture
def served():
    api, routes, noted = FastAPI(), APIRouter(), Noted()

    @routes.get("/v1/items/{item_id:path}")
    async def item(item_id: str) -> str:
        if item_id == "lost":
            raise HTTPException(404)
        if item_id == "broken":
            raise ValueError
        return item_id

    @routes.get("/v1/plain")
    async def plain() -> str:
        return "plain"

    api.include_router(routes)
    interface = HttpInterface(api, Refusing(GatewaySettings()), {}, noted)
    return AsyncClient(transport=ASGITransport(interface, raise_app_exceptions=False), base_url="http://here"), noted


async def test_requests_are_labelled_by_their_routes_and_never_by_their_paths(served):
    client, noted = served
    async with client:
        for path in ("/v1/items/1", "/v1/items/lost", "/v1/items/broken", "/v1/nowhere/secret"):
            await client.get(path)
    route = "/v1/items/{item_id:path}"
    assert [noted.total(m.HTTP_REQUESTS, route=route, status=status) for status in ("200", "404", "500")] == [1, 1, 1]
    assert noted.total(m.HTTP_REQUESTS, route="other", status="404") == 1
    assert not any("secret" in str(labels) for _, labels in noted.sums)
    assert ("genrec_http_request_duration_seconds", (("outcome", "5xx"), ("route", route))) in noted.seen


async def test_who_is_turned_away_before_the_routes_or_leaves_is_counted_too(served):
    client, noted = served
    async with client:
        await client.get("/v1/plain", headers={"refuse": "1"})
        await client.get("/v1/items/1", headers={"refuse": "1"})
        with pytest.raises(AssertionError):  # httpx's transport wants an answer
            await client.get("/v1/plain", headers={"leave": "1"})
    assert noted.total(m.HTTP_REQUESTS, route="/v1/plain", status="503") == noted.total(m.HTTP_REQUESTS, route="other", status="503") == 1
    assert noted.total(m.CLIENTS_GONE, route="/v1/plain") == 1
