"""Ray clusters that test files share. Each starts when a first test deploys to it, and ends after the last test that needs it.

    fast       HAProxy before the gateways; spans go to `fast.collector`
    default    Serve's own proxy
    bare       a Ray without Serve, in the process of the tests

A test file deploys an application with a model of its own, under a prefix of its own, and takes it away again:

    with fast.application(fixed(), {"model_dir": ...}) as served:
        httpx.post(f"{served.url}/v1/recommend", json=...)

`tests/scheduling.py` says which files need which, so that the tests of a cluster run one after the other in one process.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from cluster.config_file import read_document
from cluster.profile import ProfileName
from deployments.cli.local_cluster import LocalCluster
from deployments.cli.local_serve import is_ready
from deployments.cli.node_plan import plan_nodes
from deployments.shipped import RAY_CONFIG
from tests.bare_ray import BareRay
from tests.collector import Collector
from tests.documents import ROOT
from tests.waiting import until_right

CPUS = 0.05
"""What Ray counts for a replica: nothing here may wait for a core that Ray thinks is taken."""
CPUS_OF_A_NODE = 8
READY_WITHIN_S, ANSWER_WITHIN_S = 800.0, 300.0
ABSENT = ROOT / "tests" / "absent"
"""Before all else on a cluster's path: what its processes must not import, though it is installed."""
TRACING = {"enabled": True, "exporter_import_path": "deployments.tracing:otlp", "sampling_ratio": 0.0}
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(map(str, (ABSENT, ROOT, ROOT / "examples"))),
    # a proxy answers late where the machine is busy; that its process has died is noticed by other means
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
    "OTEL_BSP_SCHEDULE_DELAY": "500",
}
PATIENT_PROXY = {
    "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": "600",  # more than all deadlines of a patient gateway together
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "600",
    "GENREC_HAPROXY_HEADERS_S": "300",
    "GENREC_HAPROXY_BODY_S": "300",
}
"""A HAProxy that does not take a gateway for stopped which a busy machine makes slow: it would begin the request anew at another. Nor does
it close the connections of a test that asks for hundreds of answers at once, and sends the last of them late.
"""


class Node(LocalCluster):
    """One node without an application."""

    def __init__(self, profile: ProfileName, directory: Path, document: Mapping[str, Any]) -> None:
        self.plan = plan_nodes(1, CPUS_OF_A_NODE, None, None, profile)
        self.directory, self.nodes = directory, []
        self.document = {**document, "applications": []}
        self.document["http_options"] = {**document["http_options"], "host": "127.0.0.1", "port": self.plan.port}

    def start(self) -> None:
        try:
            self._start_node(0)
        except BaseException:
            self.stop()
            raise


class SharedCluster:
    """Runs what tests deploy to it. `directory` is where it was started, and where its logs are in the end; `patient`: by PATIENT_PROXY."""

    def __init__(self, profile: ProfileName, directory: Path, *, patient: bool = False) -> None:
        self._profile, self.directory = profile, directory
        self._environment = {**ENVIRONMENT, **(PATIENT_PROXY if patient else {})}
        self.collector = Collector()
        self._node: Node | None = None
        self._numbers = count(1)

    @property
    def node(self) -> Node:
        """Started where it does not run."""
        if self._node is None:
            self.collector.start()
            try:
                self._node = self._started()
            except BaseException:
                self.collector.stop()
                raise
        return self._node

    @property
    def pid(self) -> int:
        """The process of which all others of the cluster descend."""
        return self.node.nodes[0].pid

    @property
    def entries(self) -> list[dict[str, Any]]:
        """What is deployed."""
        return list(self.node.document["applications"])

    def put(self, entries: list[dict[str, Any]]) -> None:
        """Have Serve run these applications and no others, sooner or later."""
        self.node.deploy({**self.node.document, "applications": entries}, wait=False)

    @contextmanager
    def application(self, document: Mapping[str, Any], args: Mapping[str, Any] | None = None) -> Iterator["Application"]:
        """The application of a Serve configuration, with `args` over its own, once it is ready."""
        (entry,) = deepcopy(document["applications"])
        name = f"{entry['name']}-{next(self._numbers)}"
        entry |= {"name": name, "route_prefix": f"/{name}", "args": {**(entry.get("args") or {}), **(args or {})}}
        one = Application(self, name, f"{self.node.url}/{name}", entry)
        try:
            one.deploy(entry)
            one.wait_until_ready()
            yield one
        finally:
            if self._node is not None:
                self.put([other for other in self.entries if other["name"] != name])

    def logs(self) -> str:
        """What Ray's processes have written so far."""
        logs = Path(self.node.plan.temporary) / "session_latest" / "logs"
        return "\n".join(file.read_text(errors="replace") for file in logs.rglob("*") if file.is_file())

    def end(self) -> None:
        if self._node is not None:
            self._node.stop()
            self._node = None
            self.collector.stop()

    def _started(self) -> Node:
        document = {**read_document(RAY_CONFIG), **({"tracing_config": TRACING} if self._profile == "fast" else {})}
        document["http_options"] |= {} if self._profile == "fast" else {"request_timeout_s": 120}  # what a busy machine may take
        with pytest.MonkeyPatch.context() as patch, chdir(self.directory):
            for name, value in {**self._environment, "OTEL_EXPORTER_OTLP_ENDPOINT": self.collector.url}.items():
                patch.setenv(name, value)
            node = Node(self._profile, self.directory / "logs", document)
            node.directory.mkdir(exist_ok=True)
            node.start()
        return node


@dataclass(frozen=True)
class Application:
    """An application on a shared cluster. `entry` is its part of the Serve configuration."""

    cluster: SharedCluster
    name: str
    url: str
    entry: dict[str, Any]

    @property
    def pid(self) -> int:
        """The process of which the replicas descend, and all others of the cluster."""
        return self.cluster.pid

    def running(self, deployment: str) -> set[int]:
        """The processes of a deployment's replicas that Serve gives requests to."""
        return self.all_running()[deployment]

    def all_running(self) -> dict[str, set[int]]:
        """Those of each deployment, as Serve tells them at one time."""
        told = {name: details["replicas"] for name, details in self._status()["deployments"].items()}
        return {name: {one["pid"] for one in replicas if one["state"] == "RUNNING"} for name, replicas in told.items()}

    def deploy(self, entry: Mapping[str, Any]) -> None:
        """Have Serve run it so, sooner or later."""
        self.cluster.put([*(other for other in self.cluster.entries if other["name"] != self.name), dict(entry)])

    def wait_until_ready(self) -> None:
        until_right(self.cluster.node.serve_status, self._is_ready, READY_WITHIN_S, every_s=0.3)

    def _is_ready(self, told: Mapping[str, Any]) -> bool:
        status = told.get("applications", {}).get(self.name)
        if status is None:
            return False
        assert status["status"] != "DEPLOY_FAILED", status["message"][-3000:]
        return status["status"] == "RUNNING" and is_ready(self.url)

    def _status(self) -> dict[str, Any]:
        """Raises KeyError where Serve does not know the application (yet)."""
        told = until_right(self.cluster.node.serve_status, bool, within_s=ANSWER_WITHIN_S)
        status: dict[str, Any] = told["applications"][self.name]
        return status


def fixed(
    replicas: int | Mapping[str, int] = 1, deployments: Mapping[str, Mapping[str, Any]] | None = None, config: Path = RAY_CONFIG
) -> dict[str, Any]:
    """A shipped configuration with a fixed number of replicas of each deployment; an integer is of those that `replicas` can break.

    0 replicas: for a stage that the model does not have, which would have one that idles. `deployments`: further keys of a deployment.
    """
    document = read_document(config)
    for deployment in document["applications"][0]["deployments"]:
        name = deployment["name"]
        if name != "switchboard":
            deployment.pop("autoscaling_config", None)
            wanted = dict.fromkeys(("gateway", "encoder", "generator"), replicas) if isinstance(replicas, int) else replicas
            deployment.update(_fixed_number(wanted.get(name, 1)))
            deployment["ray_actor_options"] = {"num_cpus": CPUS}
        deployment.update((deployments or {}).get(name, {}))
    return document


def _fixed_number(replicas: int) -> dict[str, Any]:
    """Serve takes no 0 for a number, but does as the least one of a deployment that may grow."""
    none = {"min_replicas": 0, "initial_replicas": 0, "max_replicas": 1}
    return {"num_replicas": replicas} if replicas else {"autoscaling_config": none}


_shared: list[SharedCluster | BareRay] = []


def end_all() -> None:
    """End what runs; a test that deploys to it later starts it again."""
    for cluster in _shared:
        cluster.end()


def _sharing(profile: ProfileName, factory: pytest.TempPathFactory, *, patient: bool) -> Iterator[SharedCluster]:
    cluster = SharedCluster(profile, factory.mktemp(profile), patient=patient)
    _shared.append(cluster)
    yield cluster
    cluster.end()


@pytest.fixture(scope="session")
def fast(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    yield from _sharing("fast", tmp_path_factory, patient=not request.config.getoption("--chaos-long", default=False))


@pytest.fixture(scope="session")
def default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedCluster]:
    yield from _sharing("default", tmp_path_factory, patient=False)


@pytest.fixture(scope="session")
def _bare_ray() -> Iterator[BareRay]:
    _shared.append(one := BareRay())
    yield one
    one.end()


@pytest.fixture
def bare(_bare_ray: BareRay) -> None:
    """This process is connected to a Ray."""
    _bare_ray.start()
