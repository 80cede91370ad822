-- Which key the digests of erased users were made with; those of schema version 1, made without one, get theirs with it.
ALTER TABLE genrec.store ADD COLUMN key_check BYTEA;

-- The key itself, where none is given by GENREC_ERASURE_KEY.
ALTER TABLE genrec.store ADD COLUMN own_key BYTEA;

-- Idempotency keys of erased events, as digests, and the sequences they had: an event that is sent again does not bring its user back.
CREATE TABLE genrec.erased_events (
    digest   BYTEA PRIMARY KEY,
    sequence BIGINT NOT NULL
);
