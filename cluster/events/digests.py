"""The digests that are left of erased users. They are made by a key of the deployment: without it, a list of names does not show which of
them were erased.
"""

import hmac
import os
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from cluster.errors import BackendUnavailable, ConfigError
from cluster.private_file import private

ENVIRONMENT = "GENREC_ERASURE_KEY"
SHORTEST = 32
"""The fewest characters of a key."""


@dataclass(frozen=True, slots=True)
class Digests:
    """HMAC-SHA-256 with `key`, of names joined by NUL. No name has a NUL, so no two different names give the same text."""

    key: bytes = field(repr=False)

    @property
    def check(self) -> bytes:
        """A digest that tells this key from every other."""
        return self.keyed(b"which key")

    def user(self, tenant: str, user_id: str) -> bytes:
        """The digest of an erased user, from which the user's version goes on."""
        return self.keyed(sha256(f"{tenant}\0{user_id}".encode()).digest())

    def event(self, tenant: str, idempotency_key: str) -> bytes:
        """The digest of an erased user's event, by which it is not stored again."""
        return self.keyed(sha256(f"\0{tenant}\0{idempotency_key}".encode()).digest())

    def keyed(self, plain: bytes) -> bytes:
        """The keyed digest for one that was made without a key, as in schema version 1."""
        return hmac.digest(self.key, plain, "sha256")

    def refuse_other(self, check: bytes, where: str) -> None:
        """Raises BackendUnavailable where `check` is another key's: this one would find no erased user again."""
        if not hmac.compare_digest(check, self.check):
            lost = "where it is lost, move the ledger away and set store.key_check to NULL"
            cure = f"give that key back, in its file or in {ENVIRONMENT}; {lost}"
            raise BackendUnavailable(f"{where}: what it holds of erased users was made with another key than the one given; {cure}")


def given_key() -> bytes | None:
    """The key in the environment, whose bytes need be no text. Raises ConfigError at one that can be guessed."""
    text = os.environ.get(ENVIRONMENT, "").strip()
    if text and len(text) < SHORTEST:
        raise ConfigError(f"{ENVIRONMENT} has {len(text)} characters; give {SHORTEST} at least: openssl rand -hex 32")
    return os.fsencode(text) or None


def kept_key(file: Path, *, make: bool) -> bytes:
    """The key in the file; with `make`, a missing file is made with a new key. Raises BackendUnavailable where the key cannot be read, or
    is so short that it can be guessed.
    """
    cure = f"restore it from its backup, let this user read and write it, or give the key in {ENVIRONMENT}"
    try:
        if make and not file.exists():
            _make(file)
        key = file.read_bytes().strip()
    except OSError as error:
        raise BackendUnavailable(f"the key of erased users, {file}, cannot be had ({error.strerror}); {cure}") from error
    if len(key) < SHORTEST:
        raise BackendUnavailable(f"the key of erased users, {file}, has {len(key)} characters, where {SHORTEST} are the least; {cure}")
    return key


def _make(file: Path) -> None:
    """Make the file with a new key, wholly or not at all; of several processes that try, one makes it."""
    draft = file.with_name(f".{file.name}-{token_hex(8)}")
    try:
        with open(draft, "x", opener=private) as opened:
            opened.write(f"{token_hex(32)}\n")
            opened.flush()
            os.fsync(opened.fileno())
        with suppress(FileExistsError):
            os.link(draft, file)
    finally:
        draft.unlink(missing_ok=True)
