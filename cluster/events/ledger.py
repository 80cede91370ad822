"""The ledger of erasures: kept apart from the store and its backups, so that a restored store forgets again what was erased.

    a store erases   the user's digest ──► the ledger, on the disk ──► the store's commit
    a store opens    what the ledger has and the store has not: erased, before anything is read (the store is an older copy of itself)
                     what the store has and the ledger has not: added (the ledger is new, or was away)

The ledger is a file, or a directory in which each machine writes a file of its own and reads all: over a network, lines that several
machines add to one file may be lost. A line has a mark of the key, the erasure's number and the user's digest, but no user's name. The
order of lines means nothing.
"""

import errno
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname
from urllib.parse import unquote

from cluster.errors import BackendUnavailable, ConfigError
from cluster.events.digests import Digests
from cluster.private_file import append

_ERASURE = re.compile(rb"([0-9a-f]{16}) (\d{20}) ([0-9a-f]{64})(?=[ \t]*(?:[\r\n\0]|\Z)|[0-9a-f]{16} )")
"""Behind it the line ends, with or without blanks, or the next erasure begins, where a break between two lines was lost."""
_LONG = 102
"""Bytes of an erasure, without the break of its line."""
_HOLE = re.compile(rb"\0{2,}")
"""Stands where a failure of the power kept writes from the disk. A zero beside each letter is UTF-16's."""
_OPTION = re.compile(r"(?<=[?&])ledger=([^&]*)&?")


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger at `place`, a file or a directory; None: none is kept. Erasures are digest -> number of the latest, as in the store.

    `before`: the number of the store's latest erasure as it was opened. `is_directory`: what `place` was then: one with its file system
    gone since is not taken for a file that is to be made.
    """

    place: Path | None
    digests: Digests
    before: int = 0
    is_directory: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_directory", self.place is not None and os.path.isdir(self.place))  # noqa: PTH112 - which raises nothing

    def read(self) -> dict[bytes, int]:
        """All erasures in it; a file is made where there is none. Raises BackendUnavailable, also where another key made them."""
        if self.place is None:
            return {}
        latest: dict[bytes, int] = {}
        try:
            _make_ready(self.place)
            for mark, number, user in _lines(self.place):
                self._check(mark)
                latest[user] = max(number, latest.get(user, 0))
        except OSError as error:
            raise self._away(error) from error
        return latest

    def note(self, erasures: Mapping[bytes, int]) -> None:
        """Add them; they are on the disk when this returns. Raises BackendUnavailable: then nothing is to be erased."""
        if self.place is None or not erasures:
            return
        lines = (b"%b %020d %b\n" % (self._mark, number, digest.hex().encode()) for digest, number in erasures.items())
        try:
            if self.is_directory and not any(self.place.glob("*.erased")):
                raise FileNotFoundError(errno.ENOENT, "the directory has no file named *.erased any more")
            append(_own(self.place), b"".join(lines), durable=True)
        except OSError as error:
            raise self._away(error) from error

    def _check(self, mark: bytes) -> None:
        if mark != self._mark:
            raise BackendUnavailable(f"the ledger of erasures {self.place} is of a store with another key; name one for each store")

    @property
    def _mark(self) -> bytes:
        return self.digests.check.hex()[:16].encode()

    def _away(self, error: OSError) -> BackendUnavailable:
        cure = "make room, mount its disk, or let this user read and write it and its directory"
        return BackendUnavailable(f"the ledger of erasures {self.place} cannot be used ({error.strerror}); {cure}")


def _own(place: Path) -> Path:
    """The file that this machine adds to."""
    return place / f"{gethostname()}.erased" if place.is_dir() else place


def _make_ready(place: Path) -> None:
    """Have a file there. Where a directory has one, this machine's is made with its first erasure. Raises OSError where it cannot be."""
    own = _own(place)
    if own.exists() or not (place.is_dir() and any(place.glob("*.erased"))):
        append(own, b"")
    elif not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))


def _lines(place: Path) -> Iterator[tuple[bytes, int, bytes]]:
    """Mark, number and digest of each erasure. A full disk may have left a part of a line before a whole one, and a program that copied,
    edited or joined files may have changed the ends of their lines, or left out the last. Raises BackendUnavailable at a line that has,
    beside what can be read, bytes enough for an erasure, and at a file of parts alone that have so many together.
    """
    for file in place.glob("*.erased") if place.is_dir() else [place]:
        whole, parts = 0, 0
        with file.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                for found in _ERASURE.finditer(line):
                    whole += 1
                    yield found[1], int(found[2]), bytes.fromhex(found[3].decode())
                left_over = [len(part.replace(b"\0", b"").strip()) for part in _HOLE.split(_ERASURE.sub(b"\0\0", line))]
                if max(left_over) >= _LONG:
                    raise _unreadable(file, f"a line that cannot be read (line {number})")
                parts += sum(left_over)
        if not whole and parts >= _LONG:
            raise _unreadable(file, "no line that can be read")


def _unreadable(file: Path, what: str) -> BackendUnavailable:
    cure = "give it back as it was written, from its own copy (its text is ASCII; PowerShell's > makes it UTF-16)"
    return BackendUnavailable(f"the ledger of erasures {file} holds {what}; {cure}")


def require(ledger: Path | None) -> None:
    """Raises ConfigError where the ledger is missing: a restored store would serve users that were erased since its backup.

    A directory without a machine's file counts as missing: its disk is not mounted, or its files have other names.
    """
    if ledger is None:
        raise ConfigError("this store has no ledger of erasures; name it in the URL, as ?ledger=/var/lib/genrec/erased")
    file = next(ledger.glob("*.erased"), ledger / "none.erased") if ledger.is_dir() else ledger
    if not file.exists():
        cure = f"give it back from its own copy, or, where no user was erased since the backup: touch {file}"
        problem = "has no file named *.erased" if ledger.is_dir() else "is not there"
        raise ConfigError(f"the ledger of erasures {ledger} {problem}; {cure}")


def missing(noted: Mapping[bytes, int], held: Mapping[bytes, int]) -> dict[bytes, int]:
    """Of the erasures in `noted`, those that `held` has not, or only an earlier one of the same user."""
    return {user: number for user, number in noted.items() if number > held.get(user, 0)}


def split_ledger(url: str) -> tuple[str, Path | None]:
    """A store's URL without the option ``?ledger=/a/file``, and that path. Raises ConfigError at a relative path, and at an option that
    SQLite has not.
    """
    found = _OPTION.search(url)
    plain = url if found is None else _OPTION.sub("", url, count=1).rstrip("?&")
    if plain.startswith("sqlite:") and "?" in plain:
        raise ConfigError(f"event store {url!r}: {plain.partition('?')[2]!r} is no option of SQLite's; the only one is ?ledger=/a/file")
    place = None if found is None else Path(unquote(found[1]))
    if place is not None and not place.is_absolute():
        raise ConfigError(f"event store: the ledger {str(place)!r} is no absolute path; write ?ledger=/var/lib/genrec/erased")
    return plain, place


def mounted_ledger(url: str) -> tuple[str, Path | None]:
    """As `split_ledger`. Raises BackendUnavailable too, where the path ends in "/" and no directory is there."""
    plain, place = split_ledger(url)
    named = _OPTION.search(url)
    if named is not None and unquote(named[1]).endswith("/") and not (place and os.path.isdir(place)):  # noqa: PTH112 - as above
        raise BackendUnavailable(f"the ledger of erasures {place} is no directory; mount its disk, or make it: mkdir {place}")
    return plain, place
