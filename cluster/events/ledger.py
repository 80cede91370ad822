"""The ledger of erasures: a file apart from the store and from its backups, by which a store that was restored forgets again.

    a store erases   the user's digest ──► the ledger, on the disk ──► the store's commit
    a store opens    what the ledger has and the store has not: erased, before anything is read (the store is an older copy of itself)
                     what the store has and the ledger has not: added (the ledger is new, or was away)

A line has a mark of the key, the erasure's number and the digest. It names no user. The order of lines means nothing, so that `cat` puts
the ledgers of several machines together.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from cluster.errors import BackendUnavailable, ConfigError
from cluster.events.digests import Digests
from cluster.private_file import append

_LINE = re.compile(rb"([0-9a-f]{16}) (\d{20}) ([0-9a-f]{64})\n")
_OPTION = re.compile(r"(?<=[?&])ledger=([^&]*)&?")


@dataclass(frozen=True, slots=True)
class Ledger:
    """The ledger in `file`; None: none is kept. Erasures are digest -> number of the latest, as the store has them."""

    file: Path | None
    digests: Digests

    def read(self) -> dict[bytes, int]:
        """All erasures in it; the file is made where it is not there. Raises BackendUnavailable, also where another key made them."""
        if self.file is None:
            return {}
        latest: dict[bytes, int] = {}
        try:
            append(self.file, b"")
            with self.file.open("rb") as lines:
                for line in filter(None, map(_LINE.search, lines)):  # a part of a line, which a full disk leaves, stands before a whole one
                    self._check(line[1])
                    user = bytes.fromhex(line[3].decode())
                    latest[user] = max(int(line[2]), latest.get(user, 0))
        except OSError as error:
            raise self._away(error) from error
        return latest

    def note(self, erasures: Mapping[bytes, int]) -> None:
        """Add them; they are on the disk when this returns. Raises BackendUnavailable: then nothing is to be erased."""
        if self.file is None or not erasures:
            return
        lines = (b"%b %020d %b\n" % (self._mark, number, digest.hex().encode()) for digest, number in erasures.items())
        try:
            append(self.file, b"".join(lines), durable=True)
        except OSError as error:
            raise self._away(error) from error

    def _check(self, mark: bytes) -> None:
        if mark != self._mark:
            raise BackendUnavailable(f"the ledger of erasures {self.file} is of a store with another key; name one for each store")

    @property
    def _mark(self) -> bytes:
        return self.digests.check.hex()[:16].encode()

    def _away(self, error: OSError) -> BackendUnavailable:
        cure = "make room, or let this user read and write it and its directory"
        return BackendUnavailable(f"the ledger of erasures {self.file} cannot be used ({error.strerror}); {cure}")


def require(ledger: Path | None) -> None:
    """Raises ConfigError where it is not there: a restored store would serve users that were erased since its backup."""
    if ledger is None:
        raise ConfigError("this store has no ledger of erasures; name it in the URL, as ?ledger=/var/lib/genrec/erased")
    if not ledger.is_file():
        cure = f"give it back from its own copy, or, where no user was erased since the backup: touch {ledger}"
        raise ConfigError(f"the ledger of erasures {ledger} is not there; {cure}")


def missing(noted: Mapping[bytes, int], held: Mapping[bytes, int]) -> dict[bytes, int]:
    """Of the erasures in `noted`, those that `held` has not, or only an earlier one of the same user."""
    return {user: number for user, number in noted.items() if number > held.get(user, 0)}


def split_ledger(url: str) -> tuple[str, Path | None]:
    """A store's URL without the option ``?ledger=/a/file``, and that file. Raises ConfigError at a relative path."""
    if (found := _OPTION.search(url)) is None:
        return url, None
    file = Path(unquote(found[1]))
    if not file.is_absolute():
        raise ConfigError(f"event store: the ledger {str(file)!r} is no absolute path; write ?ledger=/var/lib/genrec/erased")
    return _OPTION.sub("", url, count=1).rstrip("?&"), file
