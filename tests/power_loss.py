"""What is left on a disk when the power fails: the calls of a process to the system are recorded, and replayed up to any of them, less
what was not yet synced.

    operations = recorded(["python", "-m", "..."], directory)     # runs it under strace, which must be installed
    disk = Disk()
    for operation in operations[:cut]:
        disk.apply(operation)
    disk.crash(directory, random.Random(0))                       # the files as they may be after the restart

The model is that of a POSIX file system, a little harsher than ext4. Until a file is synced, each 512 bytes written to it and each change
of its size may or may not be on the disk, in any order. Until its directory is synced, so may each name that was made, linked or removed; a
file's own sync keeps the name under which it was made. What is mapped into memory is not seen: SQLite's `-shm` files, which it makes anew.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

SECTOR = 512
CALLS = "openat,pwrite64,write,ftruncate,fsync,fdatasync,unlink,unlinkat,rename,link,linkat"
_LINE = re.compile(r"(?P<process>\d+) +(?P<name>\w+)\((?P<arguments>.*?)(?:\) += (?P<result>-?\d+).*| <unfinished \.\.\.>)$")
_RESUMED = re.compile(r"(?P<process>\d+) +<\.\.\. (?P<name>\w+) resumed>.*\) += (?P<result>-?\d+).*$")
_FILE = re.compile(r"-?\w+<((?:\\x[0-9a-f]{2})*)>")
_TEXT = re.compile(r'"((?:\\x[0-9a-f]{2})*)"')


@dataclass(frozen=True, slots=True)
class Operation:
    """`kind`: told (`data` was printed), create, write, truncate, link, unlink, rename, sync (which began) or synced (which has ended).
    `place`: the offset of a write, None for the file's end; the size of a truncation.
    """

    kind: str
    path: str = ""
    data: bytes = b""
    place: int | None = None
    to: str = ""


def obstacle() -> str:
    """Why nothing can be recorded here; empty: it can."""
    if shutil.which("strace") is None:
        return "strace is not installed (apt-get install strace)"
    tried = subprocess.run(["strace", "-qq", "-e", "trace=none", "true"], capture_output=True, text=True, check=False)
    return f"strace may not trace here: {tried.stderr.strip()}" if tried.returncode else ""


def recorded(command: Sequence[str], directory: Path) -> list[Operation]:
    """What the process does to files in `directory`, and what it prints, in order."""
    log = directory.parent / f"{directory.name}.strace"
    traced = ["strace", "-f", "-qq", "-y", "-xx", "-s", str(2**22), "-e", f"trace={CALLS}", "-o", str(log), *command]
    subprocess.run(traced, check=True, stdout=subprocess.PIPE)
    return list(_operations(log.read_text().splitlines(), str(directory)))


def _operations(lines: Sequence[str], directory: str) -> Iterator[Operation]:
    """A write counts from its begin; a sync takes what was there at its begin, and counts from its end."""
    syncing: dict[str, str] = {}
    for line in lines:
        if (call := _LINE.match(line)) is not None:
            files, texts = ([_bytes(one) for one in pattern.findall(call["arguments"])] for pattern in (_FILE, _TEXT))
            if call["result"] is None or int(call["result"]) >= 0:
                for operation in _of(call["name"], call["arguments"], files, texts):
                    if operation.kind == "told" or operation.path.startswith(directory):
                        yield operation
                        if operation.kind == "sync" and call["result"] is None:
                            syncing[call["process"]] = operation.path
                        elif operation.kind == "sync":
                            yield Operation("synced", operation.path)
        elif (call := _RESUMED.match(line)) is not None and (path := syncing.pop(call["process"], "")):
            assert int(call["result"]) == 0, line
            yield Operation("synced", path)


def _bytes(escaped: str) -> bytes:
    return bytes.fromhex(escaped.replace("\\x", ""))


def _of(name: str, arguments: str, files: list[bytes], texts: list[bytes]) -> Iterator[Operation]:
    """What one call does. Paths are absolute, or of a directory that stands before them."""
    directory = Path(os.fsdecode(files[0])) if files else Path()
    paths = [str(directory / os.fsdecode(text)) for text in texts]
    match name:
        case "write" if arguments.startswith("1<"):
            yield Operation("told", data=texts[0])
        case "write":
            yield Operation("write", os.fsdecode(files[0]), texts[0])
        case "pwrite64":
            yield Operation("write", os.fsdecode(files[0]), texts[0], int(arguments.rpartition(",")[2]))
        case "ftruncate":
            yield Operation("truncate", os.fsdecode(files[0]), place=int(arguments.rpartition(",")[2]))
        case "fsync" | "fdatasync":
            yield Operation("sync", os.fsdecode(files[0]))
        case "openat" if "O_CREAT" in arguments:
            yield Operation("create", paths[0])
        case "unlink" | "unlinkat":
            yield Operation("unlink", paths[0])
        case "rename" | "link" | "linkat":
            yield Operation(name.removesuffix("at"), paths[0], to=paths[1])


@dataclass(eq=False)
class _File:
    """What was synced, what was written since, and what the running system reads."""

    synced: bytearray = field(default_factory=bytearray)
    pending: list[Operation] = field(default_factory=list)
    live: bytearray = field(default_factory=bytearray)

    def change(self, operation: Operation) -> None:
        placed = Operation(operation.kind, data=operation.data, place=len(self.live) if operation.place is None else operation.place)
        _change(self.live, placed)
        self.pending.append(placed)


def _change(content: bytearray, operation: Operation) -> None:
    assert operation.place is not None
    if operation.kind == "truncate":
        del content[operation.place :]
    end = operation.place + len(operation.data)
    content.extend(bytes(max(0, end - len(content))))
    content[operation.place : end] = operation.data


class Disk:
    """Files as the running system sees them, and as a restart may."""

    def __init__(self) -> None:
        self._names: dict[str, _File] = {}
        self._synced: dict[str, _File] = {}
        self._pending: list[tuple[str, _File | None]] = []  # names in the order in which they changed; None: no longer there
        self._marks: dict[str, tuple[int, int]] = {}  # what was pending when a sync began: of the file, of the names

    def apply(self, operation: Operation) -> None:
        path = operation.path
        match operation.kind:
            case "create" if path not in self._names:
                self._name(path, _File())
            case "write" | "truncate":
                self._names[path].change(operation)
            case "link" | "rename":
                self._name(operation.to, self._names[path])
                if operation.kind == "rename":
                    self._name(path, None)
            case "unlink":
                self._name(path, None)
            case "sync":
                file = self._names.get(path)
                self._marks[path] = (len(file.pending) if file else 0, len(self._pending))
            case "synced":
                self._sync(path, *self._marks.pop(path))

    def _name(self, path: str, file: _File | None) -> None:
        self._pending.append((path, file))
        _rename(self._names, path, file)

    def _sync(self, path: str, changes: int, names: int) -> None:
        """Keep the first so many pending changes of a file and the name it was made under, or the first so many names of a directory."""
        file = self._names.get(path)
        if file is not None:
            for operation in file.pending[:changes]:
                _change(file.synced, operation)
            del file.pending[:changes]
        left = []
        for number, (name, named) in enumerate(self._pending):
            covered = named is file and name == path if file is not None else str(Path(name).parent) == path
            if covered and number < names:
                _rename(self._synced, name, named)
            else:
                left.append((name, named))
        self._pending = left

    def crash(self, directory: Path, random: Random) -> None:
        """Write the files as they may be after the restart into `directory`, which stands for the recorded one."""
        chance = random.choice((0.0, 0.1, 0.5, 0.9, 1.0))  # of what was not synced to be there
        names = dict(self._synced)
        for path, file in self._pending:
            if random.random() < chance:
                _rename(names, path, file)
        for path, file in names.items():
            content = bytearray(file.synced)
            for operation in file.pending:
                for part in _parts(operation):
                    if random.random() < chance:
                        _change(content, part)
            (directory / Path(path).name).write_bytes(content)


def _rename(names: dict[str, _File], path: str, file: _File | None) -> None:
    if file is None:
        names.pop(path, None)
    else:
        names[path] = file


def _parts(operation: Operation) -> Iterator[Operation]:
    """A write by sectors, each of which is there or not."""
    if operation.kind == "truncate":
        yield operation
        return
    assert operation.place is not None
    start = 0
    while start < len(operation.data):
        size = SECTOR - (operation.place + start) % SECTOR
        yield Operation("write", data=operation.data[start : start + size], place=operation.place + start)
        start += size
