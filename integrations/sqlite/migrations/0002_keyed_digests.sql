-- Which key the digests of erased users were made with; those of schema version 1, made without one, get theirs with it.
ALTER TABLE store ADD COLUMN key_check BLOB;

-- Idempotency keys of erased events, as digests, and the sequences they had: an event that is sent again does not bring its user back.
CREATE TABLE erased_events (
    digest   BLOB PRIMARY KEY,
    sequence INTEGER NOT NULL
) STRICT, WITHOUT ROWID;
