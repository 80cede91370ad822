"""A PostgreSQL server of the tests' own, on a socket in a temporary directory."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

PROGRAMS = ("initdb", "pg_ctl", "postgres", "createdb", "dropdb")
UNPRIVILEGED = ("postgres", "nobody")  # the server refuses to run as root


@dataclass(frozen=True)
class PostgresServer:
    """A cluster of databases under `directory`, run by the programs in `binaries` as `user` (None: as who runs the tests). It waits for no
    disk: tests kill its processes, but the system that holds what these have written runs on.
    """

    binaries: Path
    directory: Path
    user: str | None

    @property
    def data(self) -> Path:
        return self.directory / "data"

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://genrec@/{database}?host={self.directory}"

    def initialise(self) -> None:
        self.run("initdb", "--no-sync", "-D", self._data, "-U", "genrec", "-A", "trust", "-E", "UTF8", "--locale=C")

    def start(self) -> None:
        options = f"-k {self.directory} -c listen_addresses='' -c max_connections=60 -c fsync=off"
        self.run("pg_ctl", "-D", self._data, "-l", f"{self.directory}/log", "-o", options, "-w", "-t", "300", "start")

    def stop(self, mode: str = "fast") -> None:
        """`mode` immediate: without a checkpoint, as after a crash; the next start recovers from the log."""
        self.run("pg_ctl", "-D", self._data, "-m", mode, "-w", "-t", "300", "stop")

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """All of its processes stand still until the block ends; connections stay open."""
        first = psutil.Process(int((self.data / "postmaster.pid").read_text().split()[0]))
        processes = [first, *first.children(recursive=True)]
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def create(self, database: str, *options: str) -> str:
        """A new database's URL."""
        self.run("createdb", "-h", str(self.directory), "-U", "genrec", *options, database)
        return self.url(database)

    def drop(self, database: str) -> None:
        self.run("dropdb", "-h", str(self.directory), "-U", "genrec", "--force", database)

    @property
    def _data(self) -> str:
        return str(self.data)

    def run(self, program: str, *arguments: str) -> None:
        """One of PostgreSQL's programs, as the server's user."""
        command = [str(self.binaries / program), *arguments]
        with tempfile.TemporaryFile("w+") as output:  # not a pipe, which the server would keep open
            done = subprocess.run(command, user=self.user, cwd=self.directory, stdout=output, stderr=subprocess.STDOUT, check=False)
            output.seek(0)
            assert done.returncode == 0, f"{program}: {output.read()}"


@contextmanager
def running_postgres() -> Iterator[PostgresServer]:
    """A server that runs until the block ends. Skips the test where PostgreSQL is not installed or there is no user to run it as."""
    with tempfile.TemporaryDirectory(prefix="pg-", dir="/tmp") as directory:  # a socket's path may have 107 characters
        server = PostgresServer(_binaries(), Path(directory), _user())
        if server.user:
            shutil.chown(directory, server.user)
        server.initialise()
        server.start()
        try:
            yield server
        finally:
            if Path(directory, "data", "postmaster.pid").exists():
                server.stop("immediate")


def _binaries() -> Path:
    folders = [*map(Path, os.get_exec_path()), *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    for folder in folders:
        if all(os.access(folder / program, os.X_OK) for program in PROGRAMS):
            return folder
    pytest.skip(f"PostgreSQL's server is not installed: no {', '.join(PROGRAMS)} on the PATH or in /usr/lib/postgresql/*/bin")


def _user() -> str | None:
    if os.getuid() != 0:
        return None
    known = {entry.pw_name for entry in pwd.getpwall()}
    if not (usable := [name for name in UNPRIVILEGED if name in known]):
        pytest.skip(f"PostgreSQL does not run as root, and there is no user {' or '.join(UNPRIVILEGED)}")
    return usable[0]
