-- Who this store is: versions of another one, or of one made anew, are never taken for its own.
CREATE TABLE store (identity TEXT NOT NULL);

INSERT INTO store (identity) VALUES (lower(hex(randomblob(4))));

-- A row for each user with events; latest is the sequence of the one that arrived last.
CREATE TABLE users (
    number  INTEGER PRIMARY KEY,
    tenant  TEXT NOT NULL,
    user_id TEXT NOT NULL,
    latest  INTEGER NOT NULL DEFAULT 0,
    events  INTEGER NOT NULL DEFAULT 0,
    UNIQUE (tenant, user_id)
) STRICT;

-- AUTOINCREMENT: a sequence is never given twice, not even the largest one's after its event was erased.
CREATE TABLE events (
    sequence        INTEGER PRIMARY KEY AUTOINCREMENT,
    user            INTEGER NOT NULL REFERENCES users (number) ON DELETE CASCADE,
    timestamp       INTEGER NOT NULL,
    item_id         TEXT NOT NULL,
    action          TEXT NOT NULL,
    value           REAL,
    tenant          TEXT NOT NULL,
    idempotency_key TEXT
) STRICT;

CREATE INDEX events_in_time ON events (user, timestamp, sequence);

CREATE UNIQUE INDEX events_by_key ON events (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;

-- Users who were erased: a digest of the name, and a number that is never given twice.
CREATE TABLE erasures (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE
) STRICT;
