"""`genrec top --once` against a service that runs."""

import json

import pytest
from typer.testing import CliRunner

from cluster.errors import ConfigError
from deployments.cli import app
from deployments.cli.top import top
from tests.integration.conftest import Live, behaviours
from tests.waiting import until_right

pytestmark = pytest.mark.cluster
if not any(command.callback is top for command in app.registered_commands):
    app.command("top")(top)


def check(url: str, *options: str) -> tuple[int, str]:
    """(exit status, what is printed), once all parts answer within the time that an operator has, which a busy machine may exceed."""
    command = ["top", "--url", url, "--interval-s", "1", "--once", *options]
    answer = until_right(
        lambda: CliRunner().invoke(app, command, env={"COLUMNS": "200"}), lambda seen: not isinstance(seen.exception, ConfigError)
    )
    return answer.exit_code, answer.output


def test_it_shows_engines_queue_and_caches_and_exits_with_0_where_all_is_well(live: Live):
    live.recommend(behaviours=behaviours(1, 2, 3))
    # a stage that a busy machine keeps from reporting for some seconds is amiss
    _, shown = until_right(lambda: check(live.url, "--p99-ms", "60000"), lambda seen: seen[0] == 0)
    for part in ("tiny-hstu/", "onnxruntime", "places taken", "cache hits: l1", "nothing is amiss"):
        assert part in shown


def test_what_is_beyond_a_threshold_is_an_alert_and_exit_status_1(live: Live):
    def alerted() -> tuple[int, set[str]]:
        live.recommend(behaviours=behaviours(1, 2, 3))  # a p99 counts while there are calls
        status, shown = check(live.url, "--p99-ms", "0", "--json")
        return status, {one["subject"] for one in json.loads(shown)["alerts"]}

    status, _ = until_right(alerted, lambda seen: "encoder onnxruntime p99" in seen[1])
    assert status == 1


def test_a_service_that_is_not_there_is_an_error_with_its_cure():
    answer = CliRunner().invoke(app, ["top", "--url", "http://127.0.0.1:9", "--once"])
    assert "no server answers at http://127.0.0.1:9" in str(answer.exception)
