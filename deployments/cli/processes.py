"""All processes of a session: by it, those that a `ray start` left behind are found and killed (Linux)."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

GONE_WITHIN_S = 60.0


def boot_id() -> str:
    """An id of this start of the machine: after the next start, the number of a process means nothing."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def session_members(leader: int) -> list[int]:
    """The living processes of the session with that leader; Ray's workers and HAProxy stay in the session of their `ray start`."""
    return [pid for pid, session, state in _processes() if session == leader and state not in "ZX"]


def kill_session(leader: int) -> None:
    """End every process of the session with kill -9, until none is left. Raises TimeoutError where some stay."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while members := session_members(leader):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {members} did not end within {GONE_WITHIN_S:g} s of kill -9")
        for pid in members:  # again, as those that are killed may have started others
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _processes() -> list[tuple[int, int, str]]:
    """(process, session, state) of everything that runs on this machine."""
    found = []
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError):  # it ended while we looked
                # pid (name) state parent group session ...; a name may hold spaces and brackets
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                found.append((int(directory.name), int(fields[3]), fields[0]))
    return found
