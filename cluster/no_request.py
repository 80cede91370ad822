"""The context of work that requests share, or that outlives them."""

from contextvars import Context, copy_context


def no_requests_context() -> Context:
    """A context to make tasks in, taken where an object is made, which is to be outside of requests: Serve cancels calls that were made in
    the context of a request which is cancelled, whoever waits for them.
    """
    return copy_context()
