"""Several real Ray nodes on this machine, for trials: each a `ray start` with a raylet, workers, a proxy and ports of its own.

    with LocalCluster(Path("ray_config.yaml"), {"model_dir": "models/ml-100k"}, nodes=3) as cluster:
        httpx.post(f"{cluster.url}/v1/recommend", json=...)
        cluster.kill_node(2)

Node 0 is the head. It runs a proxy and Serve's controller but no replica that asks for a CPU, as it should on a cluster of machines.
Every node that has a replica has a proxy. With `redis`, the head's tables outlive it: `kill_node(0)`, later `restart_head()`.
"""

import json
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx

from cluster import ports
from cluster.disk import remove_whole, write_whole
from cluster.errors import ConfigError
from cluster.private_file import private
from cluster.profile import ProfileName, open_files
from deployments.cli.local_serve import READY_WITHIN_S, is_ready, local_document, tail
from deployments.cli.node_plan import PROXIES, NodePlan, plan_nodes
from deployments.cli.processes import GONE_WITHIN_S, boot_id, kill_session, session_members

NODE_WITHIN_S = 240.0
POLL_S = 0.2
START_TRIES = 6
"""A raylet gives its agent 15 s to import what it needs; on two busy cores that was too short three times in a row."""
ENDED = "ended"
TOO_SLOW = "timed out during startup"
"""What Ray says where a node took longer than half a minute, which cannot be changed and a busy machine may need."""
STATE_FILE = "cluster.json"
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Node:
    """`pid` leads the session of all the node's processes, `node_id` is Ray's name for it, `url` is where its own proxy listens.

    Until it has joined, `node_id` is "" or, of a node that is started again, the name that it had before.
    """

    index: int
    pid: int
    node_id: str
    url: str

    @property
    def alive(self) -> bool:
        return bool(session_members(self.pid))


class LocalCluster:
    """The application that `config` describes, with the keys of `changes` in place of its own, on nodes that listen on 127.0.0.1 only.

    `cpus`: how many every node but the head offers to Ray. `profile`: one of `cluster.profile`. `redis`: where the head keeps the tables
    that must outlive it, such as redis://127.0.0.1:6379. `directory`: for the logs (Ray's, once the cluster stops) and for `find`'s state.
    The `with` block begins once the application runs and the head's proxy answers. Raises ConfigError where a node does not start, the
    configuration or the model is refused, or nothing is ready in time; the message ends with a log's last lines.
    """

    _children: tuple[subprocess.Popen[bytes], ...] = ()  # none where another process started the nodes

    def __init__(
        self,
        config: Path,
        changes: Mapping[str, Any],
        *,
        nodes: int = 3,
        cpus: int = 8,
        port: int | None = None,
        redis: str | None = None,
        profile: ProfileName | None = None,
        directory: Path | None = None,
    ) -> None:
        self.plan = plan_nodes(nodes, cpus, port, redis, profile)
        self.directory = directory or Path(self.plan.temporary)
        self.nodes: list[Node] = []
        try:
            self.document = local_document(config, changes, self.plan.port)
            ports.require_free(self.plan.port)
        except BaseException:
            self._give_up_places()
            raise

    @classmethod
    def find(cls, directory: Path) -> "LocalCluster":
        """The cluster that was started with that directory, perhaps by another process. Raises ConfigError where there is none, and where
        its state cannot be read.
        """
        try:
            state = json.loads((directory / STATE_FILE).read_text())
        except FileNotFoundError:
            raise ConfigError(
                f"no trial cluster runs here: {directory / STATE_FILE} does not exist; start one: genrec cluster up"
            ) from None
        except ValueError as error:
            cure = "end the nodes that run, `ray start` with genrec-node in the arguments (pgrep -af genrec-node), and remove the file"
            raise ConfigError(f"{directory / STATE_FILE} is no state of a trial cluster ({error}); {cure}") from error
        if state["boot"] != boot_id():  # other processes may have the numbers of its processes now
            (directory / STATE_FILE).unlink()
            raise ConfigError("no trial cluster runs here: the machine was started anew since; start one: genrec cluster up")
        found = cls.__new__(cls)
        found.plan, found.directory = NodePlan(**state["plan"]), directory
        found.nodes, found.document = [Node(**node) for node in state["nodes"]], state["document"]
        return found

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where the head's proxy answers."""
        return self.plan.url(0)

    @property
    def urls(self) -> list[str]:
        """Where proxies answer now, the head's first."""
        return [node.url for node in self.nodes if is_ready(node.url)]

    def start(self) -> None:
        """Start the nodes, deploy, and wait until the application runs; they outlive this process unless `stop` ends them."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for index in range(self.plan.nodes):  # one after the other: each needs a whole core while it starts
                self._start_node(index)
            self.deploy(self.document)
        except BaseException:
            self.stop()
            raise

    def deploy(self, document: Mapping[str, Any], *, wait: bool = True) -> None:
        """Give Serve this configuration and, unless told otherwise, wait until the application runs."""
        self._save(document)
        self.document = dict(document)
        response = self._ask("PUT", "/api/serve/applications/", within_s=READY_WITHIN_S, json=self.document)
        if response.status_code != 200:
            raise ConfigError(f"Serve refused the configuration: {response.text[-2000:]}")
        if wait:
            self.wait_until_running()

    def wait_until_running(self) -> None:
        """Return once every deployment has its replicas and the head's proxy answers. Raises ConfigError."""

        def running() -> bool:
            applications = self.serve_status().get("applications", {}).values()
            if failed := [one["message"] for one in applications if one["status"] == "DEPLOY_FAILED"]:
                raise ConfigError(f"the application could not be deployed: {failed[0][-3000:]}")
            return bool(applications) and all(one["status"] == "RUNNING" for one in applications) and is_ready(self.url)

        self._wait(running, f"the application does not run: {self.url} is not ready", READY_WITHIN_S, self._log(0))

    def serve_status(self) -> dict[str, Any]:
        """The status that Serve's controller gives: `applications`, `proxies` and so on; {} while it does not answer."""
        try:
            response = self._ask("GET", "/api/serve/applications/", within_s=0)
        except ConfigError:
            return {}
        return dict(response.json()) if response.status_code == 200 else {}

    def replicas(self, deployment: str | None = None) -> list[dict[str, Any]]:
        """Serve's replicas that run: `deployment`, `node_id`, `pid` and so on."""
        applications = self.serve_status().get("applications", {}).values()
        deployments = [item for one in applications for item in one["deployments"].items() if deployment in {None, item[0]}]
        return [
            {**replica, "deployment": name}
            for name, details in deployments
            for replica in details["replicas"]
            if replica["state"] == "RUNNING"
        ]

    def kill_node(self, index: int) -> None:
        """End all processes of that node at once with kill -9; 0 is the head. Raises ConfigError where there is no such node."""
        if not 0 <= index < len(self.nodes):
            raise ConfigError(f"there is no node {index}; there are 0 to {len(self.nodes) - 1}")
        kill_session(self.nodes[index].pid)
        self._reap()

    def restart_head(self) -> None:
        """Start the head again, after killing what is left of it; it finds its tables in Redis. Raises ConfigError without `redis`."""
        if not self.plan.durable:
            raise ConfigError("a head that keeps its tables in memory cannot come back; start the cluster with redis (--redis URL)")
        # Ray would take the living nodes, which name the head's address, for a head that runs
        (Path(self.plan.temporary) / "ray_current_cluster").unlink(missing_ok=True)
        self.start_node(0)

    def start_node(self, index: int) -> None:
        """Start a node that was killed again; it comes with an empty object store and no replicas."""
        self.kill_node(index)
        self._start_node(index)

    def stop(self) -> None:
        """End every process of every node, and remove Ray's files and what the head keeps in Redis."""
        for node in self.nodes:
            kill_session(node.pid)
        for child in self._children:  # one that was started, and not yet kept
            kill_session(child.pid)
        for child in self._children:
            child.wait(GONE_WITHIN_S)
        self._forget()
        self._keep_logs()
        self._give_up_places()
        remove_whole(self.directory / STATE_FILE)

    def _start_node(self, index: int) -> None:
        """Start a node and wait until it has joined; on a busy machine, again: Ray waits half a minute, and no setting changes it."""
        before = next((node.node_id for node in self.nodes if node.index == index), "")
        for tries_left in reversed(range(START_TRIES)):
            child = self._spawn(index)
            try:
                self._keep(Node(index, child.pid, before, self.plan.url(index)))
            except OSError:  # what is not kept could not be found and ended
                kill_session(child.pid)
                raise
            node_id = self._wait(partial(self._node_id, index, child), f"node {index} did not join", NODE_WITHIN_S, self._log(index))
            if node_id != ENDED:
                self._keep(Node(index, child.pid, node_id, self.plan.url(index)))
                return
            kill_session(child.pid)
            if not tries_left or TOO_SLOW not in self._log(index).read_text(errors="replace"):
                raise ConfigError(f"`ray start` of node {index} ended with status {child.returncode}; {tail(self._log(index))}")

    def _keep(self, node: Node) -> None:
        """Have the node in the state for `find`, in place of what it was: it is found and can be ended, however this process ends."""
        self.nodes[node.index : node.index + 1] = [node]
        self._save(self.document)

    def _spawn(self, index: int) -> subprocess.Popen[bytes]:
        command, environment = self.plan.command(index), self.plan.node_environment(index)
        resource.setrlimit(resource.RLIMIT_NOFILE, open_files())  # which the node's processes inherit
        with self._log(index).open("wb") as output:
            # a session of its own: its processes are found by it, and Ctrl-C in the terminal does not reach them
            claims = ports.descriptors(self.plan.port, self.plan.block)
            child = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=environment, pass_fds=claims
            )
        self._children = (*self._children, child)
        return child

    def _log(self, index: int) -> Path:
        return self.directory / f"node-{index}.log"

    def _node_id(self, index: int, child: subprocess.Popen[bytes]) -> str:
        """Ray's name for the node that `child` starts, "" as long as it has none, or ENDED."""
        if child.poll() is not None:
            return ENDED
        try:
            response = self._ask("GET", "/api/v0/nodes?limit=1000", within_s=0)
        except ConfigError:
            return ""
        known = {node.node_id for node in self.nodes if node.index == index}
        rows = response.json()["data"]["result"]["result"] if response.status_code == 200 else []
        found = [row["node_id"] for row in rows if f"genrec-node-{index}" in row["resources_total"] and row["state"] == "ALIVE"]
        return next((node_id for node_id in found if node_id not in known), "")

    def _ask(self, method: str, path: str, *, within_s: float = 60.0, **request: Any) -> httpx.Response:
        """Ask the head's dashboard, again and again while it is starting. Raises ConfigError where it does not answer `within_s`."""
        headers = {"Authorization": f"Bearer {self.plan.environment['RAY_AUTH_TOKEN']}"}
        deadline = time.monotonic() + within_s
        while True:
            try:
                response = httpx.request(method, f"{self.plan.dashboard}{path}", headers=headers, timeout=30.0, **request)
            except httpx.TransportError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if response.status_code not in {404, 503} and not (response.status_code == 500 and within_s):
                    return response
                problem = f"{response.status_code}: {response.text[-1000:]}"
            if time.monotonic() >= deadline:
                raise ConfigError(f"Ray's dashboard at {self.plan.dashboard} does not answer {method} {path} ({problem})")
            time.sleep(POLL_S)

    def _wait(self, ready: Callable[[], Found], otherwise: str, within_s: float, log: Path) -> Found:
        deadline = time.monotonic() + within_s
        while not (value := ready()):
            if time.monotonic() > deadline:
                raise ConfigError(f"{otherwise} within {within_s:g} s; {tail(log)}")
            time.sleep(POLL_S)
        return value

    def _save(self, document: Mapping[str, Any]) -> None:
        """Write the state for `find`, readable by this user alone: it holds the cluster's token."""
        state = {"plan": asdict(self.plan), "nodes": [asdict(node) for node in self.nodes], "document": document, "boot": boot_id()}
        write_whole(self.directory / STATE_FILE, json.dumps(state), opener=private)

    def _give_up_places(self) -> None:
        """Remove Ray's directory, and leave the ports to others."""
        shutil.rmtree(self.plan.temporary, ignore_errors=True)
        ports.release(self.plan.block)
        ports.release(self.plan.block + PROXIES)  # the default port, which has a claim of its own

    def _reap(self) -> None:
        for child in self._children:
            child.poll()

    def _keep_logs(self) -> None:
        """Move Ray's logs into the given directory, in place of those of an earlier cluster."""
        logs, kept = Path(self.plan.temporary) / "session_latest" / "logs", self.directory / "ray"
        if self.directory != Path(self.plan.temporary) and logs.is_dir():
            shutil.rmtree(kept, ignore_errors=True)
            shutil.move(logs.resolve(), kept)

    def _forget(self) -> None:
        """Remove the head's tables from Redis."""
        if not self.plan.durable:
            return
        from ray._private.gcs_utils import cleanup_redis_storage  # noqa: PLC0415 - Ray is loaded where it is needed

        host, _, port = self.plan.environment["RAY_REDIS_ADDRESS"].partition(":")
        cleanup_redis_storage(host, int(port), "", use_ssl=False, storage_namespace=self.plan.environment["RAY_external_storage_namespace"])
