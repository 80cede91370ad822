-- The number under which the ledger has an erasure that was made up for as the store was opened, which may be another user's here too,
-- NULL: it is the row's own.
ALTER TABLE erasures ADD COLUMN noted INTEGER;
