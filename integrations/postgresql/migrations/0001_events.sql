-- Who this store is: versions of another one, or of one made anew, are never taken for its own.
CREATE TABLE genrec.store (identity TEXT NOT NULL);

INSERT INTO genrec.store (identity) VALUES (left(md5(random()::text || clock_timestamp()::text), 8));

-- A row for each user with events; latest is the sequence of the one that arrived last. Its lock is what orders a user's arrivals.
CREATE TABLE genrec.users (
    number  BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    tenant  TEXT COLLATE "C" NOT NULL,
    user_id TEXT COLLATE "C" NOT NULL,
    latest  BIGINT NOT NULL DEFAULT 0,
    events  BIGINT NOT NULL DEFAULT 0,
    UNIQUE (tenant, user_id)
);

CREATE SEQUENCE genrec.arrivals;

CREATE TABLE genrec.events (
    sequence        BIGINT PRIMARY KEY,
    user_number     BIGINT NOT NULL REFERENCES genrec.users (number) ON DELETE CASCADE,
    timestamp       BIGINT NOT NULL,
    item_id         TEXT NOT NULL,
    action          TEXT NOT NULL,
    value           DOUBLE PRECISION,
    tenant          TEXT COLLATE "C" NOT NULL,
    idempotency_key TEXT COLLATE "C"
);

CREATE INDEX events_in_time ON genrec.events (user_number, timestamp, sequence);

CREATE UNIQUE INDEX events_by_key ON genrec.events (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;

-- Users who were erased: a digest of the name, and a number that is never given twice.
CREATE SEQUENCE genrec.erasure_numbers;

CREATE TABLE genrec.erasures (
    digest BYTEA PRIMARY KEY,
    number BIGINT NOT NULL DEFAULT nextval('genrec.erasure_numbers')
);
