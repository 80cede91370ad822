"""Take new connections many at a time.

uvloop takes one new connection in each turn of its loop (libuv does, since 1.45). Where a turn lasts milliseconds, as the engine of a
colocated gateway computes a batch in it, that is a few hundred connections a second: those of a burst wait for seconds, passed by requests
on connections that are there already. A socket that the loop knows by several descriptors is asked for a connection by each of them.
"""

from socket import socket

from uvicorn import Server

DESCRIPTORS = 16
_start = Server.startup


def take_many_connections() -> None:
    """Have every uvicorn server that starts in this process, as Serve starts a gateway's, take up to DESCRIPTORS connections a turn."""
    Server.startup = _start_with_more  # type: ignore[assignment]  # Serve has no setting for it


async def _start_with_more(server: Server, sockets: list[socket] | None = None) -> None:
    more = [one.dup() for one in sockets or () for _ in range(DESCRIPTORS - 1)]  # uvicorn's listeners close them
    await _start(server, sockets and [*sockets, *more])
