"""Three real Ray nodes on this machine: a node is killed under traffic, then the head, which comes back from Redis."""

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event

import httpx
import pytest
import yaml

from deployments.cli.local_cluster import LocalCluster
from deployments.cli.local_serve import is_ready
from tests.clusters import ABSENT
from tests.contract.test_shared_caches import running_redis
from tests.documents import ROOT
from tests.integration.conftest import PATIENT, behaviours
from tests.ports import free_port
from tests.waiting import eventually, until_right

pytestmark = pytest.mark.cluster
REQUESTS_PER_S = 10
RETRY_EVERY_S, RETRIED_FOR_S = 1.0, 60.0
HISTORY = {"user_id": "ada", "cache": "bypass", "behaviours": behaviours(3, 14, 15), "request_time": 1_700_100_000}


@pytest.fixture(scope="module")
def cluster(compiled_hstu, tmp_path_factory) -> Iterator[LocalCluster]:
    """A gateway and an encoder on each of two worker nodes; what the head knows is in Redis."""
    pytest.importorskip("redis", reason="redis is not installed; install genrec with its extra redis")
    directory = tmp_path_factory.mktemp("nodes")
    shutil.copytree(compiled_hstu.path.parent, directory / "tiny")
    changes = {
        "model_dir": str(directory / "tiny"),
        "cache": {"l2": "off"},
        "encoder": {"order": ["onnxruntime", "torch"]},
        "gateway": PATIENT,
    }
    with pytest.MonkeyPatch.context() as patch, running_redis(directory, free_port()) as redis:
        patch.setenv("PYTHONPATH", f"{ABSENT}{os.pathsep}{ROOT}")
        nodes = LocalCluster(two_of_each(directory), changes, nodes=3, redis=redis, directory=directory / "logs")
        with nodes as started:
            yield started


def two_of_each(directory: Path) -> Path:
    """ray_config.yaml with two gateways and two encoders, each on a node of its own as long as there are two."""
    document = yaml.safe_load((ROOT / "ray_config.yaml").read_text())
    document["http_options"]["request_timeout_s"] = 120  # what a busy machine may take
    for deployment in document["applications"][0]["deployments"]:
        if deployment["name"] in {"gateway", "encoder"}:
            deployment.pop("autoscaling_config", None)
            deployment["num_replicas"] = 2
    config = directory / "two_of_each.yaml"
    config.write_text(yaml.safe_dump(document))
    return config


@dataclass
class Tally:
    """What open traffic met: requests that were answered, and those that failed at one proxy, and then again and again at the others."""

    answered: int = 0
    retried: int = 0
    failed: list[str] = field(default_factory=list)


@contextmanager
def open_traffic(urls: list[str]) -> Iterator[Tally]:
    """So many requests a second, whatever becomes of those before, each to the next proxy in turn; one that fails is tried at the others
    until every proxy may have seen that a gateway's connections broke.

    A proxy that refuses connections is asked no more, as by any load balancer.
    """
    assert urls
    tally, stop, up = Tally(), Event(), list(urls)

    def attempt(url: str) -> str:
        try:
            response = client.post(f"{url}/v1/recommend", json=HISTORY)
        except httpx.TransportError as error:
            if isinstance(error, httpx.ConnectError):
                with suppress(ValueError):  # another caller has met it first
                    up.remove(url)
            return repr(error)
        return "" if response.status_code == 200 else f"{response.status_code} {response.text[:200]}"

    def ask(number: int) -> None:
        proxies = list(up)
        first = latest = attempt(asked := proxies[number % len(proxies)])
        given_up, tries = time.monotonic() + RETRIED_FOR_S, 0
        while latest and (tries == 0 or time.monotonic() < given_up):
            time.sleep(RETRY_EVERY_S)
            others = [url for url in up if url != asked] or proxies  # as is known by now
            latest = attempt(others[(number + tries) % len(others)])
            tries += 1
        tally.retried += bool(first)
        tally.answered += not latest
        tally.failed += [f"{first}, then {latest}"] if latest else []

    def drive() -> None:
        start, asking = time.monotonic(), list[Future[None]]()
        while not stop.wait(max(0.0, start + len(asking) / REQUESTS_PER_S - time.monotonic())):
            asking.append(callers.submit(ask, len(asking)))
        for one in asking:
            one.result()

    with httpx.Client(timeout=120) as client, ThreadPoolExecutor(32) as callers, ThreadPoolExecutor(1) as driver:
        driving = driver.submit(drive)
        try:
            yield tally
        finally:
            stop.set()
            driving.result()


def nodes_of(cluster: LocalCluster, deployment: str) -> list[str]:
    """Those of the replicas that run; none while Serve's controller does not answer."""
    return [replica["node_id"] for replica in cluster.replicas(deployment)]


def encoders(cluster: LocalCluster) -> set[int]:
    """The processes of those that run; none while Serve's controller does not answer."""
    return {replica["pid"] for replica in cluster.replicas("encoder")}


def test_replicas_are_spread_over_the_nodes_and_each_node_s_proxy_answers(cluster: LocalCluster):
    _, *workers = (node.node_id for node in cluster.nodes)
    for deployment in ("encoder", "gateway"):
        found = until_right(lambda name=deployment: nodes_of(cluster, name), bool)
        assert sorted(found) == sorted(workers), deployment
    eventually(lambda: len(cluster.urls) == 3, "three proxies answer")
    answers = [httpx.post(f"{url}/v1/recommend", json=HISTORY, timeout=120).json() for url in cluster.urls]
    assert all([item["item_id"] for item in answer["items"]] == [item["item_id"] for item in answers[0]["items"]] for answer in answers)


def test_a_killed_node_costs_no_request_and_its_replicas_come_back_elsewhere(cluster: LocalCluster):
    eventually(lambda: len(cluster.urls) == 3, "three proxies answer")
    lost = cluster.nodes[2]
    with open_traffic([node.url for node in cluster.nodes]) as tally:
        eventually(lambda: tally.answered > REQUESTS_PER_S, "all three answer")
        cluster.kill_node(2)
        assert not lost.alive
        for deployment in ("gateway", "encoder"):
            eventually(
                lambda name=deployment: len(nodes_of(cluster, name)) == 2 and lost.node_id not in nodes_of(cluster, name),
                f"two replicas of {deployment} on the nodes that are left",
            )
        since = tally.answered
        eventually(lambda: tally.answered > since + 2 * REQUESTS_PER_S, "they answer")
    assert tally.failed == []
    assert tally.retried > 0, "the proxy of the killed node went on answering"


def test_gateways_serve_on_while_the_head_is_gone_and_it_comes_back_from_redis(cluster: LocalCluster):
    before = until_right(lambda: encoders(cluster), lambda running: len(running) == 2)  # the killed node's is being replaced
    workers = until_right(lambda: [node.url for node in cluster.nodes[1:] if is_ready(node.url)], bool)
    with open_traffic(workers) as tally:
        cluster.kill_node(0)
        assert cluster.serve_status() == {}
        with_a_head = tally.answered
        eventually(lambda: tally.answered > with_a_head + 3 * REQUESTS_PER_S, "requests are answered without a head")
        cluster.restart_head()
        cluster.wait_until_running()
    assert tally.failed == []
    assert until_right(lambda: encoders(cluster), bool) == before, "the controller started new replicas beside those that served"
    assert httpx.post(f"{cluster.url}/v1/recommend", json=HISTORY, timeout=120).status_code == 200
