"""The program that `genrec serve` becomes: `serve run` of a file, which ends in order at SIGTERM and SIGHUP as at Ctrl-C.

    python -m deployments.cli.run FILE [ADDRESS [later]]

ADDRESS: given by LocalServe, which holds the other end of standard input. Where that ends, as LocalServe's process was killed, this one
ends in order.

later: Ray and Serve start at once, and FILE is served, as it then is, when a line comes on standard input: their start, which takes a
while, need not wait for the model.

`serve run` alone ends its replicas and proxies in order at a KeyboardInterrupt only: at SIGTERM, by which systemd, Docker and supervisors
stop a process, they are killed with Ray. And programs that a script starts in the background ignore SIGINT.
"""

import os
import signal
import sys
import threading
from pathlib import Path

import ray
import yaml
from ray import serve
from ray.serve._private import api
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.config import gRPCOptions
from ray.serve.schema import ServeDeploySchema
from ray.serve.scripts import cli

from deployments.cli.signals import end_in_order

PROXY_WITHIN_S = 300
"""How long the first proxy may take to start: Serve's own minute is not enough on a busy machine."""


def main(config: str, address: str | None = None, later: str = "") -> None:
    """Serve the file on the cluster at `address`; without one on that of RAY_ADDRESS, or on one that is started here."""
    end_in_order()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})  # in Ray's processes, too: Serve is ended before them
    # with None in place of "local" Ray joins a cluster that `ray start` left on this machine
    ray.init(address=address or os.environ.get("RAY_ADDRESS") or "local", namespace=SERVE_NAMESPACE)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
    vars(api).update(HTTP_PROXY_TIMEOUT=PROXY_WITHIN_S)
    end_in_order()  # Ray has set a handler of its own
    if later:
        _start(ServeDeploySchema.model_validate(yaml.safe_load(Path(config).read_text())))
        if not sys.stdin.readline():
            serve.shutdown()  # type: ignore[no-untyped-call]
            sys.exit("what was to be served never came")
    if address:
        threading.Thread(target=end_with_input, daemon=True).start()
    cli(["run", config])


def _start(config: ServeDeploySchema) -> None:
    """Start Serve's controller and proxies as `serve run` does, which then finds them running."""
    api.serve_start(
        http_options=config.http_options.model_dump(),
        proxy_location=config.proxy_location,
        grpc_options=gRPCOptions(**config.grpc_options.model_dump()),
        controller_options=config.controller_options,
    )


def end_with_input() -> None:
    """Read standard input until it ends, and end this process in order then."""
    while os.read(sys.stdin.fileno(), 1):  # `sys.stdin` has a lock, and Python does not end while a thread has that
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    main(*sys.argv[1:])
