"""SQLite: events in a file of this machine, without a server."""
