"""Ports of this machine, claimed before anything listens on them: two clusters that start at the same moment do not take each other's.

A port that nothing listens on may be one that another process has chosen and will listen on in a second. So a process that chooses a port
locks that port's file first, in a directory that all checkouts and users of the machine share. The lock lasts as long as any process has
the file open: the one that claimed the port, and each that it starts with `pass_fds=descriptors(port)`. Whether a process without such a
claim listens on a port is found out by trying.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from cluster.errors import ConfigError

DIRECTORY = Path("/tmp/genrec-ports")  # noqa: S108 - one place for all users of the machine; TMPDIR is not
_files: dict[int, int] = {}
"""This process's claims: a port, or the first of a block, and the descriptor of its locked file."""


def choose(firsts: Iterable[int], count: int = 1, host: str = "") -> int | None:
    """Claim the first of these ports that is unclaimed and free, as are the `count` - 1 ports after it. Returns it; None without one."""
    return next((first for first in firsts if first not in _files and claim(first) and _free_or_released(first, count, host)), None)


def claim(port: int) -> bool:
    """Claim the port, or the block that begins with it, until `release` or the process's end. Returns whether this process has it now."""
    if port in _files:
        return True
    try:
        file = _opened(port)
    except PermissionError:  # another user is just making it
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        return False
    _files[port] = file
    return True


def release(port: int) -> None:
    """Give up the claim on a port; processes that inherited it keep it."""
    with suppress(KeyError):
        os.close(_files.pop(port))


def descriptors(*ports: int) -> list[int]:
    """The file descriptors that a process must inherit to share the claims on these ports, as far as this process has them."""
    return [_files[port] for port in ports if port in _files]


def require_free(port: int, host: str = "127.0.0.1") -> None:
    """Claim the port. Raises ConfigError where something listens on it already, or is about to, and where nothing can listen there."""
    taken = ConfigError(f"port {port} of this machine cannot be had; stop what uses it or give another --port")
    if not claim(port):
        raise taken
    try:
        _try(port, host)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise taken from error
        cure = "give an address of this machine, and a port that you may listen on"
        raise ConfigError(f"{host or '*'}:{port} cannot be listened on: {error}; {cure}") from error


def is_free(port: int, host: str = "") -> bool:
    """Whether the port can be listened on now, at `host`, or at every address of this machine."""
    try:
        _try(port, host)
    except OSError:
        return False
    return True


def _try(port: int, host: str) -> None:
    """Have the port for a moment. Raises OSError where it cannot be listened on."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))


def _free_or_released(first: int, count: int, host: str) -> bool:
    if all(is_free(port, host) for port in range(first, first + count)):
        return True
    release(first)
    return False


def _opened(port: int) -> int:
    """The port's file. It is made without O_CREAT where it exists: Linux may refuse that for another user's file."""
    with suppress(FileExistsError):
        DIRECTORY.mkdir()
        DIRECTORY.chmod(0o1777)
    path = DIRECTORY / str(port)
    with suppress(FileExistsError):
        made = os.open(path, os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        os.fchmod(made, 0o644)  # under any umask
        os.close(made)
    return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
