"""What a server's processes on this machine use. They are found by the process that listens on its port."""

import importlib
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all `processes` together: `resident_mib`, pages that several share counted in each, and `processor_s`, since the first look."""

    resident_mib: float
    processor_s: float
    processes: int


class ServerProcesses:
    """The processes of the server that answers at `url`. `reason` says why they cannot be looked at, and is empty where they can."""

    def __init__(self, url: str) -> None:
        self.reason = ""
        self._times: dict[int, float] = {}
        """Processor time of each process when it was looked at last, by process id."""
        self._processor_s = 0.0
        self._find: Callable[[], Sequence[Any]] = list
        try:
            self._psutil = importlib.import_module("psutil")
        except ImportError:
            self.reason = "psutil is not installed (pip install psutil)"
            return
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        if not _is_here(self._psutil, host):
            self.reason = f"{host} is another machine"
        elif (listener := _listener(self._psutil, port)) is None:
            self.reason = f"no process that this user may look into listens on port {port}"
        else:
            self._find = _finder(self._psutil, listener)

    def look(self) -> Usage | None:
        """What they use now, those included that have started since the last look; None where `reason` says why, or none is left."""
        resident, found, times = 0, 0, dict(self._times)
        for process in self._find():
            with suppress(self._psutil.Error):  # it ended meanwhile, or is another user's
                resident += process.memory_info().rss
                used = sum(process.cpu_times()[:2])
                self._processor_s += used - times.get(process.pid, 0.0 if times else used)
                self._times[process.pid] = used
                found += 1
        return Usage(round(resident / 2**20, 1), self._processor_s, found) if found else None


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


def _finder(psutil: Any, listener: int) -> Callable[[], list[Any]]:
    """What lists the processes of the listener's session, in which Ray's and HAProxy stay; where this process is in it too, those of the
    listener's tree, up to the common ancestor.
    """
    session = os.getsid(listener)
    if session != os.getsid(0):
        return lambda: [process for process in psutil.process_iter() if _session_of(process.pid) == session]
    us = psutil.Process()
    above_us = {us.pid, *(parent.pid for parent in us.parents())}
    root = psutil.Process(listener)
    while (parent := root.parent()) and parent.pid not in above_us and root.pid not in above_us:
        root = parent
    return lambda: [root, *root.children(recursive=True)] if root.is_running() else []


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:  # it has ended
        return None
