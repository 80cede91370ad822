-- PostgreSQL does not overwrite what is deleted: a copy stays in a page, a VACUUM too leaves it there, and a page of an index that is split
-- has another. So a user's name stands in one small table without an index of it, which VACUUM FULL writes anew. All else finds users, and
-- events of known keys, by digests. No statistics are kept of it, as these are samples of the names.
CREATE TABLE genrec.names (
    number  BIGINT PRIMARY KEY REFERENCES genrec.users (number) ON DELETE CASCADE,
    tenant  TEXT COLLATE "C" NOT NULL,
    user_id TEXT COLLATE "C" NOT NULL
);

ALTER TABLE genrec.names ALTER COLUMN tenant SET STATISTICS 0, ALTER COLUMN user_id SET STATISTICS 0;

INSERT INTO genrec.names (number, tenant, user_id) SELECT number, tenant, user_id FROM genrec.users ORDER BY number;

-- Which writes tables and indexes to new files.
ALTER TABLE genrec.users DROP CONSTRAINT users_tenant_user_id_key;

ALTER TABLE genrec.users ALTER COLUMN user_id TYPE BYTEA USING pg_temp.user_digest(tenant, user_id);

ALTER TABLE genrec.users RENAME COLUMN user_id TO digest;

ALTER TABLE genrec.users DROP COLUMN tenant;

ALTER TABLE genrec.users ADD CONSTRAINT users_digest_key UNIQUE (digest);

DROP INDEX genrec.events_by_key;

ALTER TABLE genrec.events ALTER COLUMN idempotency_key TYPE BYTEA USING pg_temp.event_digest(tenant, idempotency_key);

ALTER TABLE genrec.events RENAME COLUMN idempotency_key TO key_digest;

ALTER TABLE genrec.events DROP COLUMN tenant;

CREATE UNIQUE INDEX events_by_key ON genrec.events (key_digest) WHERE key_digest IS NOT NULL;
