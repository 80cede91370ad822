"""A cluster to break: a model behind a real Serve with so many replicas of each deployment, its processes, its log, load on it."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.load import Load, Phase, Plan, Results, run
from benchmarks.load_bodies import bodies as requests
from cluster.bundle_store import BundleStore
from tests.clusters import Application, SharedCluster, fixed
from tests.waiting import eventually, json_of

DEPLOYMENTS = ("gateway", "encoder", "generator")
"""What is broken."""
REPLICA, CACHE_ACTOR, CONTROLLER = "ServeReplica:", "CacheActor", "ServeController"
PROXIES = ("haproxy", "ProxyActor", "HAProxyManager")
WARM_UP_S = 3.0
START_WITHIN_S = 240.0


@dataclass
class Served:
    """An application that runs on a shared cluster."""

    url: str
    model_dir: Path
    serving: Application
    bodies: tuple[str, ...] = ()
    capacities: dict[str, float] = field(default_factory=dict)

    # processes

    def processes(self, title: str) -> list[psutil.Process]:
        """Descendants whose title has this in it, the oldest first."""
        found = []
        for process in psutil.Process(self.serving.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if any(title in part for part in process.cmdline()[:1]):
                    found.append(process)
        return sorted(found, key=lambda process: process.pid)

    def replicas(self, deployment: str) -> list[psutil.Process]:
        return self.processes(f"{REPLICA}{self.serving.name}:{deployment}")

    def proxy(self) -> psutil.Process:
        """The process that holds the port: HAProxy, or Serve's own."""
        return next(found[0] for found in map(self.processes, PROXIES) if found)

    def running(self, deployment: str) -> set[int]:
        return self.serving.running(deployment)

    def wanted(self) -> dict[str, int]:
        """How many replicas of each deployment are to run."""
        return {entry["name"]: entry.get("num_replicas", 0) for entry in self.serving.entry["deployments"] if entry["name"] in DEPLOYMENTS}

    def is_complete(self) -> bool:
        return all(len(self.running(name)) == wanted for name, wanted in self.wanted().items())

    # questions

    def ask(self, **request: Any) -> httpx.Response:
        """Computed, not taken from the cache, unless `cache` says otherwise."""
        return httpx.post(f"{self.url}/v1/recommend", json={"user_id": "ada", "cache": "bypass", **request}, timeout=40)

    def stages(self) -> dict[str, dict[str, Any]]:
        return {stage["stage"]: stage for stage in json_of(f"{self.url}/v1/backends")["stages"]}

    def backend(self, stage: str, name: str) -> dict[str, Any]:
        return next(one for one in self.stages()[stage]["backends"] if one["name"] == name)

    # load

    def capacity(self, what: str = "", *, clients: int = 16, seconds: float = 5.0, **fields: Any) -> float:
        """Requests/s that so many callers get out of it who never wait; measured once for each `what`."""
        if what not in self.capacities:
            bodies = requests(self.model_dir, **fields) if fields else self.bodies
            phases = (Phase("warm-up", 0, WARM_UP_S), Phase("measured", 0, seconds))
            results = run(Plan(self.url, phases, bodies, clients=clients))
            assert not results.failed.any(), f"before anything was broken: {results.statuses()}"
            self.capacities[what] = results.phase("measured").throughput()
        return self.capacities[what]

    def load(self, *phases: Phase, bodies: tuple[str, ...] = (), **options: Any) -> Load:
        """Open-loop load, examined, Poisson arrivals; `options` are those of a Plan."""
        return Load(Plan(self.url, phases, bodies or self.bodies, **{"arrivals": "poisson", "examine": True, "timeout_s": 15.0, **options}))


@contextmanager
def served(
    cluster: SharedCluster,
    directory: Path,
    model_dir: Path,
    args: Mapping[str, Any],
    *,
    replicas: int | Mapping[str, int] = 1,
    deployments: Mapping[str, Mapping[str, Any]] | None = None,
    body: Mapping[str, Any] | None = None,
) -> Iterator[Served]:
    """ray_config.yaml with `args` over its own and so many replicas, no autoscaling, serving a copy of the model. A stage that the model
    does not have has none, unless `replicas` names it.

    `deployments`: further keys of a deployment; `body`: fields of the requests of the load.
    """
    copied = directory / "models" / model_dir.name
    shutil.copytree(model_dir, copied, ignore=shutil.ignore_patterns("events.db*"))
    numbers = dict.fromkeys(DEPLOYMENTS, replicas) | absent(model_dir) if isinstance(replicas, int) else {**absent(model_dir), **replicas}
    with cluster.application(fixed(numbers, deployments), {"model_dir": str(copied), **args}) as serving:
        one = Served(serving.url, copied, serving, requests(copied, **{"cache": "bypass", **(body or {})}))
        eventually(one.is_complete, "every replica runs", START_WITHIN_S, 1)
        yield one


def absent(model_dir: Path) -> dict[str, int]:
    """No replica for each stage that the model does not have."""
    manifest = BundleStore(model_dir).open_last_good()[0].manifest
    return {stage: 0 for stage, record in (("generator", manifest.decoder), ("ranker", manifest.ranker)) if record is None}


def seconds_until(holds: Callable[[], Any], within_s: float) -> float:
    """As `eventually`, infinity where it never holds."""
    try:
        return eventually(holds, "", within_s, every_s=0.25)
    except AssertionError:
        return float("inf")


def before_and_after(results: Results, fault_s: float, event_s: float) -> tuple[Results, Results]:
    """The requests answered before the fault, less those of a first second, and those under way at the fault or due in so many seconds."""
    over = results.due + results.latency < fault_s
    return results.where(over & (results.due >= 1.0)), results.where(~over & (results.due < fault_s + event_s))
