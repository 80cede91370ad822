"""What plays a part in the tests of others: a clock, deployments' handles, stages and their backends, what is behind the HTTP
routes, and its callers."""
