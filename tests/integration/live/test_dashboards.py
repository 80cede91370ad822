"""Dashboards and alerts on a real Prometheus, which scrapes a Serve that answers: what they ask for is there to be found."""

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from cluster import metrics as m
from cluster.metrics import METRICS
from deployments.dashboards.alerts import ALERTS
from deployments.dashboards.boards import BOARDS
from deployments.dashboards.build import HERE
from tests.integration.conftest import Live, behaviours
from tests.ports import free_port
from tests.waiting import until_right

pytestmark = pytest.mark.cluster
RULES = HERE / "alerts.yaml"
FOUND_WITHIN_S, READY_WITHIN_S, ANSWERED_WITHIN_S = 300.0, 300.0, 120.0
WATCHED = "watched-by-prometheus"
SCRAPED_EVERY_S = 5
"""As long as a scrape may take, too: a target that a busy machine makes slow is there to be found."""
WINDOW = "1m"
"""In place of Grafana's own: a dozen scrapes."""
NOT_HERE = {
    "a GPU": {m.GPU_USED, m.GPU_MEMORY, m.GPU_BUSY},
    "a decoder, or an engine with a queue of its own": {m.QUEUE_RUNNING, m.KV_CACHE_USAGE, m.LOGITS},
    "something that breaks": {m.BACKEND_FAILURES, m.CACHE_FAILURES, m.RETRIES_REFUSED, m.HEDGES, m.REFUSALS, m.CLIENTS_GONE},
    "more users than are kept": {m.STATE_EVICTIONS, m.STATE_REJECTIONS, m.CACHE_EVICTIONS},
}
"""What would have to be there, or to happen, for these to be counted."""
WANTED = {series for metric in METRICS.values() for series in metric.series} - {
    series for absent in NOT_HERE.values() for metric in absent for series in metric.series
}
QUERIES = sorted(
    {expr for board in BOARDS.values() for row in board.rows.values() for panel in row for expr in panel.queries.values()}
    | {alert.expr for alert in ALERTS}
)


def needed(program: str) -> str:
    return shutil.which(program) or pytest.skip(f"{program} is not installed (apt-get install prometheus)")


@pytest.fixture(scope="module")
def prometheus(live: Live, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Prometheus, with genrec's rules, over every target that Ray names for this cluster."""
    program, folder, port = needed("prometheus"), tmp_path_factory.mktemp("prometheus"), free_port()
    scraped = {"job_name": "ray", "file_sd_configs": [{"files": [str(targets_of(live))]}]}
    often = {"scrape_interval": f"{SCRAPED_EVERY_S}s", "evaluation_interval": "1s"}
    document = {"global": often, "rule_files": [str(RULES)], "scrape_configs": [scraped]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(document))
    places = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("wb") as log, subprocess.Popen([program, *places], stdout=log, stderr=subprocess.STDOUT) as process:
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
                wait_until_ready(client, folder / "log")
                yield client
        finally:
            process.terminate()


def targets_of(live: Live) -> Path:
    """The file in which the cluster's head names them."""
    for process in psutil.Process(live.serving.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if found := re.search(r"--raylet_socket_name=(\S+)/sockets/", " ".join(process.cmdline())):
                return Path(found[1]) / "prom_metrics_service_discovery.json"
    raise AssertionError("no raylet below the process that serves")


def wait_until_ready(client: httpx.Client, log: Path) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        try:
            if client.get("/-/ready").status_code == 200:
                return
        except httpx.TransportError:
            assert time.monotonic() < deadline, log.read_text()[-2000:]
        time.sleep(0.2)


def result(client: httpx.Client, query: str) -> list[Mapping[str, object]]:
    answer = client.get("/api/v1/query", params={"query": query}).json()
    assert answer["status"] == "success", f"{query}: {answer}"
    found: list[Mapping[str, object]] = answer["data"]["result"]
    return found


def ask_everything(live: Live) -> None:
    """Users come, come again, are unknown or say what they did; an engine is passed over."""
    known = {"user_id": WATCHED, "behaviours": behaviours(*range(1, 9)), "request_time": 1_700_100_000, "k": 5}
    post(live, "recommend", **known, cache="refresh")
    post(live, "recommend", **known, cache="use")
    shown = post(live, "recommend", **{**known, "behaviours": behaviours(*range(1, 10))}, cache="bypass")["items"]
    post(live, "recommend", user_id="watched-by-nobody", behaviours=behaviours(10**6), k=5)
    post(live, "rank", user_id=WATCHED, behaviours=behaviours(1, 2, 3), candidates=["4", "5"])
    for item in (shown[0]["item_id"], "150"):
        post(live, "events", events=[{"user_id": WATCHED, "item_id": item, "action": "view"}])


def post(live: Live, route: str, **body: object) -> dict[str, list[dict[str, str]]]:
    response = httpx.post(f"{live.url}/v1/{route}", json=body, timeout=ANSWERED_WITHIN_S)
    assert response.is_success, response.text
    answer: dict[str, list[dict[str, str]]] = response.json()
    return answer


def test_promtool_takes_the_rules():
    done = subprocess.run([needed("promtool"), "check", "rules", str(RULES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def test_every_metric_of_a_dashboard_exists_in_a_live_scrape(live, prometheus):
    deadline, missing = time.monotonic() + FOUND_WITHIN_S, WANTED
    while missing:
        assert time.monotonic() < deadline, f"not scraped within {FOUND_WITHIN_S:g} s: {sorted(missing)}"
        ask_everything(live)
        time.sleep(2)
        missing = WANTED - set(prometheus.get("/api/v1/label/__name__/values").json()["data"])


def test_prometheus_computes_every_query_of_dashboards_and_alerts(live, prometheus):
    ask_everything(live)
    for query in QUERIES:
        result(prometheus, query.replace("$__rate_interval", WINDOW))
    asked = 'sum by (route) (ray_genrec_http_requests_total{route="/v1/recommend", status="200"})'
    # a scrape that took too long leaves no series until the next one
    until_right(lambda: [series["metric"] for series in result(prometheus, asked)], lambda seen: seen == [{"route": "/v1/recommend"}])


def test_a_histogram_is_found_whole_and_says_how_long_requests_took_on_average(live, prometheus):
    answered = 'ray_genrec_http_request_duration_seconds{}{{route="/v1/recommend", outcome="2xx"}}'
    bucket, count, total = (answered.format(end) for end in ("_bucket", "_count", "_sum"))

    def values(query: str) -> list[float]:
        return [float(series["value"][1]) for series in result(prometheus, query)]

    ask_everything(live)
    until_right(lambda: values(f"count by (replica) ({bucket})"), lambda seen: set(seen) == {len(m.SECONDS) + 1})
    until_right(lambda: values(f'sum({bucket[:-1]}, le="+Inf"}}) - sum({count})'), lambda seen: seen == [0])
    until_right(lambda: values(f"sum({total}) / sum({count})"), lambda seen: len(seen) == 1 and 0 < seen[0] < ANSWERED_WITHIN_S)


def test_no_alert_is_awake_where_all_is_well_and_the_rules_are_those_shipped(prometheus):
    rules = prometheus.get("/api/v1/rules").json()["data"]["groups"][0]["rules"]
    assert [rule["name"] for rule in rules] == [alert.name for alert in ALERTS]
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}, json.dumps(rules)
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]
