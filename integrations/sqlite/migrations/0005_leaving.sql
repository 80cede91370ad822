-- Erased users that still have events, which are deleted slice by slice. In `users` such a user has another digest and no events, in `names`
-- zeros; `digest` is that of the name, by which an erasure finds out that all events are gone.
CREATE TABLE leaving (
    number INTEGER PRIMARY KEY REFERENCES users (number) ON DELETE CASCADE,
    digest BLOB NOT NULL
) STRICT;
