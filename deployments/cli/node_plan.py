"""How the nodes of a trial cluster are started: their ports, environments and `ray start` commands."""

import json
import os
import secrets
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from cluster import ports, profile
from cluster.errors import ConfigError
from cluster.profile import ProfileName
from deployments.cli.serve import serve_command

MOST_NODES = 8
OBJECT_STORE_BYTES = 100 * 2**20
# Where each port stands in the cluster's block; the first ones, and the upper three quarters, are HAProxy's and the gateways'.
GCS, DASHBOARD, CLIENT_SERVER, AGENTS, PROXIES = 20, 21, 22, 24, 36


@dataclass(frozen=True, slots=True)
class NodePlan:
    """`environment`: what all nodes and every client of the cluster need; it holds the token. `temporary`: Ray's directory."""

    nodes: int
    cpus: int
    port: int
    block: int
    temporary: str
    durable: bool
    environment: dict[str, str] = field(repr=False)

    @property
    def address(self) -> str:
        """What `ray.init` takes."""
        return f"127.0.0.1:{self.block + GCS}"

    @property
    def dashboard(self) -> str:
        return f"http://127.0.0.1:{self.block + DASHBOARD}"

    def url(self, index: int) -> str:
        """Where the proxy of that node listens."""
        return f"http://127.0.0.1:{self.block + PROXIES + index if index else self.port}"

    def command(self, index: int) -> list[str]:
        """`ray start` for that node; node 0 is the head."""
        ray = str(Path(serve_command()).with_name("ray"))
        cpus = self.cpus if index or self.nodes == 1 else 0
        settings = {
            # by which the node is recognised: Serve takes --node-name for an address
            "resources": json.dumps({f"genrec-node-{index}": 1}),
            "num-cpus": cpus,
            "num-gpus": 0,
            "object-store-memory": OBJECT_STORE_BYTES,
            # the system chooses: Ray's own ranges are for one node a machine
            "min-worker-port": 0,
            "max-worker-port": 0,
            "dashboard-agent-listen-port": self.block + AGENTS + index,
            # a process that sends workers' output to drivers, of which there are none here; the log files have the output
            "include-log-monitor": False,
            **(self._head() if index == 0 else {"address": self.address}),
        }
        flags = ["--block", "--disable-usage-stats", *(["--head"] if index == 0 else [])]
        return [ray, "start", *flags, *(f"--{name}={value}" for name, value in settings.items())]

    def node_environment(self, index: int) -> dict[str, str]:
        """The environment of that `ray start`, which all its processes inherit."""
        # the head's proxy has its port from the Serve configuration
        own = {"RAY_SERVE_WORKER_PROXY_HTTP_PORT": str(self.block + PROXIES + index)} if index else {}
        outside = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return {**profile.node_ports(self.block, index), **outside, **self.environment, **own}

    def _head(self) -> dict[str, object]:
        return {
            "port": self.block + GCS,
            "dashboard-port": self.block + DASHBOARD,
            "ray-client-server-port": self.block + CLIENT_SERVER,
            "temp-dir": self.temporary,
        }


def plan_nodes(nodes: int, cpus: int, port: int | None, redis: str | None, name: ProfileName | None) -> NodePlan:
    """Free ports, a token and a directory for a cluster of so many nodes. Raises ConfigError."""
    if not 1 <= nodes <= MOST_NODES:
        raise ConfigError(f"a trial cluster has 1 to {MOST_NODES} nodes, not {nodes}")
    tables = {} if redis is None else durable_head(redis)
    block = profile.free_block()
    port = port or block + PROXIES
    try:
        wanted = profile.environment(name, http_port=port)
        # Not under a directory of the caller's: the paths of sockets may have 107 characters at most.
        temporary = tempfile.mkdtemp(prefix="genrec-", dir=profile.temporary_directory())
    except BaseException:
        ports.release(block)
        raise
    environment = {
        **profile.apart(block, Path(temporary)),
        **profile.SHARED_MACHINE,
        **{variable: os.environ.get(variable, value) for variable, value in wanted.items()},
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        **tables,
    }
    return NodePlan(nodes, cpus, port, block, temporary, redis is not None, environment)


def durable_head(redis: str) -> dict[str, str]:
    """The variables by which the head keeps its tables in Redis, under a name of this cluster's own. Raises ConfigError."""
    address = redis.removeprefix("redis://").removesuffix("/0").rstrip("/")
    if address.count(":") != 1 or not address.rpartition(":")[2].isdigit():
        raise ConfigError(f"redis must be such as redis://127.0.0.1:6379, not {redis!r}")
    return {
        "RAY_REDIS_ADDRESS": address,
        "RAY_external_storage_namespace": f"genrec-{secrets.token_hex(8)}",
        "RAY_gcs_rpc_server_reconnect_timeout_s": "600",  # how long nodes wait for a head that is gone before they end themselves
    }
