"""Ports for servers that tests start."""

from random import Random

from cluster.profile import PAST_BLOCKS, is_free

CLIENTS = 32_768
"""From here the system gives ports to outgoing connections: one found free there is soon somebody's."""
_left = Random().sample(range(PAST_BLOCKS, CLIENTS), CLIENTS - PAST_BLOCKS)


def free_port() -> int:
    """A port of 127.0.0.1 that nothing listens on and this process has not been given before."""
    while _left:
        port = _left.pop()
        if is_free(port, "127.0.0.1"):
            return port
    raise LookupError(f"every port of {PAST_BLOCKS}-{CLIENTS} is taken or was given out")
