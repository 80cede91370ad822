"""Events as rows: what a transaction reads and writes. Each function is called within a transaction of the caller."""

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence

from cluster.events.digests import Digests
from cluster.events.ledger import Ledger, missing
from cluster.events.rules import latest, refuse_other_content, version_of
from cluster.events.store import RECENT_USERS, Event, Stored, StoredHistory, StoredUser, StoreStatistics
from cluster.values import ACTIONS, Action, Behaviour

SLICE = 200
"""Events of an erased user that are deleted at once: for at least so many another call waits."""
_STORE = """
    INSERT INTO events (user, timestamp, item_id, action, value, key_digest) VALUES (?, ?, ?, ?, ?, ?)
    ON CONFLICT DO NOTHING"""
_KNOWN = """
    SELECT sequence, user_id, item_id, timestamp, action, value FROM events JOIN names ON number = user WHERE key_digest = ?"""
_ERASED_SINCE = "SELECT 1 FROM erasures WHERE digest = ? AND number > ?"
_ERASED = """
    SELECT sequence FROM erased_events WHERE digest = :key
    UNION ALL SELECT sequence FROM events WHERE key_digest = :key AND user IN (SELECT number FROM leaving)"""
_SLICE = "(SELECT sequence FROM events WHERE user = ? ORDER BY timestamp, sequence LIMIT ?)"
_KNOWN_AS_ERASED = f"""
    INSERT OR IGNORE INTO erased_events (digest, sequence)
    SELECT key_digest, sequence FROM events WHERE sequence IN {_SLICE} AND key_digest IS NOT NULL"""  # noqa: S608 - of constants
_DELETE_SLICE = f"DELETE FROM events WHERE sequence IN {_SLICE}"  # noqa: S608 - as above
_LEAVES = "INSERT INTO leaving (number, digest) SELECT number, digest FROM users WHERE number = ?"
_UNFINDABLE = "UPDATE users SET digest = randomblob(32), events = 0 WHERE number = ?"
_PASSED_OVER = """
    INSERT OR IGNORE INTO erased_events (digest, sequence) SELECT :key, 0 WHERE NOT EXISTS (SELECT 1 FROM events WHERE key_digest = :key)"""
_LATEST = """
    SELECT item_id, timestamp, action, value FROM events WHERE user = ? AND timestamp <= ? ORDER BY timestamp DESC, sequence DESC LIMIT ?"""

_RECENT = """
    SELECT user_id, events FROM (SELECT * FROM users ORDER BY number DESC LIMIT ?) JOIN names USING (number)
    WHERE tenant = ? AND events > 0 ORDER BY number DESC LIMIT ?"""
# As long as the name was, so that SQLite writes it in the name's place.
_OVERWRITE_NAME = """
    UPDATE names SET tenant = CAST(zeroblob(length(CAST(tenant AS BLOB))) AS TEXT),
        user_id = CAST(zeroblob(length(CAST(user_id AS BLOB))) AS TEXT) WHERE number = ?"""
_RENAME = """
    UPDATE users SET digest = user_digest(tenant, user_id) FROM names WHERE names.number = users.number AND events > 0"""


def append(connection: sqlite3.Connection, digests: Digests, events: Sequence[Event], repeated: Mapping[int, int]) -> list[Stored]:
    """Store the events; those in `repeated` repeat an earlier one of the batch. Raises InvalidRequest at a key of another event."""
    numbers: dict[tuple[str, str], int] = {}
    stored: list[Stored] = []
    for position, event in enumerate(events):
        if position in repeated:
            stored.append(Stored(stored[repeated[position]].sequence, duplicate=True))
            continue
        key = None if event.idempotency_key is None else digests.event(event.tenant, event.idempotency_key)
        if erased := _erased(connection, key):
            stored.append(erased)
            continue
        name = (event.tenant, event.user_id)
        if name not in numbers:
            numbers[name] = _user_number(connection, digests, *name)
        stored.append(_append_one(connection, position, event, numbers[name], key))
    new = [(event, one) for event, one in zip(events, stored, strict=True) if not one.duplicate]
    _count(connection, [(numbers[event.tenant, event.user_id], one.sequence) for event, one in new])
    return stored


def pass_over(connection: sqlite3.Connection, keys: Sequence[bytes]) -> None:
    """Have the keys of these digests, less those of stored events, count as erased events' keys. The place they tell is 0."""
    connection.executemany(_PASSED_OVER, [{"key": key} for key in keys])


def history(connection: sqlite3.Connection, digests: Digests, tenant: str, user_id: str, *, limit: int, until: int | None) -> StoredHistory:
    """The latest behaviours not after `until`, and the version and the number of all that they were read at."""
    digest = digests.user(tenant, user_id)
    user = connection.execute("SELECT number, events FROM users WHERE digest = ?", (digest,)).fetchone()
    rows = connection.execute(_LATEST, (user[0], latest(until), limit)).fetchall() if user else []
    return StoredHistory(tuple(_behaviour(*row) for row in reversed(rows)), version(connection, digest), user[1] if user else 0)


def version(connection: sqlite3.Connection, digest: bytes) -> str:
    """The version of the user of this digest, read from one row of an index; from a second one where the user has no events."""
    row = connection.execute("SELECT latest, identity FROM users, store WHERE digest = ?", (digest,)).fetchone()
    if row:
        return version_of(row[1], row[0], None)
    erasure = connection.execute("SELECT number, identity FROM erasures, store WHERE digest = ?", (digest,)).fetchone()
    return version_of(erasure[1], None, erasure[0]) if erasure else ""


def erase(connection: sqlite3.Connection, ledger: Ledger, digest: bytes) -> int:
    """Delete the user of this digest, after noting it in the ledger; of many events some are left to `delete_some`. Returns how many events
    that are. An erasure where there is no such user is noted too, as another copy of the store may hold the user, but that once while the
    store is open.
    """
    events = _delete(connection, digest)
    if events is None and connection.execute(_ERASED_SINCE, (digest, ledger.before)).fetchone():
        return 0
    noted = connection.execute("INSERT OR REPLACE INTO erasures (digest) VALUES (?)", (digest,))
    ledger.note({digest: noted.lastrowid or 0})
    return events or 0


def catch_up(connection: sqlite3.Connection, ledger: Ledger) -> bool:
    """Erase the users that were erased from a later copy of this store, and note in the ledger those that were erased from this one.
    Numbers go on from the ledger's, and all users get new versions. Returns whether anything was to be erased.

    The ledger's numbers of what is made up for stay as they are: by another one, a later copy would erase users anew that came back to it.
    """
    noted, held = ledger.read(), dict[bytes, int](connection.execute("SELECT digest, coalesce(noted, number) FROM erasures").fetchall())
    if again := missing(noted, held):
        for user in again:
            _delete(connection, user)
        first = max(latest_erasure(connection), *noted.values()) + 1
        rows = [(user, number, noted[user]) for number, user in enumerate(again, first)]
        connection.executemany("INSERT OR REPLACE INTO erasures (digest, number, noted) VALUES (?, ?, ?)", rows)
        connection.execute("UPDATE store SET identity = lower(hex(randomblob(4)))")
    ledger.note(missing(held, noted))
    return bool(again)


def latest_erasure(connection: sqlite3.Connection) -> int:
    """The number of the latest erasure, 0 where there is none."""
    return int(connection.execute("SELECT coalesce(max(number), 0) FROM erasures").fetchone()[0])


def _delete(connection: sqlite3.Connection, digest: bytes) -> int | None:
    """Have the user of this digest found no more, and delete it as far as one slice goes; returns how many events that are, None where
    there is no such user.
    """
    user = connection.execute("SELECT number, events FROM users WHERE digest = ?", (digest,)).fetchone()
    if user is None:
        return None
    for statement in (_OVERWRITE_NAME, _LEAVES, _UNFINDABLE):
        connection.execute(statement, user[:1])
    _delete_slice(connection, user[0])
    return int(user[1])


def delete_some(connection: sqlite3.Connection) -> bool:
    """Delete a slice of what erasures have left; returns whether there was any."""
    user = connection.execute("SELECT number FROM leaving LIMIT 1").fetchone()
    if user is not None:
        _delete_slice(connection, user[0])
    return user is not None


def is_gone(connection: sqlite3.Connection, digest: bytes | None = None) -> bool:
    """Whether erasures have left nothing of the user of this digest, or of any user."""
    return connection.execute("SELECT 1 FROM leaving WHERE ?1 IS NULL OR digest = ?1", (digest,)).fetchone() is None


def _delete_slice(connection: sqlite3.Connection, user: int) -> None:
    """Delete some events of a user that leaves, and with the last of them the user."""
    connection.execute(_KNOWN_AS_ERASED, (user, SLICE))
    if connection.execute(_DELETE_SLICE, (user, SLICE)).rowcount < SLICE:
        connection.execute("DELETE FROM users WHERE number = ?", (user,))


def users(connection: sqlite3.Connection, tenant: str, limit: int) -> list[StoredUser]:
    found = connection.execute(_RECENT, (RECENT_USERS, tenant, limit)).fetchall()
    return [StoredUser(user_id, events) for user_id, events in found]


def statistics(connection: sqlite3.Connection) -> StoreStatistics:
    users, events = connection.execute("SELECT count(*), coalesce(sum(events), 0) FROM users WHERE events > 0").fetchone()
    return StoreStatistics(events, users)


def _erased(connection: sqlite3.Connection, key: bytes | None) -> Stored | None:
    """The place that the event of this key had, if its user was erased."""
    row = key and connection.execute(_ERASED, {"key": key}).fetchone()
    return Stored(row[0], duplicate=True) if row else None


def _user_number(connection: sqlite3.Connection, digests: Digests, tenant: str, user_id: str) -> int:
    digest = digests.user(tenant, user_id)
    row = connection.execute("SELECT number FROM users WHERE digest = ?", (digest,)).fetchone()
    if row is None:
        row = connection.execute("INSERT INTO names (tenant, user_id) VALUES (?, ?) RETURNING number", (tenant, user_id)).fetchone()
        connection.execute("INSERT INTO users (number, digest) VALUES (?, ?)", (row[0], digest))
    return int(row[0])


def _append_one(connection: sqlite3.Connection, position: int, event: Event, user: int, key: bytes | None) -> Stored:
    what = event.behaviour
    value = None if what.value is None else float(what.value)  # SQLite takes no larger integers than of 64 bits
    cursor = connection.execute(_STORE, (user, what.timestamp, what.item_id, what.action.value, value, key))
    if cursor.rowcount and cursor.lastrowid is not None:
        return Stored(cursor.lastrowid)
    sequence, user_id, *behaviour = connection.execute(_KNOWN, (key,)).fetchone()
    refuse_other_content(position, event, Event(user_id, _behaviour(*behaviour)))
    return Stored(sequence, duplicate=True)


def _count(connection: sqlite3.Connection, new: Sequence[tuple[int, int]]) -> None:
    """Update the users' counts and latest sequences. `new`: (user's number, event's sequence), in the order of sequences."""
    latest, counts = dict(new), Counter(user for user, _ in new)  # sequences grow, so the last of a user is its latest
    changes = [(latest[user], count, user) for user, count in counts.items()]
    connection.executemany("UPDATE users SET latest = ?, events = events + ? WHERE number = ?", changes)


def _behaviour(item_id: str, timestamp: int, action: str, value: float | None) -> Behaviour:
    return Behaviour(item_id, timestamp, ACTIONS.get(action) or Action(action), value)


def keep_key(connection: sqlite3.Connection, digests: Digests) -> None:
    """Make all digests by the given key, also those that were made without one, and record the key's check in the store.

    Users with digests by a lost key are found again. Their events' keys are not: events sent again are stored again.
    """
    plain = connection.execute("SELECT number, digest FROM erasures").fetchall()
    connection.executemany("UPDATE erasures SET digest = ? WHERE number = ?", [(digests.keyed(digest), number) for number, digest in plain])
    if connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'names'").fetchone():
        connection.execute(_RENAME)
    connection.execute("UPDATE store SET key_check = ?", (digests.check,))
