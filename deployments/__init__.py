"""Ray Serve, HTTP and the command line: the only place where the parts are wired together."""
