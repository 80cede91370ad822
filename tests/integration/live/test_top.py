"""`genrec top --once` against a service that runs."""

import json

import pytest
from typer.testing import CliRunner

from deployments.cli import app
from deployments.cli.top import top
from tests.integration.conftest import Live, behaviours

pytestmark = pytest.mark.cluster
if not any(command.callback is top for command in app.registered_commands):
    app.command("top")(top)


def check(url: str, *options: str) -> tuple[int, str]:
    answer = CliRunner().invoke(app, ["top", "--url", url, "--interval-s", "1", "--once", *options], env={"COLUMNS": "200"})
    return answer.exit_code, answer.output


def test_it_shows_engines_queue_and_caches_and_exits_with_0_where_all_is_well(live: Live):
    live.recommend(behaviours=behaviours(1, 2, 3))
    status, shown = check(live.url, "--p99-ms", "60000")
    assert status == 0, shown
    for part in ("tiny-hstu/", "onnxruntime", "places taken", "cache hits: l1", "nothing is amiss"):
        assert part in shown


def test_what_is_beyond_a_threshold_is_an_alert_and_exit_status_1(live: Live):
    live.recommend(behaviours=behaviours(1, 2, 3))
    status, shown = check(live.url, "--p99-ms", "0", "--json")
    assert status == 1, shown
    assert {one["subject"] for one in json.loads(shown)["alerts"]} >= {"encoder onnxruntime p99"}


def test_a_service_that_is_not_there_is_an_error_with_its_cure():
    answer = CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:9", "--once"])
    assert "no server answers at http://127.0.0.1:9" in str(answer.exception)
