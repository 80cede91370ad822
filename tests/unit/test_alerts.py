"""Which alerts fire in which situation: promtool evaluates the shipped rules over series of a scrape that is written down."""

import shutil
import subprocess

import pytest
import yaml

from cluster.metrics import SECONDS, SHORT_SECONDS
from deployments.dashboards.alerts import ALERTS
from deployments.dashboards.build import HERE

SHIPPED = [rule for group in yaml.safe_load((HERE / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
SEVERITIES = {alert.name: alert.severity for alert in ALERTS}
REQUESTS = 'ray_genrec_http_requests_total{application="shop", route="%s", status="%d"}'
REFUSALS = 'ray_genrec_admission_refusals_total{application="shop", route="%s", status="503"}'
DURATIONS = 'ray_genrec_http_request_duration_seconds_bucket{application="shop", le="%s", outcome="2xx", route="%s"}'
LOADED = 'ray_genrec_backend_loaded_state{application="%s", backend="torch", replica="%s", stage="encoder"}'
VERSION = 'ray_genrec_model_version_number{application="%s", replica="%s"}'
WANTED = 'ray_genrec_model_wanted_version_number{application="%s", replica="%s"}'
FOLLOWED = 'ray_genrec_followed_items_total{application="shop", action="click", model_version="tiny/%d"}'
NOT_FOLLOWED = 'ray_genrec_not_followed_items_total{application="shop", action="click"}'
RETRIES = 'ray_genrec_stage_retries_refused_total{application="%s", stage="encoder"}'
BREAKER = 'ray_genrec_backend_breaker_state{application="%s", backend="torch", replica="a", stage="encoder"}'
WAITS = 'ray_genrec_batch_wait_seconds_bucket{application="%s", le="%s", stage="encoder"}'
ITEMS = 'ray_genrec_request_%sitems_total{application="%s"}'
ANSWERS = 'ray_genrec_answers_total{application="shop", degraded="%s", tier="computed"}'
RANKINGS = 'ray_genrec_rankings_total{application="%s", degraded="%s"}'
CACHE = 'ray_genrec_cache_%s{application="%s"}'
ASKED = "/v1/recommend"
SHOP, SMALL = {"application": "shop"}, {"application": "small"}


@pytest.fixture
def told(tmp_path):
    """Asserts which series of an alert fire at a time, by the labels that they have beside those of every alert."""
    program = shutil.which("promtool") or pytest.skip("promtool is not installed (apt-get install prometheus)")

    def check(alert, series, *expected, at="30m", every="1m"):
        firing = {"alertname": alert, "alertstate": "firing", "severity": SEVERITIES[alert]}
        labels = [", ".join(f'{name}="{value}"' for name, value in (firing | one).items()) for one in expected]
        case = {
            "interval": every,
            "input_series": [{"series": name, "values": values} for name, values in series.items()],
            "promql_expr_test": [
                {
                    "expr": f'ALERTS{{alertname="{alert}", alertstate="firing"}}',
                    "eval_time": at,
                    "exp_samples": [{"labels": f"ALERTS{{{one}}}", "value": 1} for one in labels],
                }
            ],
        }
        rule = next(rule for rule in SHIPPED if rule["alert"] == alert)
        (tmp_path / "alert.yml").write_text(yaml.safe_dump({"groups": [{"name": "genrec", "rules": [rule]}]}))
        document = {"rule_files": ["alert.yml"], "evaluation_interval": every, "tests": [case]}
        (tmp_path / "case.yml").write_text(yaml.safe_dump(document))
        done = subprocess.run([program, "test", "rules", str(tmp_path / "case.yml")], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr

    return check


# ---- an encoder without an engine


def test_an_application_none_of_whose_encoders_has_an_engine_pages_beside_one_that_has(told):
    engines = {LOADED % ("shop", "a"): "0x40", LOADED % ("shop", "b"): "0x40", LOADED % ("else", "c"): "1x40"}
    told("GenrecNoEngine", engines, {"application": "shop"})
    told("GenrecNoEngine", engines | {LOADED % ("shop", "b"): "1x40"})


def test_an_application_without_any_encoder_pages_as_long_as_it_has_gateways(told):
    gateways = {VERSION % ("shop", "g"): "3x40", VERSION % ("else", "h"): "7x40"}
    told("GenrecNoEngine", gateways | {LOADED % ("else", "c"): "1x40"}, {"application": "shop"})
    gone = {VERSION % ("shop", "g"): "3x10 stale", LOADED % ("shop", "a"): "1x10 stale"}
    told("GenrecNoEngine", gone)


def test_encoders_that_go_page_after_two_minutes(told):
    gone = {VERSION % ("shop", "g"): "3x40", LOADED % ("shop", "a"): "1x10 stale"}
    told("GenrecNoEngine", gone, at="12m")
    told("GenrecNoEngine", gone, {"application": "shop"}, at="14m")


# ---- no gateway


def test_gateways_that_go_page_after_two_minutes_and_for_a_day(told):
    gone = {VERSION % ("shop", "g"): "3x10 stale", VERSION % ("else", "h"): "7x2000"}
    told("GenrecNoGateway", gone, at="12m")
    told("GenrecNoGateway", gone, {"application": "shop"}, at="14m")
    told("GenrecNoGateway", gone, {"application": "shop"}, at="23h")
    told("GenrecNoGateway", gone, at="25h")


def test_one_gateway_of_two_that_goes_pages_no_operator(told):
    told("GenrecNoGateway", {VERSION % ("shop", "g"): "3x10 stale", VERSION % ("shop", "h"): "3x40"})


# ---- versions


def versions(**told):
    """Series of one application's gateways, each given as (the version that is to serve, the one that does), and another's."""
    gateways = {("shop", replica): values for replica, values in told.items()} | {("else", "z"): ("7x90", "7x90")}
    return {series % gateway: values[place] for gateway, values in gateways.items() for place, series in enumerate((WANTED, VERSION))}


def test_two_applications_may_serve_different_versions_and_gateways_of_one_may_not(told):
    told("GenrecTwoVersions", versions(a=("3x90", "3x90"), b=("3x90", "3x90")), at="80m")
    for wanted in ("4x90", "3x90"):  # one gateway cannot change over to 4, or the other one not back to 3
        told("GenrecTwoVersions", versions(a=(wanted, "3x90"), b=(wanted, "4x90")), {"application": "shop"}, at="80m")


def test_a_promotion_that_no_gateway_follows_is_told_after_half_an_hour(told):
    for promoted in ("4x90", "2x90"):
        waits = versions(a=(f"3x10 {promoted}", "3x90"), b=(f"3x10 {promoted}", "3x90"))
        told("GenrecTwoVersions", waits, at="40m")
        told("GenrecTwoVersions", waits, {"application": "shop"}, at="42m")


def test_gateways_that_cannot_read_which_version_is_to_serve_are_told_after_half_an_hour(told):
    for others in ("0x90", "3x90"):
        series = versions(a=("3x10 0x90", "3x100"), b=(f"3x10 {others}", "3x100"))
        told("GenrecTwoVersions", series, at="40m")
        told("GenrecTwoVersions", series, {"application": "shop"}, at="42m")


def test_a_promotion_that_all_gateways_follow_in_time_is_not_told(told):
    told("GenrecTwoVersions", versions(a=("3x10 4x90", "3x12 4x90"), b=("3x10 4x90", "3x35 4x90")), at="80m")


def test_gateways_that_do_not_hear_of_the_same_promotion_are_told(told):
    told("GenrecTwoVersions", versions(a=("3x90", "3x90"), b=("4x90", "3x90")), {"application": "shop"}, at="80m")


# ---- slow answers


def durations(route, a_minute, slowest_s):
    """Answers that end evenly over the time up to `slowest_s`, one of the histogram's bounds."""
    within = {str(bound): min(1.0, bound / slowest_s) for bound in SECONDS} | {"+Inf": 1.0}
    return {DURATIONS % (bound, route): f"0+{a_minute * share:g}x40" for bound, share in within.items()}


@pytest.mark.parametrize("route", [ASKED, "/v1/rank"])
def test_single_answers_page_where_more_than_one_in_a_hundred_takes_longer_than_a_second(told, route):
    told("GenrecSlow", durations(route, 600, 2.0), SHOP | {"route": route})
    told("GenrecSlow", durations(route, 600, 1.0))


def test_a_client_that_sends_batches_of_a_few_seconds_pages_no_operator(told):
    batches = durations("/v1/recommend:batch", 20, 5.0)
    told("GenrecSlow", batches)
    told("GenrecSlow", durations(ASKED, 600, 1.0) | batches)


# ---- failures and refusals


def test_answers_that_fail_page_however_many_calls_of_other_routes_are_refused(told):
    asked = {REQUESTS % (ASKED, 200): "0+95x40", REQUESTS % (ASKED, 500): "0+5x40", REQUESTS % (ASKED, 503): "0+0x40"}
    told("GenrecAnswersFail", asked, SHOP)
    told("GenrecAnswersFail", asked | {REFUSALS % "/v1/events": "0+50x40"}, SHOP)


def test_an_application_that_fails_altogether_pages_beside_one_with_a_hundred_times_its_requests(told):
    small = (REQUESTS % (ASKED, 500)).replace("shop", "small")
    told("GenrecAnswersFail", {REQUESTS % (ASKED, 200): "0+9000x40", small: "0+60x40"}, {"application": "small"})
    turned_away = {one.replace("shop", "small"): "0+60x40" for one in (REQUESTS % (ASKED, 503), REFUSALS % ASKED)}
    told("GenrecTurnsAway", {REQUESTS % (ASKED, 200): "0+9000x40", **turned_away}, {"application": "small"})


def test_refusals_are_no_failures(told):
    asked = {REQUESTS % (ASKED, 200): "0+95x40", REQUESTS % (ASKED, 503): "0+5x40", REFUSALS % ASKED: "0+5x40"}
    told("GenrecAnswersFail", asked)
    told("GenrecTurnsAway", asked)
    told("GenrecTurnsAway", asked | {REQUESTS % (ASKED, 503): "0+10x40", REFUSALS % ASKED: "0+10x40"}, SHOP)


@pytest.mark.parametrize("alert", ["GenrecAnswersFail", "GenrecTurnsAway"])
@pytest.mark.parametrize("refused", ["/v1/events", "other", ASKED])
def test_refusals_page_no_operator_while_recommendations_are_not_asked_for(told, alert, refused):
    told(alert, {REQUESTS % (ASKED, 200): "100x40", REQUESTS % (ASKED, 503): "5x40", REFUSALS % refused: "0+5x40"})


def test_refusals_of_other_routes_are_none_of_recommendations(told):
    told("GenrecTurnsAway", {REQUESTS % (ASKED, 200): "0+100x40", REFUSALS % "/v1/events": "0+50x40", REFUSALS % "other": "0+50x40"})


@pytest.mark.parametrize("door", ["proxy", "zeromq"])
def test_what_the_proxy_refuses_pages_as_what_gateways_refuse(told, door):
    """It knows no routes: what it refuses is compared with all that reached a gateway."""
    asked = {REQUESTS % (ASKED, 200): "0+50x40", REQUESTS % ("/v1/events", 201): "0+50x40"}
    told("GenrecTurnsAway", asked | {REFUSALS % door: "0+4x40"})
    told("GenrecTurnsAway", asked | {REFUSALS % door: "0+7x40"}, SHOP)
    told("GenrecTurnsAway", asked | {REFUSALS % door: "0+900x40"}, SHOP)
    told("GenrecTurnsAway", asked | {REFUSALS % door: "0+4x40", REQUESTS % (ASKED, 503): "0+2x40", REFUSALS % ASKED: "0+2x40"}, SHOP)
    told("GenrecAnswersFail", asked | {REFUSALS % door: "0+900x40"})
    told("GenrecTurnsAway", asked | {(REFUSALS % door).replace("503", "422"): "0+900x40"})


HISTORY = "/v1/users/{user_id:id}/history"


@pytest.mark.parametrize("route", ["/v1/events", HISTORY])
def test_events_and_erasures_that_fail_are_told_beside_answers_that_do_not_and_refusals_are_not(told, route):
    asked, failing = {REQUESTS % (ASKED, 200): "0+9000x40"}, SHOP | {"route": route}
    told("GenrecEventsFail", asked | {REQUESTS % (route, 503): "0+5x40"}, failing)
    told("GenrecEventsFail", asked | {REQUESTS % (route, 503): "0+5x40"}, at="9m")
    told("GenrecEventsFail", asked | {REQUESTS % (route, 503): "0+50x40", REFUSALS % route: "0+50x40"})
    told("GenrecEventsFail", asked | {REQUESTS % (route, 503): "0+50x40", REFUSALS % route: "0+40x40"}, failing)
    told("GenrecEventsFail", asked | {REQUESTS % (route, 503): "0+50x40", REFUSALS % "proxy": "0+90x40"}, failing)
    told("GenrecEventsFail", asked | {REQUESTS % (route, 201): "0+960x40", REQUESTS % (route, 500): "0+40x40"})
    told("GenrecAnswersFail", asked | {REQUESTS % (route, 503): "0+50x40"})


def test_erasures_that_fail_are_told_beside_many_events_that_are_stored(told):
    stored = {REQUESTS % ("/v1/events", 201): "0+9000x40", REQUESTS % (HISTORY, 503): "0+1x40"}
    told("GenrecEventsFail", stored, SHOP | {"route": HISTORY})


@pytest.mark.parametrize("at", ["35m", "69m", "2h"])
def test_erasures_that_fail_are_told_though_one_comes_every_ten_minutes(told, at):
    failed = {REQUESTS % ("/v1/events", 201): "0+9000x120", REQUESTS % (HISTORY, 503): " ".join(f"{number}x9" for number in range(13))}
    told("GenrecEventsFail", failed, SHOP | {"route": HISTORY}, at=at)
    told("GenrecEventsFail", failed | {REFUSALS % HISTORY: failed[REQUESTS % (HISTORY, 503)]}, at=at)
    told("GenrecEventsFail", failed | {REQUESTS % (HISTORY, 200): "0+4x120"}, at=at)


def test_a_proxy_that_refuses_nothing_any_more_pages_no_operator(told):
    told("GenrecTurnsAway", {REQUESTS % (ASKED, 200): "0+50x40", REFUSALS % "proxy": "900x40"})
    told("GenrecTurnsAway", {REQUESTS % (ASKED, 200): "100x40", REFUSALS % "proxy": "900x40"})


# ---- degraded answers and rankings


def test_degraded_rankings_are_told_with_and_without_recommendations_beside_them(told):
    degraded, rest = {RANKINGS % ("shop", "true"): "0+50x40"}, {RANKINGS % ("shop", "false"): "0+50x40"}
    told("GenrecDegraded", degraded, SHOP)
    told("GenrecDegraded", degraded | rest | {ANSWERS % "false": "0+100x40", RANKINGS % ("small", "false"): "0+1x40"}, SHOP)
    told("GenrecDegraded", degraded | rest | {ANSWERS % "false": "0+9000x40"})
    told("GenrecDegraded", rest)


def test_degraded_answers_are_told_with_and_without_rankings_beside_them(told):
    answers = {ANSWERS % "true": "0+10x40", ANSWERS % "false": "0+90x40"}
    told("GenrecDegraded", answers, SHOP)
    told("GenrecDegraded", answers | {RANKINGS % ("shop", "false"): "0+50x40"}, SHOP)
    told("GenrecDegraded", answers | {RANKINGS % ("shop", "false"): "0+900x40"})
    told("GenrecDegraded", {ANSWERS % "false": "0+90x40", RANKINGS % ("shop", "true"): "30x40"})


# ---- recommendations that are followed less


def test_following_that_falls_to_nothing_is_told(told):
    for today in ("_x150", "600x150", "stale"):  # the series is gone, stands still, or its gateway is
        followed = {FOLLOWED % 1: f"0+60x144 {today}", NOT_FOLLOWED: "0+60x300"}
        told("GenrecFollowedLess", followed, SHOP, at="30h", every="10m")


def test_following_that_a_new_version_brought_to_a_trickle_is_told(told):
    followed = {FOLLOWED % 1: "0+60x144 stale", FOLLOWED % 2: "_x144 0+1x150", NOT_FOLLOWED: "0+60x300"}
    told("GenrecFollowedLess", followed, SHOP, at="30h", every="10m")


def test_following_as_yesterday_or_too_little_of_it_yesterday_is_not_told(told):
    told("GenrecFollowedLess", {FOLLOWED % 1: "0+60x300", NOT_FOLLOWED: "0+60x300"}, at="30h", every="10m")
    told("GenrecFollowedLess", {FOLLOWED % 1: "0+6x144 stale", NOT_FOLLOWED: "0+60x300"}, at="30h", every="10m")
    told("GenrecFollowedLess", {FOLLOWED % 1: "0+60x144 stale", NOT_FOLLOWED: "0+60x144 stale"}, at="30h", every="10m")
    told("GenrecFollowedLess", {NOT_FOLLOWED: "0+60x300"}, at="30h", every="10m")


# ---- the shared cache


def test_a_shared_cache_that_is_away_is_told_though_it_is_hardly_called_any_more(told):
    failures, left = (f'ray_genrec_cache_{name}{{application="shop", replica="a"}}' for name in ("failures_total", "left_alone_number"))
    told("GenrecSharedCacheFails", {failures: "0+6x40", left: "1x40"}, SHOP)
    told("GenrecSharedCacheFails", {failures: "0+6x40", left: "0x40"})
    told("GenrecSharedCacheFails", {failures: "0+600x40", left: "0x40"}, SHOP)


# ---- more series than a node serves


def test_a_node_that_serves_no_new_series_is_told_by_its_address_and_once_however_many_metrics_have_more(told):
    beyond = '{instance="%s", otel_metric_overflow="true"}'
    full = {f"ray_genrec_{name}{beyond}" % "10.0.0.7:8080": "0+5x40" for name in ("http_requests_total", "admission_wait_seconds_bucket")}
    elsewhere = {f"ray_serve_num_http_requests_total{beyond}" % "10.0.0.8:8080": "0+5x40", REQUESTS % (ASKED, 200): "0+5x40"}
    told("GenrecMetricsOverflow", full | elsewhere, {"instance": "10.0.0.7:8080"})
    told("GenrecMetricsOverflow", elsewhere)


# ---- a small application beside a large one


def test_a_small_application_whose_items_are_not_known_is_told_beside_one_with_a_hundred_times_its_items(told):
    large = {ITEMS % ("", "shop"): "0+90000x20", ITEMS % ("unknown_", "shop"): "0x20"}
    small = {ITEMS % ("", "small"): "0+600x20", ITEMS % ("unknown_", "small"): "0+300x20"}
    told("GenrecUnknownItems", large | small, SMALL, at="3h", every="10m")


def test_a_small_application_whose_recommendations_are_not_followed_any_more_is_told_beside_a_large_one(told):
    large = {FOLLOWED % 1: "0+6000x300", NOT_FOLLOWED: "0+6000x300"}
    fallen = {(FOLLOWED % 1).replace("shop", "small"): "0+60x144 stale", NOT_FOLLOWED.replace("shop", "small"): "0+60x300"}
    told("GenrecFollowedLess", large | fallen, SMALL, at="30h", every="10m")


def test_a_queue_that_is_long_in_a_small_application_is_told_beside_a_large_one_without(told):
    def waits(application, a_minute, slowest_s):
        within = {str(bound): min(1.0, bound / slowest_s) for bound in SHORT_SECONDS} | {"+Inf": 1.0}
        return {WAITS % (application, bound): f"0+{a_minute * share:g}x40" for bound, share in within.items()}

    told("GenrecQueueLong", waits("shop", 60_000, 0.1) | waits("small", 60, 1.0), SMALL | {"stage": "encoder"})


def test_what_is_broken_is_told_of_the_application_that_has_it(told):
    of_encoder = SMALL | {"stage": "encoder"}
    told("GenrecBreakerOpen", {BREAKER % "shop": "0x40", BREAKER % "small": "2x40"}, of_encoder | {"backend": "torch"})
    told("GenrecSharedCacheFails", {CACHE % ("left_alone_number", "shop"): "0x40", CACHE % ("left_alone_number", "small"): "1x40"}, SMALL)
    told("GenrecRetriesRefused", {RETRIES % "small": "0+90x40"}, of_encoder)


def test_what_each_of_two_applications_may_have_is_not_told_since_both_have_it(told):
    """Each two thirds of a call a second."""
    told("GenrecRetriesRefused", {RETRIES % one: "0+40x40" for one in ("shop", "small")})
    told("GenrecSharedCacheFails", {CACHE % ("failures_total", one): "0+40x40" for one in ("shop", "small")})
