"""The socket at which the door listens: a TCP port, or a file that only its owner may open."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from errno import EADDRINUSE, ECONNREFUSED
from pathlib import Path
from time import monotonic

from cluster.errors import ConfigError

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
BIND_WITHIN_S, BIND_INTERVAL_S = 30.0, 0.2
"""How long the door tries to bind: a replica that is replaced frees the address only once it has answered its requests."""
READ_AHEAD = 2**14
"""About how many bytes of a connection are read before they are asked for."""


async def listen(address: str, serve: Serve) -> asyncio.Server:
    """A server that listens at `tcp://HOST:PORT` or `ipc://FILE` and calls `serve` for each connection. Raises ConfigError where that is
    not possible.
    """
    until = monotonic() + BIND_WITHIN_S
    while (server := await _bound(address, serve, last_try=monotonic() > until)) is None:  # noqa: ASYNC110 - nothing signals that it is free
        await asyncio.sleep(BIND_INTERVAL_S)
    return server


async def _bound(address: str, serve: Serve, *, last_try: bool) -> asyncio.Server | None:
    """The server that listens at the address; None where the address is still in use, unless this is the last try."""
    scheme, _, at = address.partition("://")
    try:
        if scheme == "tcp":
            host, _, port = at.rpartition(":")
            return await asyncio.start_server(serve, host.strip("[]"), int(port), limit=READ_AHEAD)
        return await asyncio.start_unix_server(serve, sock=_unix_socket(at), limit=READ_AHEAD)
    except OSError as error:
        if error.errno == EADDRINUSE and not last_try:
            return None
        cure = "give zeromq.address one of this node's, on a port that is free"
        raise ConfigError(f"zeromq cannot listen at {address} ({error}); {cure}") from error


def _unix_socket(path: str) -> socket.socket:
    """A bound Unix socket. Only its owner may open its file; one that nothing listens at any more is replaced. Raises OSError, EADDRINUSE
    where a process listens there.
    """
    made = socket.socket(socket.AF_UNIX)
    try:
        _remove_if_left(path)
        os.fchmod(made.fileno(), 0o600)  # before `bind`, which makes the file
        made.bind(path)
    except OSError:
        made.close()
        raise
    return made


def _remove_if_left(path: str) -> None:
    """Remove a socket's file that an earlier replica has left."""
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX) as asking:
            asking.setblocking(False)
            if asking.connect_ex(path) == ECONNREFUSED:  # any other outcome is that of a process which listens, or of another user's file
                Path(path).unlink()
