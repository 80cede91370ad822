"""API keys: made once, shown once, kept as hashes.

A key is 32 random bytes, so one fast hash is enough: it cannot be guessed. Slow, salted hashes (scrypt, argon2) make it expensive to guess
people's passwords, and here would make every request expensive.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, date, datetime, time, timedelta
from hashlib import sha256
from hmac import compare_digest
from secrets import token_urlsafe
from typing import Any, Literal, Protocol, TypeVar

PREFIX = "genrec_"
"""The beginning of every key, by which people, and programs that look for published secrets, recognise one."""
Right = Literal["read", "events", "erase", "operate"]
"""The rights of a key: to ask for recommendations and read stored data, to store events, to erase users, to operate the system."""
_KEY = re.compile(PREFIX + r"[A-Za-z0-9_-]{8,}")
_PASSWORD = re.compile(r"(://[^\s/:@]*:)\S+(?=@)|([?&](?:\w*password|token)=)[^&\s'\"]+", re.IGNORECASE)
_SECRET = re.compile(r"(?:password|passwd|secret|token|authorization|cookie|credentials?|(?:api|access|private)[-_]?key)$", re.IGNORECASE)
_LONGEST = 256
SOON = timedelta(days=14)
"""A key that expires within this time is warned of."""


class Hashed(Protocol):
    """An entry of the configuration. `sha256`: of the key, in hexadecimal."""

    @property
    def sha256(self) -> str: ...


class Expiring(Protocol):
    """An entry of the configuration: the owner's name, and when the key is refused; None: never."""

    @property
    def name(self) -> str: ...
    @property
    def expires(self) -> datetime | None: ...


Entry = TypeVar("Entry", bound=Hashed)


def new_key() -> str:
    """A new key: 256 random bits."""
    return PREFIX + token_urlsafe(32)


def digest(key: bytes) -> str:
    """The hash of a key, which is kept in its place."""
    return sha256(key).hexdigest()


def find(presented: bytes, keys: Sequence[Entry]) -> Entry | None:
    """The entry of the presented key. Every entry is compared, in constant time, so that the time taken tells nothing of any."""
    if len(presented) > _LONGEST:
        return None
    found, hashed = None, digest(presented)
    for key in keys:
        if compare_digest(hashed, key.sha256):
            found = key
    return found


def expiry(text: object) -> datetime:
    """The moment at which a key expires, from text; given a date, the end of that day in UTC. Raises ValueError with the cure."""
    with suppress(ValueError):
        if isinstance(text, str) and re.fullmatch(r"\d{4}-\d\d-\d\d", text):
            return datetime.combine(date.fromisoformat(text), time.max, UTC)
        if isinstance(text, str) and (moment := datetime.fromisoformat(text)).tzinfo is not None:
            return moment
    raise ValueError('give a date, or a time with its zone, in quotes: "2027-01-31", "2027-01-31T18:00:00+01:00"')


def expire_soon(keys: Sequence[Expiring]) -> Iterator[str]:
    """A warning for each key that has expired, or does so soon."""
    now = datetime.now(UTC)
    for key in keys:
        if key.expires is not None and key.expires - now < SOON:
            when = f"{'expires' if key.expires > now else 'has expired'} at {key.expires:%Y-%m-%d %H:%M %Z}"
            yield f"the API key {key.name!r} {when} and is answered 401 from then on; give its callers a successor (genrec keys new)"


def masked(text: str) -> str:
    """The text without the keys and the passwords of URLs in it: an operator may have written a key where its hash belongs."""
    return _PASSWORD.sub(lambda found: f"{found[1] or found[2]}***", _KEY.sub(f"{PREFIX}***", text))


def masked_tree(tree: Any) -> Any:
    """A plain tree of values without its secrets, which are recognised by their form or by their name."""
    match tree:
        case dict():
            return {name: "***" if _is_secret(name, value) else masked_tree(value) for name, value in tree.items()}
        case list():
            return [masked_tree(value) for value in tree]
        case tuple():
            return tuple(masked_tree(value) for value in tree)
        case str():
            return masked(tree)
        case _:
            return tree


def _is_secret(name: object, value: object) -> bool:
    """Whether a value is a secret by its name. An unset one (None), or a switch (bool), is none."""
    return not (value is None or isinstance(value, bool)) and _SECRET.search(str(name)) is not None
