"""What `genrec top` takes for amiss."""

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from cluster.errors import ConfigError
from cluster.fleet.board import LOADING
from deployments.cli.top import screen, top
from deployments.http.event_messages import CacheOut
from deployments.http.messages import BackendsOut, GatewayOut
from deployments.http.models import ModelsOut
from deployments.telemetry.monitor import Alerts, Look, Thresholds, problems_of, refused_per_s

BACKEND = {
    "name": "torch",
    "import_string": "a:B",
    "enabled": True,
    "rank": 0,
    "replicas": 2,
    "available_on": 2,
    "reasons": [],
    "breakers": {"closed": 2},
    "last_errors": [],
    "calls": 100,
    "failures": 0,
    "fallbacks": 0,
    "p50_ms": 1.0,
    "p95_ms": 2.0,
    "p99_ms": 3.0,
    "throughput_per_s": 5.0,
}
TIER = {
    "tier": "l1",
    "kind": "memory",
    "hits": 1,
    "stale_hits": 0,
    "misses": 9,
    "recent_hit_rate": 0.1,
    "insertions": 0,
    "evictions": 0,
    "expirations": 0,
    "rejections": 0,
    "invalidations": 0,
    "entries": 0,
    "used_bytes": 0,
    "capacity_bytes": 1,
    "tenants": {},
}
CACHE = {
    "enabled": True,
    "policy": "lru",
    "tiers": [TIER],
    "computed": 0,
    "joined": 0,
    "refreshed": 0,
    "dropped": 0,
    "hot": [],
    "user_states": {},
}
EVENTS = "/v1/events"
VERSION = {
    "version": 1,
    "role": "stable",
    "share": None,
    "holders": {},
    "obstacles": [],
    "gateways": 1,
    "requests": 0,
    "degraded": 0,
    "p95_ms": None,
    "overlap": None,
}


def look(at=0.0, *, replicas=2, refused=None, stored=0, failed=0, obstacles=(), **backend):
    stage = {"stage": "encoder", "replicas": replicas, "explanations": ["none serves"], "backends": [{**BACKEND, **backend}]}
    models = {"model_version": "m/1", "replicas": {}, "versions": [{**VERSION, "obstacles": list(obstacles)}], "ended": []}
    return Look(
        at,
        BackendsOut.model_validate({"model_version": "m/1", "stages": [stage]}),
        GatewayOut(gateway="a", running=1, waiting=0, places=8, refused=refused or {}, stored={EVENTS: stored}, failed={EVENTS: failed}),
        CacheOut.model_validate(CACHE),
        ModelsOut.model_validate(models),
    )


def amiss(before, now, **limits):
    return dict(problems_of(before, now, Thresholds(**limits)))


def test_where_all_is_well_nothing_is_said():
    assert amiss(look(), look(2.0, calls=200)) == {}
    for stored, failed in ((3, 2), (100, 5)):
        assert amiss(look(), look(2.0, stored=stored, failed=failed)) == {}, "few of them are no reason"


@pytest.mark.parametrize(
    ("changes", "subject", "said"),
    [
        ({"p99_ms": 1001.0}, "encoder torch p99", "1001 ms, more than 1000"),
        ({"breakers": {"closed": 1, "open": 1}, "last_errors": ["boom"]}, "encoder torch breaker", "out on 1 of 2 replicas: boom"),
        ({"calls": 200, "failures": 5}, "encoder torch failures", "5 of 100 calls, more than 1%"),
        ({"available_on": 0}, "encoder", "no engine can serve it: none serves"),
        ({"replicas": 0}, "encoder", "no replica has reported lately"),
        ({"refused": {503: 8}}, "gateway", "turns 4.0 requests a second away; it has 8 places"),
        ({"stored": 3, "failed": 3}, EVENTS, "3 of 3 calls failed; the gateway's log says why"),
        ({"stored": 100, "failed": 6}, EVENTS, "6 of 100 calls failed; the gateway's log says why"),
        ({"obstacles": ["a damaged file"]}, "version 1", "cannot be served everywhere: a damaged file"),
    ],
)
def test_what_is_beyond_a_threshold_is_named_with_its_value_and_the_limit(changes, subject, said):
    assert amiss(look(), look(2.0, **changes)) == {subject: said}


def test_a_version_that_is_being_loaded_is_not_amiss_unless_it_was_refused_before():
    """As in every promotion, and as every replica starts; `genrec top --once` ends with an error where something is amiss."""
    assert amiss(look(), look(2.0, obstacles=[LOADING])) == {}
    again = f"a damaged file; {LOADING} again"
    assert amiss(look(), look(2.0, obstacles=[LOADING, again])) == {"version 1": f"cannot be served everywhere: {again}"}


@pytest.mark.parametrize("stages", [[], ["generator"]], ids=["none", "the generator alone"])
def test_an_encoder_of_which_no_replica_reports_is_amiss(stages):
    """The service lists a stage only while a replica of it reports."""
    told = [{"stage": stage, "replicas": 1, "explanations": [], "backends": []} for stage in stages]
    now = replace(look(2.0), backends=BackendsOut.model_validate({"model_version": "m/1", "stages": told}))
    assert amiss(look(), now) == {"encoder": "no replica has reported lately"}


def test_what_two_gateways_have_turned_away_is_not_compared():
    first, other = look(refused={429: 3}), look(2.0, refused={429: 1000})
    assert "gateway" in amiss(first, other)
    for before, now in ((first, other), (replace(other, at=0.0), replace(first, at=2.0))):
        elsewhere = replace(now, gateway=now.gateway.model_copy(update={"gateway": "b"}))
        assert amiss(before, elsewhere) == {}


def test_a_slow_engine_that_gets_no_calls_any_more_is_not_amiss():
    slow = {"p99_ms": 5000.0, "calls": 200}
    assert set(amiss(look(**slow), look(2.0, **slow))) == {"encoder torch p99"}
    assert amiss(look(**slow), look(2.0, **slow, throughput_per_s=0.0)) == {}


@pytest.mark.parametrize("not_asked", [{"enabled": False}, {"rank": None}], ids=["switched off", "left out"])
def test_a_backend_that_is_not_asked_is_not_judged(not_asked):
    """It gets no trial and no call: its breaker stays half open and its p99 as it was."""
    serves = {**BACKEND, "name": "onnxruntime"}
    broken = {"breakers": {"half-open": 2}, "last_errors": ["boom"], "p99_ms": 5000.0, "calls": 200, "failures": 100}

    def beside_one_that_serves(**changes):
        stage = {"stage": "encoder", "replicas": 2, "explanations": [], "backends": [{**BACKEND, **changes}, serves]}
        return replace(look(2.0), backends=BackendsOut.model_validate({"model_version": "m/1", "stages": [stage]}))

    before = beside_one_that_serves()
    assert set(amiss(before, beside_one_that_serves(**broken))) == {f"encoder torch {what}" for what in ("breaker", "p99", "failures")}
    assert amiss(before, beside_one_that_serves(**broken, **not_asked)) == {}


def test_a_few_calls_are_no_share_and_a_refusal_for_another_reason_no_overload():
    assert amiss(look(), look(2.0, calls=119, failures=19, refused={401: 100})) == {}


def test_a_cache_is_judged_only_where_asked_for():
    assert amiss(look(), look(2.0), least_hit_rate=0.5) == {"cache l1": "hits 10%, less than 50%"}
    assert amiss(look(), look(2.0), least_hit_rate=0.1) == {}


def test_looks_at_one_time_tell_no_rate():
    assert refused_per_s(look(), replace(look(), gateway=look(refused={503: 6}).gateway)) == 0.0


def test_an_alert_is_told_once_it_has_lasted_and_begins_anew_when_it_comes_back():
    alerts = Alerts(hold_s=5.0)
    assert alerts.update(0.0, {"gateway": "x"}) == []
    (alert,) = alerts.update(5.0, {"gateway": "y"})
    assert (alert.subject, alert.problem, alert.since) == ("gateway", "y", 0.0)
    assert alerts.update(6.0, {}) == []
    assert alerts.update(7.0, {"gateway": "x"}) == []


def test_the_screen_names_backends_and_reasons_whole_in_eighty_columns():
    busy = {"calls": 123_456, "throughput_per_s": 123.4, "p50_ms": 12.3, "p95_ms": 123.4, "p99_ms": 234.5}
    now = look(name="torch_compiled", reasons=["no C++ compiler is here; run: apt-get install g++"], **busy)
    console = Console(width=80, record=True, file=StringIO())
    console.print(screen("http://127.0.0.1:8000", now, now, []))
    shown = console.export_text().splitlines()
    rows = [" ".join(line.split()) for line in shown]
    assert "encoder (2) torch_compiled 1 2/2 closed 123456 123.4 12.3 123.4 234.5" in rows
    assert "not encoder torch_compiled: no C++ compiler is here" in [line.rstrip() for line in shown]


@pytest.mark.parametrize(
    ("options", "cure"), [({"as_json": True}, "add --once"), ({"once": True, "hold_s": 60.0}, "leave one of them out")]
)
def test_options_of_watching_and_of_one_look_are_refused_together(options, cure):
    with pytest.raises(ConfigError, match=cure):
        top(url="http://127.0.0.1:9", **options)
