"""Ports for servers that tests start."""

from random import Random

from cluster import ports
from cluster.profile import PAST_BLOCKS

CLIENTS = 32_768
"""From here the system gives ports to outgoing connections: one found free there is soon somebody's."""


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on and that was given to no process which still runs, this one included."""
    port = ports.choose(Random().sample(range(PAST_BLOCKS, CLIENTS), CLIENTS - PAST_BLOCKS), host="127.0.0.1")
    if port is None:
        raise LookupError(f"every port of {PAST_BLOCKS}-{CLIENTS} is taken or was given out")
    return port
