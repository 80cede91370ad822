"""Events as rows: the statements, each of which takes one round trip to the server."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from cluster.events.digests import Digests
from cluster.events.ledger import Ledger, missing
from cluster.events.rules import latest, refuse_other_content, version_of
from cluster.events.store import RECENT_USERS, Event, Stored, StoredHistory, StoredUser, StoreStatistics
from cluster.values import ACTIONS, Action, Behaviour
from integrations.postgresql.database import Unsure
from integrations.postgresql.keyed import make_functions

logger = logging.getLogger(__name__)
ERASE_WITHIN_S = 600.0
"""The time for each statement of an erasure: a shared user id, such as "guest", may have millions of events."""

# Makes the new users, numbered in the order of arrival, and locks all users until the commit. Every transaction locks in the order of
# digests, so that there are no deadlocks, and draws its sequences afterwards, so that they grow in the order of arrival.
_LOCK_USERS = """
    WITH asked AS MATERIALIZED (
        SELECT nextval(pg_get_serial_sequence('genrec.users', 'number')) AS number, digest
        FROM (SELECT * FROM unnest($1::bytea[], $2::bigint[]) AS given (digest, position) ORDER BY position) AS arrived
    )
    INSERT INTO genrec.users (number, digest) OVERRIDING SYSTEM VALUE SELECT number, digest FROM asked ORDER BY digest
    ON CONFLICT (digest) DO UPDATE SET latest = users.latest
    RETURNING digest, number, latest = 0 AS new"""
_NAME = "INSERT INTO genrec.names (number, tenant, user_id) SELECT * FROM unnest($1::bigint[], $2::text[], $3::text[])"
_STORE = """
    WITH asked AS MATERIALIZED (
        SELECT nextval('genrec.arrivals') AS sequence, given.* FROM {given}
    ), stored AS (
        INSERT INTO genrec.events (sequence, user_number, timestamp, item_id, action, value, key_digest)
        SELECT sequence, user_number, timestamp, item_id, action, value, key_digest FROM asked
        WHERE NOT EXISTS (SELECT FROM genrec.erased_events WHERE digest = asked.key_digest) ORDER BY sequence
        ON CONFLICT (key_digest) WHERE key_digest IS NOT NULL DO NOTHING
        RETURNING sequence, user_number
    ), counted AS (
        UPDATE genrec.users SET latest = fresh.latest, events = users.events + fresh.events
        FROM (SELECT user_number, max(sequence) AS latest, count(*) AS events FROM stored GROUP BY user_number) AS fresh
        WHERE number = fresh.user_number
    )
    SELECT position, sequence FROM asked JOIN stored USING (sequence)"""
_COLUMNS = "position, user_number, timestamp, item_id, action, value, key_digest"
_TYPES = ("bigint", "bigint", "bigint", "text", "text", "double precision", "bytea")
_ARRAYS = ", ".join(f"${number}::{kind}[]" for number, kind in enumerate(_TYPES, start=1))
_STORE_ARRAYS = _STORE.format(given=f"unnest({_ARRAYS}) AS given ({_COLUMNS})")
_STORE_COPIED = _STORE.format(given="(SELECT * FROM pg_temp.genrec_copied ORDER BY position) AS given")
_COPIED = "CREATE TEMPORARY TABLE IF NOT EXISTS genrec_copied ({}) ON COMMIT DELETE ROWS".format(
    ", ".join(f"{name} {kind}" for name, kind in zip(_COLUMNS.split(", "), _TYPES, strict=True))
)
_RECENT = """
    SELECT user_id, events FROM (SELECT * FROM genrec.users ORDER BY number DESC LIMIT $1) AS recent JOIN genrec.names USING (number)
    WHERE tenant = $2 AND events > 0 ORDER BY number DESC LIMIT $3"""
_KNOWN = """
    SELECT position, sequence, user_id, item_id, timestamp, action, value
    FROM unnest($1::bigint[], $2::bytea[]) AS asked (position, key)
    JOIN genrec.events ON key_digest = key JOIN genrec.names ON number = user_number"""
_USER = """
    FROM genrec.store LEFT JOIN genrec.users ON users.digest = $1 LEFT JOIN genrec.erasures ON erasures.digest = $1"""
_VERSION = f"SELECT identity, latest, erasures.number AS erasure {_USER}"
_HISTORY = f"""SELECT identity, latest, events, erasures.number AS erasure, recent.* {_USER}
    LEFT JOIN LATERAL (
        SELECT item_id, timestamp, action, value FROM genrec.events WHERE user_number = users.number AND timestamp <= $3
        ORDER BY timestamp DESC, sequence DESC LIMIT $2
    ) AS recent ON true"""  # noqa: S608 - put together of constants
_GONE = "SELECT digest, sequence FROM genrec.erased_events WHERE digest = ANY($1::bytea[])"
_PASSED_OVER = """
    INSERT INTO genrec.erased_events (digest, sequence) SELECT key, 0 FROM unnest($1::bytea[]) AS given (key)
    WHERE NOT EXISTS (SELECT FROM genrec.events WHERE key_digest = key) ORDER BY key ON CONFLICT DO NOTHING"""
_WITHOUT_EVENTS = "DELETE FROM genrec.users WHERE digest = ANY($1::bytea[]) AND events = 0"
_LOCK_USER = "SELECT number FROM genrec.users WHERE digest = $1 FOR UPDATE"
_ERASE = """
    WITH erased AS (DELETE FROM genrec.users WHERE number = $1 RETURNING events),
    noted AS (
        INSERT INTO genrec.erasures (digest) VALUES ($2) ON CONFLICT (digest) DO UPDATE SET number = nextval('genrec.erasure_numbers')
        RETURNING number
    ), known AS (
        INSERT INTO genrec.erased_events (digest, sequence)
        SELECT key_digest, sequence FROM genrec.events WHERE user_number = $1 AND key_digest IS NOT NULL ON CONFLICT DO NOTHING
    )
    SELECT events, noted.number FROM erased, noted"""
_NOTE_ALONE = """
    INSERT INTO genrec.erasures (digest) VALUES ($1) ON CONFLICT (digest) DO UPDATE SET number = nextval('genrec.erasure_numbers')
    WHERE erasures.number <= $2 RETURNING number"""
_ERASE_AGAIN = """
    INSERT INTO genrec.erasures (digest, number) SELECT * FROM unnest($1::bytea[], $2::bigint[])
    ON CONFLICT (digest) DO UPDATE SET number = excluded.number"""
_RENAME = "UPDATE genrec.users SET digest = pg_temp.user_digest(tenant, user_id) FROM genrec.names WHERE names.number = users.number"
_CAME_BACK = (
    "erased users that were in the event store again, and are erased as its ledger %s says: %d; where gateways have served them, start the "
    "application anew and send POST /v1/cache:invalidate {}, as caches and engines keep what was computed of them"
)
_GO_ON = "SELECT setval('genrec.erasure_numbers', greatest($1, nextval('genrec.erasure_numbers')))"


async def append(
    connection: Any, digests: Digests, events: Sequence[Event], repeated: Mapping[int, int], *, copy: bool = False
) -> list[Stored]:
    """Store the events, of which those in `repeated` repeat an earlier one of the batch. `copy`: by COPY, which is faster for many.

    Raises InvalidRequest at a key of another event.
    """
    users = [digests.user(event.tenant, event.user_id) for event in events]
    locked = await _lock_users(connection, users)
    rows = [
        _row(position, event, locked[user]["number"], digests)
        for position, (event, user) in enumerate(zip(events, users, strict=True))
        if position not in repeated
    ]
    found = {position: Stored(sequence) for position, sequence in await _store(connection, rows, copy=copy)}
    if new := {locked[users[at]]["number"]: events[at] for at in found if locked[users[at]]["new"]}:
        names = [event.tenant for event in new.values()], [event.user_id for event in new.values()]
        await connection.execute(_NAME, list(new), *names)
    if len(found) < len(rows):
        found |= await _known(connection, digests, {row[0]: events[row[0]] for row in rows if row[0] not in found})
    found |= {position: Stored(found[original].sequence, duplicate=True) for position, original in repeated.items()}
    return [found[position] for position in range(len(events))]


async def pass_over(connection: Any, keys: Sequence[bytes]) -> None:
    """Have the keys of these digests, less those of stored events, count as erased events' keys. The place they tell is 0."""
    await connection.execute(_PASSED_OVER, keys)


async def history(connection: Any, user: bytes, *, limit: int, until: int | None) -> StoredHistory:
    """The latest behaviours not after `until` of the user of this digest, and the version and the number of all that they were read at."""
    rows = await connection.fetch(_HISTORY, user, limit, latest(until))
    known = [_behaviour(row) for row in reversed(rows) if row["item_id"] is not None]
    first = rows[0]
    return StoredHistory(tuple(known), version_of(first["identity"], first["latest"], first["erasure"]), first["events"] or 0)


async def version(connection: Any, user: bytes) -> str:
    row = await connection.fetchrow(_VERSION, user)
    return version_of(row["identity"], row["latest"], row["erasure"])


async def erase(connection: Any, ledger: Ledger, digest: bytes) -> int:
    """Delete the user of this digest with all events, after noting it in the ledger. Where a ledger is kept, an erasure is noted
    where there is no such user too, as another copy of the store may hold the user, but that once while the store is open.
    """
    if erased := await _delete(connection, digest):
        events, number = erased["events"], erased["number"]
    else:
        events, number = 0, ledger.place and await connection.fetchval(_NOTE_ALONE, digest, ledger.before)
    if number is not None:
        await asyncio.to_thread(ledger.note, {digest: number})
    return int(events)


async def catch_up(connection: Any, ledger: Ledger) -> None:
    """Erase the users that were erased from a later copy of this store, and note in the ledger those that were erased from this one.
    Numbers go on from the ledger's, and all users get new versions.

    What is made up for is held under the ledger's number: by another one, a later copy would erase users anew that came back to it.
    """
    if ledger.place is None:
        return
    await connection.execute("LOCK TABLE genrec.erasures IN SHARE ROW EXCLUSIVE MODE")  # what stands in the ledger is committed, or undone
    rows = await connection.fetch("SELECT digest, number FROM genrec.erasures")
    noted, held = await asyncio.to_thread(ledger.read), {row["digest"]: row["number"] for row in rows}
    if again := missing(noted, held):
        await connection.execute(_GO_ON, max(noted.values()))
        back = await connection.fetch("SELECT digest FROM genrec.users WHERE digest = ANY($1::bytea[])", list(again))
        for user in back:
            await _delete(connection, user["digest"])
        if back:
            logger.warning(_CAME_BACK, ledger.place, len(back))
        await connection.execute(_ERASE_AGAIN, list(again), list(again.values()))
        await tell_anew(connection)
    await asyncio.to_thread(ledger.note, missing(held, noted))


async def latest_erasure(connection: Any) -> int:
    """The number of the latest erasure, 0 where there is none."""
    return int(await connection.fetchval("SELECT coalesce(max(number), 0) FROM genrec.erasures"))


async def _delete(connection: Any, digest: bytes) -> Mapping[str, Any] | None:
    """Delete the user of this digest; returns how many `events` that were and the erasure's `number`, None where there is no such user."""
    await connection.execute("SET LOCAL lock_timeout = 0")  # statement_timeout ends this wait, and ERASE_WITHIN_S later ones
    if (user := await connection.fetchval(_LOCK_USER, digest)) is None:
        return None
    await connection.execute("SET LOCAL statement_timeout = 0")  # in its place comes ERASE_WITHIN_S
    erased: Mapping[str, Any] = await connection.fetchrow(_ERASE, user, digest, timeout=ERASE_WITHIN_S)
    return erased


async def tell_anew(connection: Any) -> None:
    """Give all users new versions: in this older copy of the store, the numbers in versions given before go to other events."""
    await connection.execute("UPDATE genrec.store SET identity = left(md5(random()::text || clock_timestamp()::text), 8)")


async def keep_key(connection: Any, digests: Digests) -> None:
    """Make all digests by the given key, also those that were made without one, and record the key's check in the store.

    Users with digests by a lost key are found again. Their events' keys are not: events sent again are stored again.
    """
    plain = [row["digest"] for row in await connection.fetch("SELECT digest FROM genrec.erasures")]
    changes = [(digests.keyed(digest), digest) for digest in plain]
    await connection.executemany("UPDATE genrec.erasures SET digest = $1 WHERE digest = $2", changes)
    if await connection.fetchval("SELECT to_regclass('genrec.names')"):
        await make_functions(connection, digests)
        await connection.execute(_RENAME)
    await connection.execute("UPDATE genrec.store SET key_check = $1", digests.check)


async def users(connection: Any, tenant: str, limit: int) -> list[StoredUser]:
    found = await connection.fetch(_RECENT, RECENT_USERS, tenant, limit)
    return [StoredUser(row["user_id"], row["events"]) for row in found]


async def is_there(connection: Any) -> bool:
    """Whether the database has a store, of whichever version."""
    return await connection.fetchval("SELECT to_regclass('genrec.schema_versions')") is not None


async def statistics(connection: Any) -> StoreStatistics:
    row = await connection.fetchrow("SELECT count(*) AS users, coalesce(sum(events), 0)::bigint AS events FROM genrec.users")
    return StoreStatistics(row["events"], row["users"])


async def _lock_users(connection: Any, digests: Sequence[bytes]) -> dict[bytes, Mapping[str, Any]]:
    arrived = {digest: position for position, digest in enumerate(dict.fromkeys(digests))}
    ordered = sorted(arrived)
    return {row["digest"]: row for row in await connection.fetch(_LOCK_USERS, ordered, [arrived[digest] for digest in ordered])}


def _row(position: int, event: Event, user: int, digests: Digests) -> tuple[Any, ...]:
    what, key = event.behaviour, event.idempotency_key
    digest = None if key is None else digests.event(event.tenant, key)
    return position, user, what.timestamp, what.item_id, what.action.value, what.value, digest


async def _store(connection: Any, rows: Sequence[tuple[Any, ...]], *, copy: bool) -> list[tuple[int, int]]:
    """(position, sequence) of the rows whose keys are new."""
    if not copy:
        found = await connection.fetch(_STORE_ARRAYS, *(list(column) for column in zip(*rows, strict=True)))
    else:
        await connection.execute(_COPIED)
        await connection.copy_records_to_table("genrec_copied", records=rows, columns=_COLUMNS.split(", "))
        found = await connection.fetch(_STORE_COPIED)
    return [(row["position"], row["sequence"]) for row in found]


async def _known(connection: Any, digests: Digests, duplicates: Mapping[int, Event]) -> dict[int, Stored]:
    """The stored places of events with known keys, also of those of erased users. Raises InvalidRequest at a key of another event."""
    keys = {at: digests.event(event.tenant, event.idempotency_key or "") for at, event in duplicates.items()}
    rows = await connection.fetch(_KNOWN, list(keys), list(keys.values()))
    for row in sorted(rows, key=lambda row: row["position"]):
        refuse_other_content(row["position"], duplicates[row["position"]], Event(row["user_id"], _behaviour(row)))
    found = {row["position"]: Stored(row["sequence"], duplicate=True) for row in rows}
    if len(found) < len(duplicates):
        found |= await _gone(connection, {key: at for at, key in keys.items() if at not in found})
        users = [digests.user(event.tenant, event.user_id) for event in duplicates.values()]
        await connection.execute(_WITHOUT_EVENTS, users)  # which have just been locked, and are not made by that
    return found


async def _gone(connection: Any, sought: Mapping[bytes, int]) -> dict[int, Stored]:
    """The places that erased events had."""
    found = {sought[row["digest"]]: Stored(row["sequence"], duplicate=True) for row in await connection.fetch(_GONE, list(sought))}
    if len(found) < len(sought):
        raise Unsure("an event whose key was known has just been erased")
    return found


def _behaviour(row: Mapping[str, Any]) -> Behaviour:
    return Behaviour(row["item_id"], row["timestamp"], ACTIONS.get(row["action"]) or Action(row["action"]), row["value"])
