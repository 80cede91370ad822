"""PostgreSQL: events in a database that many machines share."""
