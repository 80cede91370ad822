"""HTTP, without Ray: the edge that lets requests in, the routes, their messages and problems."""
