"""Ports are claimed by one process at a time, before anything listens on them."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster import ports
from cluster.errors import ConfigError
from tests.ports import free_port

FIRST = 21_000
CHOOSES = """
import sys
from pathlib import Path
from cluster import ports
ports.DIRECTORY = Path(sys.argv[1])
print(ports.choose(map(int, sys.argv[2:])), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where nothing but the test claims ports."""
    monkeypatch.setattr(ports, "DIRECTORY", tmp_path / "ports")
    monkeypatch.setattr(ports, "is_free", lambda port, host="": True)
    claims = dict[int, int]()
    monkeypatch.setattr(ports, "_files", claims)
    yield tmp_path / "ports"
    for port in list(claims):
        ports.release(port)


@pytest.fixture
def started(directory: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A process that chooses one of the ports it is given, prints it, and holds it until its input ends."""
    with ExitStack() as ended:

        def start(*offered: int) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", CHOOSES, str(directory), *map(str, offered)]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            ended.callback(process.kill)
            return ended.enter_context(process)

        yield start


def chosen(process: subprocess.Popen[str]) -> str:
    assert process.stdout
    return process.stdout.readline().strip()


def test_two_processes_that_choose_at_the_same_moment_choose_different_ports(started):
    processes = [started(FIRST, FIRST + 1) for _ in range(2)]
    assert {chosen(process) for process in processes} == {str(FIRST), str(FIRST + 1)}


def test_what_another_process_claimed_is_neither_claimed_nor_chosen(started):
    assert chosen(started(FIRST)) == str(FIRST)
    assert not ports.claim(FIRST)
    assert ports.choose([FIRST]) is None
    assert ports.choose([FIRST, FIRST + 1]) == FIRST + 1


def test_a_killed_process_loses_its_claim(started):
    process = started(FIRST)
    chosen(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert ports.claim(FIRST)


def test_a_process_is_not_given_the_same_port_twice_but_may_claim_what_it_was_given():
    assert ports.choose([FIRST]) == FIRST
    assert ports.choose([FIRST]) is None
    assert ports.claim(FIRST)


def test_a_released_port_is_anyones():
    assert ports.claim(FIRST)
    ports.release(FIRST)
    assert ports.descriptors(FIRST) == []
    assert ports.choose([FIRST]) == FIRST


def test_a_claim_lasts_as_long_as_a_process_that_inherited_it(started):
    assert ports.claim(FIRST)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=ports.descriptors(FIRST)) as heir:
        ports.release(FIRST)
        assert chosen(started(FIRST)) == "None"
        heir.kill()
    assert chosen(started(FIRST)) == str(FIRST)


def test_a_port_that_is_listened_on_is_passed_over_and_stays_unclaimed(monkeypatch: pytest.MonkeyPatch, started):
    monkeypatch.setattr(ports, "is_free", lambda port, host="": port != FIRST + 1)
    assert ports.choose([FIRST, FIRST + 2], count=2) == FIRST + 2
    assert ports.choose([FIRST + 1]) is None
    assert chosen(started(FIRST)) == str(FIRST)


def test_the_files_are_for_all_users(directory: Path):
    before = os.umask(0o077)
    try:
        assert ports.claim(FIRST)
    finally:
        os.umask(before)
    assert directory.stat().st_mode & 0o7777 == 0o1777
    assert (directory / str(FIRST)).stat().st_mode & 0o777 == 0o644


def test_whether_a_port_can_be_listened_on_is_tried(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", free_port())) as listening:
        assert not ports.is_free(listening.getsockname()[1], "127.0.0.1")


def test_a_port_that_is_claimed_or_listened_on_is_told_apart_from_one_that_cannot_be_listened_on(monkeypatch: pytest.MonkeyPatch, started):
    of_no_machine = rf"192\.0\.2\.1:{FIRST} cannot be listened on: \[Errno {errno.EADDRNOTAVAIL}\].*; give an address"
    with pytest.raises(ConfigError, match=of_no_machine):
        ports.require_free(FIRST, "192.0.2.1")
    ports.release(FIRST)
    assert chosen(started(FIRST)) == str(FIRST)
    with pytest.raises(ConfigError, match=f"port {FIRST} of this machine cannot be had; stop what uses it"):
        ports.require_free(FIRST)
    monkeypatch.undo()
    with socket.create_server(("127.0.0.1", port := free_port())), pytest.raises(ConfigError, match=f"port {port} of this machine cannot"):
        ports.require_free(port)
