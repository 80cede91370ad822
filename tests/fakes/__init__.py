"""What plays a part in the tests of others: a clock, handles, stages and their backends, a service behind the routes and its callers."""
