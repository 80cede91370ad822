-- SQLite overwrites what is deleted, but not the copies that it leaves in a page as it moves rows of a table or an index to another one.
-- So a user's name stands in one place of the file, from which it never moves: in rows that are added at the end, keep their size and are
-- never deleted. An erased user's is overwritten with zeros. All else finds users, and events of known keys, by digests.
DROP INDEX events_in_time;

DROP INDEX events_by_key;

ALTER TABLE events RENAME TO events_before;

ALTER TABLE users RENAME TO users_before;

-- A number is never given twice, as no row is deleted.
CREATE TABLE names (
    number  INTEGER PRIMARY KEY,
    tenant  TEXT NOT NULL,
    user_id TEXT NOT NULL
) STRICT;

-- A row for each user with events, of the name of that number; latest is the sequence of the event that arrived last.
CREATE TABLE users (
    number INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    latest INTEGER NOT NULL DEFAULT 0,
    events INTEGER NOT NULL DEFAULT 0
) STRICT;

-- AUTOINCREMENT: a sequence is never given twice, not even the largest one's after its event was erased.
CREATE TABLE events (
    sequence   INTEGER PRIMARY KEY AUTOINCREMENT,
    user       INTEGER NOT NULL REFERENCES users (number) ON DELETE CASCADE,
    timestamp  INTEGER NOT NULL,
    item_id    TEXT NOT NULL,
    action     TEXT NOT NULL,
    value      REAL,
    key_digest BLOB
) STRICT;

INSERT INTO sqlite_sequence (name, seq) SELECT 'events', seq FROM sqlite_sequence WHERE name = 'events_before';

INSERT INTO names (number, tenant, user_id) SELECT number, tenant, user_id FROM users_before ORDER BY number;

INSERT INTO users (number, digest, latest, events) SELECT number, user_digest(tenant, user_id), latest, events FROM users_before;

INSERT INTO events (sequence, user, timestamp, item_id, action, value, key_digest)
SELECT sequence, user, timestamp, item_id, action, value, iif(idempotency_key IS NULL, NULL, event_digest(tenant, idempotency_key))
FROM events_before ORDER BY sequence;

-- Which overwrites their pages, with all copies that were left in them.
DROP TABLE events_before;

DROP TABLE users_before;

CREATE INDEX events_in_time ON events (user, timestamp, sequence);

CREATE UNIQUE INDEX events_by_key ON events (key_digest) WHERE key_digest IS NOT NULL;
