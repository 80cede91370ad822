"""The memory of a server's processes on this machine, which are found by the process that listens on its port."""

import importlib
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Memory:
    """`resident_mib`: of all `processes`, pages that several share counted in each; None where it is not known, for the `reason`."""

    resident_mib: float | None = None
    processes: int = 0
    reason: str = ""


def server_memory(url: str) -> Memory:
    """The memory of the server that answers at `url` now."""
    try:
        psutil = importlib.import_module("psutil")
    except ImportError:
        return Memory(reason="psutil is not installed (pip install psutil)")
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if not _is_here(psutil, host):
        return Memory(reason=f"{host} is another machine")
    listener = _listener(psutil, port)
    if listener is None:
        return Memory(reason=f"no process that this user may look into listens on port {port}")
    sizes = list(_resident_bytes(psutil, listener))
    return Memory(round(sum(sizes) / 2**20, 1), len(sizes))


def _is_here(psutil: Any, host: str) -> bool:
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    ours = {one.address for interface in psutil.net_if_addrs().values() for one in interface}
    return bool(addresses & ours)


def _listener(psutil: Any, port: int) -> int | None:
    """The process that listens on the port; None where there is none, or the system hides it from this user."""
    with suppress(psutil.AccessDenied):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr.port == port and one.pid:
                return int(one.pid)
    return None


def _resident_bytes(psutil: Any, listener: int) -> Iterator[int]:
    for process in _serving(psutil, listener):
        with suppress(psutil.Error):  # it ended meanwhile, or is another user's
            yield process.memory_info().rss


def _serving(psutil: Any, listener: int) -> list[Any]:
    """The processes of the listener's session, in which Ray's and HAProxy stay; where this process is in it too, those of the listener's
    tree, up to the common ancestor.
    """
    session = os.getsid(listener)
    if session != os.getsid(0):
        return [process for process in psutil.process_iter() if _session_of(process.pid) == session]
    us = psutil.Process()
    above_us = {us.pid, *(parent.pid for parent in us.parents())}
    root = psutil.Process(listener)
    while (parent := root.parent()) and parent.pid not in above_us and root.pid not in above_us:
        root = parent
    return [root, *root.children(recursive=True)]


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended
        return None
