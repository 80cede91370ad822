"""The scope of an erasure: a group, a namespace (group None) or everything (both None)."""

import json
from hashlib import blake2b

from cluster.cache.entry import Key

DIGEST_BYTES = 16


def concerns(key: Key, namespace: str | None, group: str | None) -> bool:
    """Whether an erasure of this scope erases the key."""
    return namespace in {None, key.namespace} and group in {None, key.group}


def scope_digest(namespace: str | None = None, group: str | None = None) -> str:
    """The digest by which an erasure is remembered, the same in every process: the record of an erasure must not name the user."""
    return blake2b(json.dumps([namespace, group]).encode(), digest_size=DIGEST_BYTES).hexdigest()


def scopes_of(key: Key) -> tuple[str, str, str]:
    """The digests of all scopes that contain the key: everything, its namespace, its group."""
    return EVERYTHING, scope_digest(key.namespace), scope_digest(key.namespace, key.group)


EVERYTHING = scope_digest()
