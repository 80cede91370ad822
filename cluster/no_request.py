"""The context of work that requests share, or that outlives them."""

from contextvars import Context, copy_context


def no_requests_context() -> Context:
    """A context to make tasks in. It is taken where an object is made, which is to be outside of requests: Serve cancels the calls that
    were made in a cancelled request's context, also those that other requests wait for.
    """
    return copy_context()
